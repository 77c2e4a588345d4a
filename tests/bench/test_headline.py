# SPDX-License-Identifier: BSD-3-Clause
"""The first table of README and docs/ is what bench/results/headline.json says."""

import copy
import json

import pytest

from bench import headline
from bench.headline import BASELINES, KERNELS, LOGNORMAL, RESULT, Options, cases

RESULTS = json.loads(RESULT.read_text())
PAGES = headline.marked_pages()


def test_readme_has_a_place_for_it() -> None:
    assert headline.ROOT / "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_was_simulated(page) -> None:
    assert page.read_text() == headline.up_to_date(page, RESULTS), (
        "run python -m bench.headline --only-tables"
    )


def test_the_result_has_every_case() -> None:
    keys = ("job", "kernel", "microbatches", "settings", "documents")
    wanted = [[getattr(case, key) for key in keys] for case in cases(Options())]
    assert [[case[key] for key in keys] for case in RESULTS["cases"]] == wanted


def test_tables_follow_the_figures() -> None:
    other = copy.deepcopy(RESULTS)
    case = next(case for case in other["cases"] if case["settings"] == "best")
    case["cad_over"]["packed"]["mean"] = 7.654
    for table in (headline.short_table, headline.full_table):
        assert any("| 7.65 |" in line for line in table(other))
    case["systems"]["cad"]["reason"] = "needs 99.0 GB"
    assert any("CAD needs 99.0 GB" in line for line in headline.short_table(other))
    other["measured"] = {
        "ranks": 2,
        "places": "CPU cores",
        "speedup": {"overall": 1.41, "quarter": 1.3, "three_quarters": 1.5},
    }
    assert "(2 ranks, CPU cores): 1.41" in headline.short_table(other)[-1]


def test_figures_are_plausible() -> None:
    """Whatever the code: CAD is nowhere faster than perfect, and a slower kernel leaves more to gain."""
    best = {
        kernel: next(
            case
            for case in RESULTS["cases"]
            if (case["job"], case["settings"], case["microbatches"])
            == ("llama3_8b", "best", 1)
            and case["kernel"] == kernel
            and case["documents"] == LOGNORMAL
        )
        for kernel in KERNELS
    }
    for case in best.values():
        perfect = case["systems"]["perfect"]["seconds_per_step"]
        assert case["systems"]["cad"]["seconds_per_step"] >= perfect
        assert all(case["cad_over"][name]["mean"] > 0.9 for name in BASELINES)
    fast, slow = (best[kernel]["cad_over"]["packed"]["mean"] for kernel in KERNELS)
    assert slow > fast
