"""What ``cad.streams = "auto"`` chooses; test_failures.py has what "traced" refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.integration.compositions import CAD, FULL, OP, TP2
from tests.integration.harness import BASE_TOML, tokenizer_folder
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH
from torchtitan_cad.integration.titan022.cpu import enable_cpu

HALVES = ("--cad.nano_batches=2", "--compile.enable")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., object]]:
    """Makes the config of a job, which passes all checks of one with torch as new as needed."""
    enable_cpu()
    from torchtitan_cad.integration.titan022 import plugin
    from torchtitan_cad.integration.titan022.manager import CadConfigManager

    monkeypatch.setenv("WORLD_SIZE", "2")
    known = [
        f"--job.config_file={BASE_TOML}",
        f"--job.dump_folder={tmp_path}",
        f"--model.hf_assets_path={tokenizer_folder()}",
        "--model.flavor=debugmodel_varlen_attn",
        "--training.dataset=python_stdlib",
    ]

    def parse(*args: str) -> object:
        with mock.patch.object(torch, "__version__", TorchVersion(FIRST_TORCH)):
            return CadConfigManager().parse_args([*known, *CAD, *args])

    yield parse
    plugin.restore()


@pytest.mark.parametrize(
    ("args", "device", "traced", "why"),
    [
        (HALVES, CPU, True, "nothing stands in the way"),
        ((*HALVES, *OP), CPU, True, "nothing stands in the way"),
        ((*HALVES, "--cad.streams=opaque"), CPU, False, "cad.streams = 'opaque'"),
        ((*HALVES, *FULL), CPU, False, "cannot recompute exchanges"),
        ((*HALVES, *TP2), CPU, False, "needs parallelism.tensor_parallel_degree = 1"),
        (HALVES[:1], CPU, False, "needs compile.enable = true"),
        (HALVES, CUDA, False, "has not run on GPUs yet"),
        ((*HALVES, "--cad.streams=traced"), CUDA, True, "cad.streams = 'traced'"),
    ],
)
def test_streams_are_traced_where_that_is_possible_and_has_run(
    parse: Callable[..., object], args: tuple[str, ...], device: torch.device, traced: bool, why: str
) -> None:
    config = parse(*args)
    from torchtitan_cad.integration.titan022 import checks

    with mock.patch.object(torch, "__version__", TorchVersion(FIRST_TORCH)):
        chosen, reason = checks.choose_streams(config, device)
    assert chosen == traced
    assert why in reason


def test_streams_are_opaque_with_an_old_torch(parse: Callable[..., object]) -> None:
    config = parse(*HALVES)
    from torchtitan_cad.integration.titan022 import checks

    with mock.patch.object(torch, "__version__", TorchVersion("2.14.0")):
        chosen, reason = checks.choose_streams(config, CPU)
    assert not chosen
    assert "needs torch 2.14.1 or newer, not 2.14.0" in reason
