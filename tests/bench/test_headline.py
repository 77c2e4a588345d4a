# SPDX-License-Identifier: BSD-3-Clause
"""The first table of README and docs/ is what bench/results/headline.json says."""

import copy
import json

from bench import headline
from bench.headline import RESULT, Options, cases

RESULTS = json.loads(RESULT.read_text())


def test_pages_say_what_was_simulated():
    pages = headline.marked_pages()
    assert headline.ROOT / "README.md" in pages
    for page in pages:
        wanted = headline.up_to_date(page, RESULTS)
        assert page.read_text() == wanted, "run python -m bench.headline --only-tables"


def test_the_result_has_every_case():
    for case, result in zip(cases(Options()), RESULTS["cases"], strict=True):
        for key in ("job", "kernel", "microbatches", "settings", "documents"):
            assert result[key] == getattr(case, key)


def test_tables_follow_the_figures():
    other = copy.deepcopy(RESULTS)
    case = next(case for case in other["cases"] if case["settings"] == "best")
    case["cad_over"]["packed"]["mean"] = 7.654
    for table in (headline.short_table, headline.full_table):
        assert any("| 7.65" in line for line in table(other))
    case["systems"]["cad"]["reason"] = "needs 99.0 GB"
    assert any("CAD needs 99.0 GB" in line for line in headline.short_table(other))
