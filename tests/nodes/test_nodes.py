"""Jobs on several nodes train as on one machine."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.launched import launched
from tests.nodes.jobs import NodesJob, losses
from tests.nodes.network import Nodes, missing
from tests.sets import params

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no nodes on this machine: {missing()}")

PP = "--parallelism.pipeline_parallel_degree=2"
COMPOSITIONS: dict[str, tuple[int, int, list[str]]] = {
    "fsdp": (2, 1, []),
    "by time": (2, 1, ["--cad.tolerance=auto"]),
    "placed": (2, 1, ["--cad.placement=balanced", "--cad.ranks_per_node=1"]),
    "cp": (2, 1, ["--parallelism.context_parallel_degree=2"]),
    "pp": (2, 1, [PP, "--parallelism.pipeline_parallel_schedule=1F1B"]),
    "ticks": (2, 1, [PP, "--parallelism.pipeline_parallel_schedule=CAD1F1B"]),
    "tp in nodes": (2, 2, ["--parallelism.tensor_parallel_degree=2"]),
    "two ranks a node": (2, 2, ["--cad.ranks_per_node=2", "--cad.nano_batches=2", "--cad.placement=auto"]),
    "four nodes": (4, 1, ["--cad.placement=balanced"]),
}
"""Nodes, ranks on each, and options."""
STEPS = 3
TIMEOUT_S = 250


def train(nodes: int, ranks: int, args: Sequence[str], folder: Path) -> list[float]:
    """Return the losses of a job on nodes with links of 1 Gbit/s, or on one machine."""
    if nodes == 1:
        with launched(args, folder, nranks=ranks) as job:
            assert job.finish(TIMEOUT_S)[0] == 0, "\n".join(job.lines)
        return losses(job.lines)
    with Nodes(nodes) as network:
        network.limit(1e9)
        spread = NodesJob(network, ranks, args, folder)
        assert spread.finish(TIMEOUT_S) == [0] * nodes, spread.text
        assert ("MB between hosts" in spread.text) == ("1F1B" not in " ".join(args).split("="))  # one rank a stage
    return spread.losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", params(COMPOSITIONS, short=["fsdp"]))
def test_nodes_train_like_one_machine(name: str, tmp_path: Path) -> None:
    nodes, ranks, options = COMPOSITIONS[name]
    args = [f"--training.steps={STEPS}", *options]
    expected = train(1, nodes * ranks, args, tmp_path / "one")
    assert len(expected) == STEPS
    assert train(nodes, ranks, args, tmp_path / "nodes") == pytest.approx(expected, rel=1e-5)


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_checkpoint_of_two_nodes_resumes_on_four(tmp_path: Path) -> None:
    """The data-parallel degree stays, so that every loader finds its state."""
    save = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"]
    half, whole = ([f"--training.steps={steps}", *save] for steps in (2, 4))
    expected = train(1, 4, ["--training.steps=4"], tmp_path / "one")
    train(2, 2, half, tmp_path / "saved")
    resumed = train(4, 1, whole, tmp_path / "saved")
    assert resumed == pytest.approx(expected[2:], rel=1e-5)
