"""Units in which tables and pictures give bytes."""

from __future__ import annotations


def byte_unit(largest: float) -> tuple[float, str]:
    """Return (bytes of a unit, its name) in which ``largest`` is at least 1: GB, MB, kB or B."""
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= scale:
            return scale, name
    return 1.0, "B"
