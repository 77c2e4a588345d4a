# SPDX-License-Identifier: BSD-3-Clause
"""Names of phases in the traces of a profiler."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler


def named(phase: str) -> AbstractContextManager[object]:
    """Return a context that names what runs in it; without a profiler it takes the host no time."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(phase)
    return nullcontext()
