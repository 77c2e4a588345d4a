# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad profile``: measure the attention kernel of this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_cad.planning.text import aligned
from torchtitan_cad.tools.shared import check_output

if TYPE_CHECKING:
    from torchtitan_cad.planning import Profile
    from torchtitan_cad.planning.model.profile import Direction

SATURATED = 0.95
"""Share of a key length's best throughput from which on a query length counts as saturating the device."""


@dataclass(frozen=True)
class Options:
    """Calls to measure."""

    num_heads: int = 32
    """Query heads of one rank. Plans for another number may use the same profile, with as many heads per key head."""
    num_kv_heads: int = 8
    """Key heads of one rank."""
    head_dim: int = 128
    """Elements per head."""
    value_dim: int | None = None
    """Elements per head of values, by default as many."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of queries, keys and values; by default bfloat16 on a GPU, float32 on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """By default a GPU if there is one."""
    kernel: str = "auto"
    """As the key cad.kernel."""
    q_lengths: tuple[int, ...] | None = None
    """Query lengths to measure, in tokens, ascending."""
    kv_lengths: tuple[int, ...] | None = None
    """Key lengths to measure, ascending multiples of 128, beginning with 128."""
    repeats: int | None = None
    """Calls whose median is each time."""


DEFAULTS = Options()


def run(output: Path, *, measurement: Options = DEFAULTS) -> None:
    """Measure how long attention takes on this device, for plans that balance time instead of tile counts.

    Use the result with `torchtitan-cad plan --profile` or the key cad.profile. Takes seconds on a GPU, a minute or two
    on a CPU; nothing else should run meanwhile.

    Args:
        output: JSON file to write.
    """
    import torch
    from tqdm import tqdm

    from torchtitan_cad.planning import AttentionShape
    from torchtitan_cad.planning.model.profile import DTYPE_BYTES
    from torchtitan_cad.runtime.kernels.select import get_kernel
    from torchtitan_cad.tools.profiling import ProfileGrid, measure_profile

    check_output("--output", output)
    device = (
        ("cuda" if torch.cuda.is_available() else "cpu")
        if measurement.device == "auto"
        else measurement.device
    )
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU; use --device cpu")
    dtype = (
        ("bfloat16" if where.type == "cuda" else "float32")
        if measurement.dtype == "auto"
        else measurement.dtype
    )
    shape = AttentionShape(
        measurement.num_heads,
        measurement.num_kv_heads,
        measurement.head_dim,
        dtype_bytes=DTYPE_BYTES[dtype],
        value_dim=measurement.value_dim,
    )
    default = ProfileGrid.default(where)
    values = {
        name: getattr(measurement, name)
        for name in ("q_lengths", "kv_lengths", "repeats")
    }
    grid = replace(
        default, **{name: value for name, value in values.items() if value is not None}
    )
    # Delayed, so that a grid that no profile can have is an error of one line.
    with tqdm(
        total=grid.num_cells, desc="profiling", unit="cell", leave=False, delay=0.5
    ) as bar:
        profile = measure_profile(
            get_kernel(measurement.kernel, where, shape),
            shape,
            getattr(torch, dtype),
            device=where,
            grid=grid,
            on_cell=bar.update,
        )
    output.write_text(profile.to_json() + "\n")
    print(report(profile))
    if noisy := len(profile.noisy_cells()):
        print(
            f"torchtitan-cad: warning: {noisy} of {grid.num_cells} cells, marked by ?, stayed noisy; plans made with "
            "them are out of balance: stop what else runs here and measure again, with "
            f"--repeats {2 * grid.repeats}",
            file=sys.stderr,
        )


def report(profile: Profile) -> str:
    """Give the throughput of every cell, with a question mark if noisy, and the query length that saturates it."""
    heads = f"{profile.num_heads} query and {profile.num_kv_heads} key heads of {profile.head_dim}, {profile.dtype}"
    title = f"{profile.device}, torch {profile.torch}, kernel {profile.kernel}, {heads}"
    tables = [_table(profile, "forward"), _table(profile, "backward")]
    return "\n\n".join([title, *tables])


def _table(profile: Profile, direction: Direction) -> str:
    throughput = profile.throughput(direction)
    noisy = set(profile.noisy_cells())
    unit, name = (1e12, "TFLOP/s") if throughput.max() >= 1e12 else (1e9, "GFLOP/s")
    rows = [
        [f"{direction}, {name}", *(f"{length} keys" for length in profile.kv_lengths)]
    ]
    for length, values in zip(profile.q_lengths, throughput, strict=True):
        cells = zip(profile.kv_lengths, values, strict=True)
        texts = [
            f"{value / unit:.1f}" + "?" * ((length, keys) in noisy)
            for keys, value in cells
        ]
        rows.append([f"{length} queries", *texts])
    saturated = (throughput >= SATURATED * throughput.max(axis=0)).argmax(axis=0)
    rows.append(
        ["saturated from", *(f"{profile.q_lengths[index]}" for index in saturated)]
    )
    return aligned(rows)
