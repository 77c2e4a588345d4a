# SPDX-License-Identifier: BSD-3-Clause
"""Small jobs of torchtitan 0.3.0 on gloo ranks, forked from this process, which has imported everything."""

import os
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from torchtitan_cad.integration.cpu import enable_cpu

enable_cpu()

import torch  # noqa: E402
import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.trainer as titan_trainer  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

from tests.lib.jobs.harness import (  # noqa: E402
    collect,
    log_files,
    rank_environment,
    scratch_folder,
    tokenizer_folder,
)
from tests.lib.jobs.parameters import initialise, named_parameters, whole  # noqa: E402
from tests.lib.jobs.ranks import run_job  # noqa: E402
from tests.lib.jobs.recording import before_clipping, record_metrics  # noqa: E402
from tests.titan030 import tiny  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_3 import entry  # noqa: E402

TIMEOUT_S = 250


def run(name, *options, nranks=2, with_cad=True, dump_folder=None):
    """Train ``tiny.recipe(name)`` with further options; the gradients of all steps are named by step and parameter.

    Raises AssertionError with the ends of all logs if a rank fails.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch_folder()))
    dump_folder = dump_folder or folder
    arguments = [
        "--module=job_of_test",
        "--config=job",
        f"--hf_assets_path={tokenizer_folder()}",
        f"--dump_folder={dump_folder}",
        *options,
    ]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    codes = run_job(
        arguments,
        rank_environment(store, nranks),
        logs=log_files(folder, nranks),
        timeout_s=TIMEOUT_S,
        main=partial(_train, tiny.with_cad if with_cad else tiny.recipe, name, folder),
    )
    return collect(folder, dump_folder, codes)


def squared_norms(result):
    """Squared norms of the steps' gradients, in fp64: torch's own sum, in fp32, is right to 1e-4."""
    norms = Counter()
    for name, gradient in result.grads.items():
        norms[name.split()[0]] += gradient.double().square().sum().item()
    return dict(norms)


def _train(recipe, name, folder, arguments):
    """Train in a rank."""
    sys.stdout = sys.stderr = open(1, "w", buffering=1)  # noqa: SIM115
    torch.set_num_threads(1)
    _record(folder, any("pipeline_parallel_degree" in word for word in arguments))
    _initialise_by_name()
    if "--compile.enable" not in arguments:
        tiny.compute_in_fp32()
    titan_trainer.time = SimpleNamespace(
        perf_counter=titan_trainer.time.perf_counter, sleep=lambda seconds: None
    )
    registry = SimpleNamespace(job=lambda: recipe(name))
    sys.modules["job_of_test"] = registry  # type: ignore[assignment]
    entry.run_recipe(arguments, SimpleNamespace(building=True))


def _record(folder, has_stages):
    """Write down what every step and validation reports, and every gradient."""
    rank = int(os.environ["RANK"])
    last = int(os.environ["WORLD_SIZE"]) - 1
    metrics_rank = last if has_stages else 0

    def save(trainer):
        gradients = {
            f"{trainer.step} {name}": whole(parameter.grad)
            for name, parameter in named_parameters(trainer.model_parts)
        }
        torch.save(gradients, folder / f"grads_rank{rank}_step{trainer.step}.pt")

    processor = titan_metrics.MetricsProcessor
    path = folder / f"rank{rank}.jsonl"
    record_metrics(processor, path, lambda self: rank == metrics_rank)
    before_clipping(titan_trainer.Trainer, titan_trainer.dist_utils, save)


def _initialise_by_name():
    """Give every parameter a value that depends on its name alone, the same under every parallelism."""
    trainer = titan_trainer.Trainer
    train = trainer.train

    def value_of(name, noise):
        return 1 + 0.1 * noise if "norm" in name else 0.05 * noise

    def train_from_names(self):
        initialise(self.model_parts, 0, value_of)
        train(self)

    trainer.train = train_from_names
