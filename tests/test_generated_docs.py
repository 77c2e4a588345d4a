# SPDX-License-Identifier: BSD-3-Clause
"""Pages say what the code says, and all that examples/ shows works."""

import dataclasses
import re
import runpy
import subprocess
import sys

import pytest

from tests.generated_docs import API, ROOT, SETTINGS, up_to_date
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools.main import main

README = ROOT / "README.md"


def test_every_option_is_described():
    enable_cpu()
    from torchtitan_cad.integration.config import Cad

    for page in (SETTINGS, API):
        assert page.read_text() == up_to_date(page), "run `make docs`"
    for field in dataclasses.fields(Cad):
        assert f"**`{field.name}`**" in SETTINGS.read_text()


def words(page):
    """Count the words of a page, without the rules of its tables."""
    return sum(re.search(r"\w", word) is not None for word in page.read_text().split())


def test_pages_are_short():
    """README and all pages but the generated one."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page != API]
    assert words(README) <= 900
    assert sum(map(words, [README, *pages])) <= 14_000


EXAMPLES = ROOT / "examples"


@pytest.fixture
def output_of(monkeypatch, capsys):
    """Runs an example in this process and returns what it prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_plan_a_batch(output_of):
    printed = output_of("plan_a_batch.py")
    assert "document 0: queries 0 to" in printed
    assert "before, 1.0" in printed


def test_plan_from_lengths(output_of):
    lines = output_of("plan_from_lengths.py").splitlines()
    loads = [re.findall(r"(?:mean|->) ([\d.]+)", line) for line in lines]
    (before, after), (_, placed) = ([*map(float, of_line)] for of_line in loads)
    assert before > 1.5 > 1.05 > after
    assert placed < 1.05
    of_loader, chosen = (re.findall(r"([\d.]+) GB a layer", line)[0] for line in lines)
    assert float(chosen) < float(of_loader)


def test_draw_a_plan(tmp_path, output_of):
    picture = tmp_path / "plan.png"
    assert f"wrote {picture}" in output_of("draw_a_plan.py", str(picture))
    assert picture.stat().st_size > 10_000


def test_plan_a_layout_file(capsys):
    assert main(["plan", str(EXAMPLES / "layout.json")]) == 0
    printed = capsys.readouterr().out
    assert "4, 7, 131072" in printed
    before, after = re.findall(r"load max/mean(?: before)? +([\d.]+)", printed)
    assert float(before) > 1.5 > 1.05 > float(after)


@pytest.mark.matrix
def test_two_ranks():
    command = [sys.executable, EXAMPLES / "two_ranks.py"]
    printed = subprocess.check_output(command, text=True, timeout=300)
    assert printed.count("agree with ordinary attention") == 2
