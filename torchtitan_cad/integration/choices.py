# SPDX-License-Identifier: BSD-3-Clause
"""What the keys of CAD may be in any job, and names of the demo's datasets."""

import math
from typing import Any

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.runtime.kernels.select import KERNELS
from torchtitan_cad.runtime.transport.build import TRANSPORTS

CHOICES: dict[str, tuple[Any, ...]] = {
    "transport": tuple(TRANSPORTS),
    "kernel": tuple(KERNELS),
    "backward": ("auto", "resend", "keep"),
    "placement": ("auto", "balanced", "loader"),
    "documents": ("eos", "row", "positions"),
    "nano_batches": (1, 2),
    "streams": ("auto", "traced", "opaque"),
}

DEMO_TEXTS = (
    "python_stdlib",
    "python_stdlib_validation",
)
"""Datasets of texts, by which a job is known to need the demo before that is imported."""


def check_values(cad: Cad) -> None:
    """Raise ValueError, naming key, value and remedy, for a value that no job can have."""
    for key, choices in CHOICES.items():
        value = getattr(cad, key)
        if value not in choices:
            listed = ", ".join(map(repr, choices))
            raise ValueError(
                f"cad.{key} = {value!r}: set cad.{key} to one of: {listed}"
            )
    if not 0 < cad.heartbeat_seconds < math.inf:
        raise ValueError(
            f"cad.heartbeat_seconds = {cad.heartbeat_seconds}: set a positive number, such as 1.0"
        )
    if not 0 <= cad.servers_port < 2**16:
        raise ValueError(
            f"cad.servers_port = {cad.servers_port}: set a TCP port, such as 29600, or 0 for any that is free"
        )
    cad.planner_config()
    _ = cad.buffer_bytes
