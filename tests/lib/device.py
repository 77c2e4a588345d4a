# SPDX-License-Identifier: BSD-3-Clause
"""Marks of tests that need a CUDA device, and the order not to wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Waiting for the device is an error inside."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
