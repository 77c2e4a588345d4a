# SPDX-License-Identifier: BSD-3-Clause
"""Keys of the ``[cad]`` table that take one of a few values, and names of the demo's datasets."""

from typing import Any

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
    "python_packages",
    "python_packages_validation",
)
"""Datasets of texts, by which a job is known to need the demo before that is imported."""
