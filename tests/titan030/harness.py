# SPDX-License-Identifier: BSD-3-Clause
"""Small jobs of torchtitan 0.3.0 on gloo ranks, forked from this process, which has imported everything."""

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_cad.integration.cpu import enable_cpu

enable_cpu()

import torch  # noqa: E402
import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.trainer as titan_trainer  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

from tests.lib.jobs.harness import scratch_folder, tokenizer_folder  # noqa: E402
from tests.lib.jobs.parameters import initialise, named_parameters, whole  # noqa: E402
from tests.lib.jobs.ranks import run_job  # noqa: E402
from tests.titan030 import tiny  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_3 import entry  # noqa: E402

TIMEOUT_S = 250


@dataclass
class Result:
    """Figures of a job: of the rank that has the loss."""

    logs: list[str]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    gradients: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Squared norms of a step's gradients before clipping, in fp64: torch's own sum, in fp32, is right to 1e-4."""


def run(
    name: str,
    *options: str,
    nranks: int = 2,
    with_cad: bool = True,
    dump_folder: Path | None = None,
) -> Result:
    """Train ``tiny.recipe(name)`` with further options. Raises AssertionError with all logs if a rank fails."""
    folder = Path(tempfile.mkdtemp(dir=scratch_folder()))
    arguments = [
        "--module=job_of_test",
        "--config=job",
        f"--hf_assets_path={tokenizer_folder()}",
        f"--dump_folder={dump_folder or folder}",
        *options,
    ]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": str(nranks),
    }
    paths = [folder / f"rank{rank}.log" for rank in range(nranks)]
    codes = run_job(
        arguments,
        env,
        logs=[str(path) for path in paths],
        timeout_s=TIMEOUT_S,
        main=partial(_train, tiny.with_cad if with_cad else tiny.recipe, name, folder),
    )
    logs = [path.read_text() for path in paths]
    ends = ("\n".join(log.splitlines()[-40:]) for log in logs)
    assert codes == [0] * nranks, "\n--- next rank\n".join([f"{codes}", *ends])
    result = Result(logs)
    lines = sorted(folder.glob("rank*.jsonl"))
    has_stages = any("pipeline_parallel_degree" in option for option in options)
    for line in lines[-1 if has_stages else 0].read_text().splitlines():
        for key, value in json.loads(line).items():
            getattr(result, key).append(value)
    norms = dict[str, float]()
    for path in folder.glob("norms*.jsonl"):
        for line in path.read_text().splitlines():
            norms |= json.loads(line)
    for key, norm in norms.items():
        result.gradients[int(key.split()[0])] += norm**2
    return result


def _train(
    recipe: Callable[[str], Any], name: str, folder: Path, arguments: list[str]
) -> None:
    """Train in a rank."""
    sys.stdout = sys.stderr = open(1, "w", buffering=1)  # noqa: SIM115
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    _record(folder / f"rank{rank}.jsonl")
    _record_norms(folder / f"norms{rank}.jsonl")
    _initialise_by_name()
    if "--compile.enable" not in arguments:
        tiny.compute_in_fp32()
    titan_trainer.time = SimpleNamespace(
        perf_counter=titan_trainer.time.perf_counter, sleep=lambda seconds: None
    )
    registry = SimpleNamespace(job=lambda: recipe(name))
    sys.modules["job_of_test"] = registry  # type: ignore[assignment]
    entry.run_recipe(arguments, SimpleNamespace(building=True))


def _write(path: Path, figures: dict[str, Any]) -> None:
    with path.open("a") as file:
        print(json.dumps(figures), file=file)


def _record(path: Path) -> None:
    """Write down what every step and validation reports."""
    processor: Any = titan_metrics.MetricsProcessor
    log = processor.log
    log_validation = processor.log_validation

    def record(self: Any, step: int, loss: float, *more: Any, **others: Any) -> None:
        _, norm, *_ = more
        figures = others.get("extra_metrics") or {}
        steps = {
            "losses": loss,
            "grad_norms": norm,
            "moved": figures.get("cad/tasks/moved", 0.0),
            "graphs": counters["stats"]["unique_graphs"],
        }
        _write(path, steps)
        log(self, step, loss, *more, **others)

    def record_validation(self: Any, loss: float, *more: Any, **others: Any) -> None:
        _write(path, {"validation": loss})
        log_validation(self, loss, *more, **others)

    processor.log = record
    processor.log_validation = record_validation


def _record_norms(path: Path) -> None:
    """Write down the norm of every gradient, by step and parameter."""
    train_step = titan_trainer.Trainer.train_step
    clip = titan_trainer.dist_utils.clip_grad_norm_

    def record_step(self: Any, batches: Any) -> None:
        def record(parameters: Any, *args: Any, **options: Any) -> Any:
            norms = {
                f"{self.step} {name}": whole(x.grad).double().norm().item()
                for name, x in named_parameters(self.model_parts)
            }
            _write(path, norms)
            return clip(parameters, *args, **options)

        titan_trainer.dist_utils.clip_grad_norm_ = record
        train_step(self, batches)

    titan_trainer.Trainer.train_step = record_step


def _initialise_by_name() -> None:
    """Give every parameter a value that depends on its name alone, the same under every parallelism."""
    trainer: Any = titan_trainer.Trainer
    train = trainer.train

    def value_of(name: str, noise: torch.Tensor) -> torch.Tensor:
        return 1 + 0.1 * noise if "norm" in name else 0.05 * noise

    def train_from_names(self: Any) -> None:
        initialise(self.model_parts, 0, value_of)
        train(self)

    trainer.train = train_from_names
