# SPDX-License-Identifier: BSD-3-Clause
"""The figures that README and docs/ quote first: what a step takes on 64 H100s by ``torchtitan-cad simulate``.

    make headline                      # eight minutes on two cores
    python -m bench.headline --compare outputs/compare/compare.json
    python -m bench.headline --only-tables

simulates two jobs of train_configs/, by the rates of two attention kernels, with one and with eight accumulated
microbatches, each with the job's own settings and with every system's best, on lognormal documents and on corpora
(`simulate --documents NAME`). Writes bench/results/headline.json, and
from it the tables between ``<!-- headline -->`` and ``<!-- /headline -->``: the short one in README.md, all of it in
pages of docs/. Both say how much longer other systems take than CAD. ``--compare`` adds what ``make compare`` measured.
"""

import dataclasses
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from bench.record import ROOT, Record, markdown_table, save

RESULT = ROOT / "bench/results/headline.json"
RANKS = 64
JOBS = {"llama3_8b": "rows of 32K, TP 2", "llama3_8b_long": "rows of 256K, CP 8"}
"""Jobs of train_configs/, and what tells them apart."""
KERNELS = {"FlashAttention-3": 622e12, "FlashAttention-2": 340e12}
"""FLOP/s on an H100, of forward and of backward. The first is the one that cad.kernel = "auto" takes where it is
installed. Its backward is slower than that, which would make attention a larger part of the step."""
MICROBATCHES = (1, 8)
LOGNORMAL = "lognormal:median=4096,sigma=1.5"
"""Documents of both jobs, as `simulate` takes where it knows none."""
CORPORA = {
    "llama3_8b": ("codealpaca", "prolong-64k", "pypi"),
    "llama3_8b_long": ("prolong-512k", "pypi"),
}
"""Corpora that a job is simulated with, too, by the first kernel's rate and with one microbatch."""
BASELINES = {
    "packed": "equal chunks (`packed`)",
    "reorder": "reordered rows (`reorder`)",
    "packing_cp": "packing + CP (`packing_cp`)",
    "dynamic_cp": "dynamic CP (`dynamic_cp`)",
}
"""Systems that CAD is compared with, and their names in the tables."""
SETTINGS = ("best", "as shipped")
"""best: of the fields that `simulate` leaves open every system takes its fastest. as shipped: the job's file counts."""
MARKED = re.compile(r"(<!-- headline -->\n).*?(<!-- /headline -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Options:
    batches: int = 6
    """Steps of one microbatch to simulate."""
    batches_of_many: int = 2
    """The same of eight, which have eight times as many documents, and of corpora."""
    processes: int = os.cpu_count() or 1
    compare: Path | None = None
    """compare.json of `make compare`."""
    output: Path = RESULT
    only_tables: bool = False
    """Write the tables anew from the result that is there."""


@dataclasses.dataclass(frozen=True)
class Case:
    job: str
    kernel: str
    microbatches: int
    settings: str
    batches: int
    documents: str = LOGNORMAL

    @property
    def command(self) -> str:
        """The command that prints the case; ``as shipped`` has no command of its own."""
        words = ["torchtitan-cad simulate", str(job_file(self.job).relative_to(ROOT))]
        rate = f"{KERNELS[self.kernel] / 1e12:.0f}e12"
        words += [f"--ranks {RANKS} --batches {self.batches}"]
        words += [f"--documents {self.documents}"]
        words += [f"--attention-flops {rate} --backward-flops {rate}"]
        return " ".join([*words, *overrides(self.job, self.microbatches)])


def job_file(job: str) -> Path:
    return ROOT / "train_configs" / f"{job}.toml"


def overrides(job: str, microbatches: int) -> list[str]:
    """Arguments by which a job accumulates microbatches of a row per data-parallel rank."""
    if microbatches == 1:
        return []
    from torchtitan_cad.tools.simulated_job import read_simulated_job

    written = read_simulated_job([f"--job.config_file={job_file(job)}"], RANKS)
    documents = written.inputs.documents
    rows = documents.step_tokens // documents.row_tokens
    return [f"--training.global_batch_size={microbatches * rows}"]


def cases(options: Options) -> Iterator[Case]:
    for job, kernel, count, settings in product(JOBS, KERNELS, MICROBATCHES, SETTINGS):
        batches = options.batches if count == 1 else options.batches_of_many
        yield Case(job, kernel, count, settings, batches)
    for job, names in CORPORA.items():
        for documents, settings in product(names, SETTINGS):
            kernel = next(iter(KERNELS))
            yield Case(job, kernel, 1, settings, options.batches_of_many, documents)


def simulated(case: Case) -> Record:
    """Figures of all systems in one case."""
    from torchtitan_cad.planning.placement.place import warm_up_placement
    from torchtitan_cad.tools.options import Options as Simulated
    from torchtitan_cad.tools.options import read_inputs
    from torchtitan_cad.tools.simulation.systems import simulate

    warm_up_placement()
    rate = KERNELS[case.kernel]
    asked: Any = Simulated
    chosen = asked(
        ranks=RANKS,
        batches=case.batches,
        documents=case.documents,
        attention_flops=rate,
        backward_flops=rate,
    )
    inputs, notes, _ = read_inputs(
        job_file(case.job), tuple(overrides(case.job, case.microbatches)), chosen
    )
    if case.settings == "as shipped":
        inputs = dataclasses.replace(inputs, open=frozenset())
    report = simulate(inputs).to_dict()
    of_system = (
        *("seconds_per_step", "tokens_per_second_per_gpu", "mfu", "max_over_mean"),
        *("configuration", "reason"),
    )
    systems = {
        name: {key: figures[key] for key in of_system if key in figures}
        for name, figures in report["systems"].items()
    }
    return {
        **dataclasses.asdict(case),
        "command": case.command,
        "step_tokens": report["step_tokens"],
        "cad_over": {
            name: report["systems"]["cad"].get("speedup_over", {}).get(name)
            for name in BASELINES
        },
        "systems": systems,
        "notes": notes,
    }


def run(options: Options) -> list[Record]:
    """One record per case."""
    every = list(cases(options))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        found = pool.map(simulated, every)
        return list(tqdm(found, total=len(every), unit="case", desc="simulating"))


def short_table(result: Record) -> list[str]:
    """README's: lognormal documents, every system at its best."""
    cases = [
        case
        for case in result["cases"]
        if case["settings"] == "best" and case["documents"] == LOGNORMAL
    ]
    rows = _rows(cases, _long_names, _gains)
    return [*markdown_table(rows), *_measured(result)]


def full_table(result: Record) -> list[str]:
    """All cases, with CAD's speed."""

    def names(case: Record) -> Record:
        documents = case["documents"].partition(":")[0]
        return {
            "job": f"`{case['job']}`",
            "attention": case["kernel"],
            "documents": documents,
            "settings": case["settings"],
        }

    def figures(case: Record) -> Record:
        return _gains(case) | {
            "tokens/s/GPU": _figure(case, "tokens_per_second_per_gpu", "{:,.0f}"),
            "mfu": _figure(case, "mfu", "{:.3f}"),
        }

    return [*markdown_table(_rows(result["cases"], names, figures)), *_measured(result)]


def _rows(
    cases: Iterable[Record],
    names: Callable[[Record], Record],
    figures: Callable[[Record], Record],
) -> list[Record]:
    """A row for all cases of the same names. Its cells have a figure for every number of microbatches."""
    rows: dict[tuple[str, ...], Record] = {}
    for case in cases:
        name_cells = names(case)
        row = rows.setdefault(tuple(name_cells.values()), name_cells)
        for column, figure in figures(case).items():
            row[column] = f"{row[column]}; {figure}" if column in row else figure
    return list(rows.values())


def _long_names(case: Record) -> Record:
    return {
        "job": f"`{case['job']}`, {JOBS[case['job']]}",
        "attention": f"{case['kernel']}, {KERNELS[case['kernel']] / 1e12:.0f} TFLOP/s",
    }


def _gains(case: Record) -> Record:
    """How much longer than CAD the others take, or why that is not known."""
    systems = case["systems"]
    cells = {}
    for system, name in BASELINES.items():
        gain = case["cad_over"][system]
        cells[name] = f"{gain['mean']:.2f}" if gain else systems[system].get("reason")
    if reason := systems["cad"].get("reason"):
        needed = reason.partition(" of a GPU")[0]
        cells = dict.fromkeys(cells, "-") | {BASELINES["packed"]: f"CAD {needed}"}
    return cells


def _figure(case: Record, name: str, style: str) -> str:
    value = case["systems"]["cad"].get(name)
    return "-" if value is None else style.format(value)


def _measured(result: Record) -> list[str]:
    """What `make compare` measured, if it is known."""
    if (measured := result.get("measured")) is None:
        return []
    speed = measured["speedup"]
    return [
        "",
        f"Measured by `make compare` ({measured['ranks']} ranks, {measured['places']}): {speed['overall']:.2f}, half "
        f"of the steps between {speed['quarter']:.2f} and {speed['three_quarters']:.2f}.",
    ]


def marked_pages() -> list[Path]:
    """Pages with a place for the table, README first."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in pages if MARKED.search(page.read_text())]


def up_to_date(page: Path, result: Record) -> str:
    """The page with the table of a result."""
    make = short_table if page.name == "README.md" else full_table
    table = "\n".join(make(result))
    return MARKED.sub(
        lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page.read_text()
    )


def main(options: Options) -> None:
    if not options.only_tables:
        content: Record = {"ranks": RANKS, "cases": run(options)}
        if options.compare is not None:
            content["measured"] = json.loads(options.compare.read_text())
        save(options.output, "bench.headline", content)
    result = json.loads(options.output.read_text())
    print("\n".join(full_table(result)))
    for page in marked_pages():
        page.write_text(up_to_date(page, result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
