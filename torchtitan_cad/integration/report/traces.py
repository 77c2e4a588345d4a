"""Names by which TensorBoard's profile plugin finds torchtitan's traces."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def name_for_tensorboard(folder: Path, rank: int) -> list[Path]:
    """Give this rank's traces a second name: ``rank0_trace.json`` is ``rank0.pt.trace.json`` as well.

    Args:
        folder: holds torchtitan's ``iteration_N`` folders; it need not exist.

    Returns:
        The new names. Traces that have theirs already are left alone.
    """
    named = []
    for trace in sorted(folder.glob(f"iteration_*/rank{rank}_trace.json")):
        name = trace.with_name(f"rank{rank}.pt.trace.json")
        if not name.exists():
            try:
                os.link(trace, name)
            except OSError:  # a file system without links
                shutil.copyfile(trace, name)
            named.append(name)
    return named
