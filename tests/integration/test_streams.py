"""The streams that ``cad.streams = "auto"`` chooses; test_mistakes.py has the jobs that "traced" refuses."""

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.integration.compositions import FULL, OP, TP2
from tests.integration.harness import parse_job
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH

HALVES = ("--cad.nano_batches=2", "--compile.enable")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("args", "device", "torch_version", "traced", "why"),
    [
        (HALVES, CPU, FIRST_TORCH, True, "nothing stands in the way"),
        ((*HALVES, *OP), CPU, FIRST_TORCH, True, "nothing stands in the way"),
        ((*HALVES, "--cad.streams=opaque"), CPU, FIRST_TORCH, False, "cad.streams = 'opaque'"),
        ((*HALVES, *FULL), CPU, FIRST_TORCH, False, "cannot recompute exchanges"),
        ((*HALVES, *TP2), CPU, FIRST_TORCH, False, "needs parallelism.tensor_parallel_degree = 1"),
        (HALVES[:1], CPU, FIRST_TORCH, False, "needs compile.enable = true"),
        (HALVES, CUDA, FIRST_TORCH, False, "has not run on GPUs yet"),
        ((*HALVES, "--cad.streams=traced"), CUDA, FIRST_TORCH, True, "cad.streams = 'traced'"),
        (HALVES, CPU, "2.14.0", False, "needs torch 2.14.1 or newer, not 2.14.0"),
    ],
)
def test_streams_are_traced_where_that_is_possible_and_has_run(
    args: tuple[str, ...],
    device: torch.device,
    torch_version: str,
    traced: bool,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "__version__", TorchVersion(torch_version))
    config = parse_job(tmp_path, *args)
    from torchtitan_cad.integration.titan022 import checks

    chosen, reason = checks.choose_streams(config, device)
    assert chosen == traced
    assert why in reason
