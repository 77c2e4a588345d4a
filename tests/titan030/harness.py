# SPDX-License-Identifier: BSD-3-Clause
"""Small jobs of torchtitan 0.3.0 on gloo ranks, forked from this process, which has imported everything."""

import json
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402

from tests.lib.jobs.harness import scratch_folder, tokenizer_folder  # noqa: E402
from tests.titan030 import tiny  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_3 import entry  # noqa: E402

TIMEOUT_S = 250
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


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
    _ = tokenizer_folder()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    where = folder, store.port, nranks
    files = (
        f"--hf_assets_path={tokenizer_folder()}",
        f"--dump_folder={dump_folder or folder}",
    )
    job = (name, with_cad, (*files, *options))
    ranks = [
        context.Process(target=_run_rank, args=(rank, where, job))
        for rank in range(nranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
    stuck = [rank for rank in ranks if rank.is_alive()]
    for rank in stuck:
        rank.kill()
    logs = [(folder / f"rank{rank}.log").read_text() for rank in range(nranks)]
    codes = [rank.exitcode for rank in ranks]
    ends = "\n".join(
        f"--- rank {rank}\n" + "\n".join(log.splitlines()[-40:])
        for rank, log in enumerate(logs)
    )
    assert codes == [0] * nranks, f"exit codes {codes}, {len(stuck)} were stuck\n{ends}"
    result = Result(logs)
    lines = sorted(folder.glob("rank*.jsonl"))
    for line in (
        lines[-1].read_text().splitlines()
        if _last_has_loss(options)
        else lines[0].read_text().splitlines()
    ):
        for key, value in json.loads(line).items():
            getattr(result, key).append(value)
    norms = dict[str, float]()
    for path in folder.glob("norms*.jsonl"):
        for line in path.read_text().splitlines():
            norms |= json.loads(line)
    for key, norm in norms.items():
        result.gradients[int(key.split()[0])] += norm**2
    return result


def _last_has_loss(options: Sequence[str]) -> bool:
    return any("pipeline_parallel_degree" in option for option in options)


def _run_rank(
    rank: int, where: tuple[Path, int, int], job: tuple[str, bool, Sequence[str]]
) -> None:
    (folder, port, nranks), (name, with_cad, options) = where, job
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nranks),
        LOCAL_WORLD_SIZE=str(nranks),
    )
    log = (folder / f"rank{rank}.log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    torch.set_num_threads(1)
    _record(folder / f"rank{rank}.jsonl")
    _record_norms(folder / f"norms{rank}.jsonl")
    _initialise_by_name()
    if "--compile.enable" not in options:
        tiny.compute_in_fp32()
    titan_trainer.time = SimpleNamespace(
        perf_counter=titan_trainer.time.perf_counter, sleep=lambda seconds: None
    )
    registry = SimpleNamespace(
        job=lambda: tiny.with_cad(name) if with_cad else tiny.recipe(name)
    )
    sys.modules["job_of_test"] = registry  # type: ignore[assignment]
    arguments = ["--module=job_of_test", "--config=job", *options]
    code = 0
    try:
        entry.run_recipe(arguments, SimpleNamespace(building=True))
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    log.flush()
    os._exit(code)


def _record(path: Path) -> None:
    processor: Any = titan_metrics.MetricsProcessor
    log = processor.log
    log_validation = processor.log_validation

    def record(
        self: Any,
        step: int,
        loss: float,
        most: float,
        norm: float,
        extra_metrics: Any = None,
    ) -> None:
        moved = (extra_metrics or {}).get("cad/tasks/moved", 0.0)
        graphs = counters["stats"]["unique_graphs"]
        with path.open("a") as file:
            file.write(
                json.dumps(
                    {
                        "losses": loss,
                        "grad_norms": norm,
                        "moved": moved,
                        "graphs": graphs,
                    }
                )
                + "\n"
            )
        log(self, step, loss, most, norm, extra_metrics)

    def record_validation(
        self: Any, loss: float, step: int, extra_metrics: Any = None
    ) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"validation": loss}) + "\n")
        log_validation(self, loss, step, extra_metrics)

    processor.log = record
    processor.log_validation = record_validation


def _record_norms(path: Path) -> None:
    """Write down the norm of every gradient, by step and parameter."""
    train_step = titan_trainer.Trainer.train_step
    clip = titan_trainer.dist_utils.clip_grad_norm_

    def record_step(self: Any, batches: Any) -> None:
        def record(parameters: Any, *args: Any, **options: Any) -> Any:
            norms = dict[str, float]()
            for part in self.model_parts:
                for name, parameter in part.named_parameters():
                    gradient = parameter.grad
                    full = (
                        gradient.full_tensor()
                        if isinstance(gradient, DTensor)
                        else gradient
                    )
                    norms[f"{self.step} {_plain(name)}"] = full.double().norm().item()
            with path.open("a") as file:
                file.write(json.dumps(norms) + "\n")
            return clip(parameters, *args, **options)

        titan_trainer.dist_utils.clip_grad_norm_ = record
        train_step(self, batches)

    titan_trainer.Trainer.train_step = record_step


def _plain(name: str) -> str:
    """Return a parameter's name without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _initialise_by_name() -> None:
    """Give every parameter a value that depends on its name alone, the same under every parallelism."""
    trainer: Any = titan_trainer.Trainer
    train = trainer.train

    def train_from_names(self: Any) -> None:
        for part in self.model_parts:
            for full_name, parameter in part.named_parameters():
                name = _plain(full_name)
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                full = torch.randn(parameter.shape, generator=generator)
                full = 1 + 0.1 * full if "norm" in name else 0.05 * full
                with torch.no_grad():
                    if isinstance(parameter, DTensor):
                        full = distribute_tensor(
                            full, parameter.device_mesh, parameter.placements
                        )
                    parameter.copy_(full)
        train(self)

    trainer.train = train_from_names
