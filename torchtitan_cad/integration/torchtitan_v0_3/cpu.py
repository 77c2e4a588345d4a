# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan 0.3.0 on CPU ranks over gloo."""

import functools
import sys

import torch

from torchtitan_cad.integration.cpu import adapt_torch, import_with_cpu_device


@functools.cache
def enable_cpu() -> bool:
    """Make torchtitan train on CPU when there is no accelerator, and return whether it will.

    Call it before anything of torchtitan is imported. Raises RuntimeError if that is too late.
    """
    if torch.accelerator.is_available():
        return False
    if "torchtitan.tools.utils" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported first, and has bound its device type to 'cuda', but this process has no "
            "accelerator; start training with `python -m torchtitan_cad.train`"
        )
    adapt_torch()
    import_with_cpu_device()
    return True
