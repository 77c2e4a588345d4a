# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan 0.2.2 on CPU ranks over gloo.

torchtitan assumes an accelerator in nine places. `enable_cpu` adapts those places from outside, so that stock
torchtitan code, configuration and parallelism run unmodified on a laptop or in CI. It changes nothing when an
accelerator is available, and nothing about what is computed.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from torchtitan_cad.integration import cpu


def enable_cpu() -> bool:
    """Make torchtitan train on CPU when there is no accelerator, and return whether it will.

    Call it before anything of torchtitan is imported; later calls do nothing. Raises RuntimeError if that is too late.
    """
    return cpu.enable_cpu(before_import=_replace_moe_triton_kernels)


def _replace_moe_triton_kernels() -> None:
    """`import torchtitan` reaches one Triton file, whose kernels do not run on CPU; CPU builds of torch lack triton.

    That file alone is loaded with a stand-in for `triton`, which would else make dynamo and Inductor believe that
    Triton is installed; its reference for CPU takes the place of its kernel.
    """
    name = "torchtitan.models.moe.kernels"
    torchtitan: Any = find_spec("torchtitan")
    path = Path(torchtitan.submodule_search_locations[0], "models/moe/kernels.py")
    spec: Any = spec_from_file_location(name, path)
    kernels: Any = module_from_spec(spec)
    stand_in = MagicMock()
    triton = {"triton": stand_in, "triton.language": stand_in}
    with patch.dict(sys.modules, triton):
        spec.loader.exec_module(kernels)
    kernels.fill_indices_wrapper = kernels.fill_indices_cpu
    sys.modules[name] = kernels
