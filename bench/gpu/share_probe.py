# SPDX-License-Identifier: BSD-3-Clause
"""Whether ranks that share a GPU have multiprocessors of their own and run at once: matrix products alone and together.

    RANK=0 python -m bench.gpu.share_probe FOLDER cuda 2

is one rank; the part ``shares`` starts them.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu.parts import Emit

SECONDS = 0.5
"""seconds of matrix products in each measurement"""
SIZES = {"cuda": 4096, "cpu": 64}
POLL_S = 0.005
PEER_S = 40.0
"""seconds to wait for the other ranks"""


def measure(device: str, emit: Emit, ranks: str) -> None:
    """Emit the multiprocessors of every share, and rates: of the whole device, of a share alone, and of all at once.

    Raises:
        Skip: the device cannot be shared.
        RuntimeError: a rank failed; says what it printed last.
    """
    from bench.gpu.sharing import shares, start_ranks

    num_ranks = int(ranks)
    whole_tflops = _tflops(_matrix(device))
    emit("whole_tflops", whole_tflops)
    with (
        shares(device, num_ranks) as environments,
        tempfile.TemporaryDirectory(prefix="probe_") as name,
    ):
        logs = [Path(name, f"log{rank}.txt") for rank in range(num_ranks)]
        command = [
            sys.executable,
            "-m",
            "bench.gpu.share_probe",
            name,
            device,
            str(num_ranks),
        ]
        processes = start_ranks(command, environments, [log.open("w") for log in logs])
        for process, log in zip(processes, logs, strict=True):
            if process.wait():
                raise RuntimeError(
                    f"a rank ended with code {process.returncode}: {log.read_text()[-1000:]}"
                )
        found = [
            json.loads(Path(name, f"result{rank}.json").read_text())
            for rank in range(num_ranks)
        ]
    for figure in ("multiprocessors", "alone_tflops", "together_tflops"):
        emit(figure, [rank[figure] for rank in found])
    sum_together = sum(rank["together_tflops"] for rank in found)
    emit("all_at_once_over_the_whole_device", sum_together / whole_tflops)
    emit(
        "all_at_once_over_one_alone",
        sum_together / max(rank["alone_tflops"] for rank in found),
    )


def main(folder: Path, device: str, num_ranks: int, rank: int) -> None:
    """Write the figures of one rank to FOLDER/result<rank>.json."""
    result: dict[str, object] = {"multiprocessors": 0}
    if device == "cuda":
        from bench.gpu.multiprocessors import occupied

        result["multiprocessors"] = occupied()
    matrix = _matrix(device)
    for turn in range(num_ranks):
        _meet(folder, f"turn{turn}", rank, num_ranks)
        if turn == rank:
            result["alone_tflops"] = _tflops(matrix)
    _meet(folder, "together", rank, num_ranks)
    result["together_tflops"] = _tflops(matrix)
    _meet(folder, "end", rank, num_ranks)
    (folder / f"result{rank}.json").write_text(json.dumps(result))


def _matrix(device: str) -> torch.Tensor:
    """Return a matrix that was multiplied before, so that the library is loaded."""
    matrix = torch.randn(
        SIZES[device], SIZES[device], device=device, dtype=torch.bfloat16
    )
    _tflops(matrix)
    return matrix


def _tflops(matrix: torch.Tensor) -> float:
    """Return the rate of matrix products over ``SECONDS``, which the host checks after every few of them."""
    products = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        for _ in range(8):
            matrix @ matrix
        products += 8
        if matrix.is_cuda:
            torch.cuda.synchronize()
    return 2 * len(matrix) ** 3 * products / (time.perf_counter() - begin) / 1e12


def _meet(folder: Path, place: str, rank: int, num_ranks: int) -> None:
    """Wait until all ranks are at a place; raise TimeoutError after ``PEER_S``."""
    (folder / f"{place}-{rank}").touch()
    deadline = time.monotonic() + PEER_S
    while not all((folder / f"{place}-{peer}").exists() for peer in range(num_ranks)):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"not all of {num_ranks} ranks came to {place!r} within {PEER_S:.0f} s"
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(os.environ["RANK"]))
