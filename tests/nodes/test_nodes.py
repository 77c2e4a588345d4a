"""Jobs on several nodes train as on one machine."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.harness import ENVIRONMENT, tokenizer_folder
from tests.integration.launched import CONFIG, SMALL, launched
from tests.nodes.network import Nodes, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no nodes on this machine: {missing()}")


def losses(lines: list[str]) -> list[float]:
    """Return the losses of the steps; of a pipeline's stages only the last knows them."""
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    return [float(found[1]) for line in plain if (found := re.search(r"step: +\d+ +loss: +(\d[\d.]+)", line))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="fsdp"),
        pytest.param(["--cad.placement=balanced", "--cad.ranks_per_node=1"], id="placed", marks=pytest.mark.matrix),
        pytest.param(["--parallelism.context_parallel_degree=2"], id="cp", marks=pytest.mark.matrix),
        pytest.param(
            ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"],
            id="pp",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_two_nodes_train_like_one_machine(options: list[str], tmp_path: Path) -> None:
    """One rank on each of two nodes, over a link of 1 Gbit/s, and two ranks on one machine."""
    args = ["--training.steps=3", *options]
    with launched(args, tmp_path / "one") as job:
        assert job.finish(200)[0] == 0, "\n".join(job.lines)
    expected = sorted(set(losses(job.lines)))
    assert len(expected) == 3

    train = ["-m", "torchtitan_cad.train", f"--job.config_file={CONFIG}", *SMALL, *args]
    train += [f"--job.dump_folder={tmp_path / 'two'}", f"--model.hf_assets_path={tokenizer_folder()}"]
    logs = [tmp_path / f"node{node}.txt" for node in range(2)]
    with Nodes(2) as nodes:
        nodes.limit(1e9)
        processes = [
            nodes.torchrun(node, 1, train, env=ENVIRONMENT, stdout=log.open("w"), stderr=subprocess.STDOUT)
            for node, log in enumerate(logs)
        ]
        codes = [process.wait(200) for process in processes]
    lines = [line for log in logs for line in log.read_text().splitlines()]
    assert codes == [0, 0], "\n".join(lines)
    assert sorted(set(losses(lines))) == pytest.approx(expected, rel=1e-5)
