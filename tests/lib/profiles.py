# SPDX-License-Identifier: BSD-3-Clause
"""Artificial profiles for tests: nothing was measured."""

from collections.abc import Callable

from torchtitan_cad.planning import AttentionShape, Profile
from torchtitan_cad.planning.model.profile import DTYPE_BYTES

LLAMA = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
TILE = 128
QUERIES = (64, 128, 512)
KEYS = (128, 1024, 8192)

Rows = Callable[[int], float]
"""Milliseconds of a row of tiles against that many key tiles."""


def linear(per_tile: float = 0.001, fixed: float = 0.0) -> Rows:
    return lambda tiles: fixed + per_tile * tiles


def make_profile(
    shape: AttentionShape = LLAMA,
    forward: Rows = linear(),  # noqa: B008
    backward: Rows = linear(0.0025),  # noqa: B008
    kernel: str = "cpu",
) -> Profile:
    """A device on which tasks of less than a tile cost a whole one, and tasks below 512 queries a tenth more."""

    def grid(rows: Rows) -> tuple[tuple[float, ...], ...]:
        times = [
            [-(-q // TILE) * rows(k // TILE) * (1.1 if q < 512 else 1.0) for k in KEYS]
            for q in QUERIES
        ]
        return tuple(map(tuple, times))

    return Profile(
        device="paper",
        torch="0",
        kernel=kernel,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=next(
            name for name, size in DTYPE_BYTES.items() if size == shape.dtype_bytes
        ),
        tile=TILE,
        q_lengths=QUERIES,
        kv_lengths=KEYS,
        forward_ms=grid(forward),
        backward_ms=grid(backward),
        repeats=1,
        date="2025-01-01T00:00:00+00:00",
    )
