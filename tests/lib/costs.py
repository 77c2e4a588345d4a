# SPDX-License-Identifier: BSD-3-Clause
"""Cost models of every kind, drawn by hypothesis, and any table of row costs."""

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from torchtitan_cad.planning import CostModel, ProfileCost, TileAreaCost


def concave_cost(overhead: float, tiles: int = 2100, tile: int = 128) -> ProfileCost:
    """Every row costs ``overhead`` tiles besides its tiles; the table has rows of up to ``tiles``."""
    rows = range(1, tiles)
    return ProfileCost(
        tile, tuple(rows), tuple(round(1000 * (n + overhead)) for n in rows)
    )


def noisy_cost(seed: int, tiles: int = 2100, tile: int = 128) -> ProfileCost:
    """A row never costs less with one tile more; by how much more is lognormal."""
    steps = 1 + np.random.default_rng(seed).lognormal(7, 1, size=tiles - 1).astype(
        np.int64
    )
    return ProfileCost(tile, tuple(range(1, tiles)), tuple(np.cumsum(steps).tolist()))


def cost_of(kind: str, seed: int, tile: int) -> CostModel:
    """Cost of that kind for documents of up to 60,000 tokens."""
    tiles = 60_000 // tile + 2
    return {
        "tiles": TileAreaCost(tile),
        "concave": concave_cost(seed % 8, tiles, tile),
        "noisy": noisy_cost(seed % 1000, tiles, tile),
        "profile": ProfileCost(
            tile, (1, 3, 9), (seed % 9 + 1, seed % 9 + 3, seed % 9 + 9)
        ),
    }[kind]


@st.composite
def profiles(draw: st.DrawFn) -> ProfileCost:
    """Noisy grids, some of them nonsense: any times at any key lengths."""
    tiles = [1, *sorted(draw(st.sets(st.integers(2, 250), max_size=6)))]
    noise = st.floats(0.5, 2.0) if draw(st.booleans()) else st.floats(1e-6, 1e6)
    times = [draw(noise) * (draw(st.sampled_from([0, 5])) + n) * 1e-9 for n in tiles]
    return ProfileCost.from_times(
        draw(st.integers(1, 24)), tiles, [Fraction(time) for time in times]
    )


models: st.SearchStrategy[CostModel] = st.one_of(
    st.builds(TileAreaCost, st.integers(1, 24)),
    profiles(),
    st.builds(concave_cost, st.floats(0, 9), st.just(2000), st.integers(1, 24)),
    st.builds(noisy_cost, st.integers(0, 99), st.just(2000), st.integers(1, 24)),
)
