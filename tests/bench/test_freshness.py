# SPDX-License-Identifier: BSD-3-Clause
"""Results are of the code that is there; where they are not, GitHub's CI fails."""

import json
import os
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from bench import record
from bench.freshness import COMPUTED, RESULTS, SPEAKS_OF, why_stale
from bench.record import ROOT

NAME = "tolerance.json"


def test_every_result_speaks_of_code_that_is_there():
    assert {path.name for path in (ROOT / RESULTS).iterdir()} <= SPEAKS_OF.keys()
    for place in chain.from_iterable(SPEAKS_OF.values()):
        assert (ROOT / place).exists(), place


@pytest.mark.skipif(
    not os.environ.get("CI"), reason="set CI, as GitHub does, to check results"
)
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_results_are_fresh(name):
    assert not why_stale(name), (
        "compute it again (make results), or delete it with what quotes it"
    )


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "change")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def root(tmp_path):
    git(tmp_path, "init", "-q")
    for folder in (RESULTS, *map(Path, SPEAKS_OF[NAME])):
        (tmp_path / folder.parent).mkdir(parents=True, exist_ok=True)
    (tmp_path / "bench/tolerance.py").write_text("1")
    (tmp_path / RESULTS).mkdir(exist_ok=True)
    return tmp_path


def write(root, **head):
    (root / RESULTS / NAME).write_text(json.dumps(head))


def test_a_result_is_stale_once_its_code_changes(root):
    before = commit(root)
    write(root, commit=before, clean=True)
    (root / "other.py").write_text("1")
    commit(root)
    assert why_stale(NAME, root) == ""
    (root / "bench/tolerance.py").write_text("2")
    changed = commit(root)
    assert why_stale(NAME, root).startswith(f"1 files have changed since {before[:12]}")
    write(root, commit=changed, clean=False)
    assert "not committed" in why_stale(NAME, root)
    write(root, commit="0" * 40, clean=True)
    assert "not known here" in why_stale(NAME, root)


def test_without_a_commit_the_file_s_own_counts(root):
    write(root, rows=[])
    commit(root)
    assert why_stale(NAME, root) == ""
    (root / "bench/tolerance.py").write_text("2")
    commit(root)
    assert why_stale(NAME, root) != ""


def test_benches_record_their_commit(tmp_path):
    record.save(tmp_path / "result.json", "bench.example", {"figure": 1})
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["commit"] == git(ROOT, "rev-parse", "--short=12", "HEAD")
    assert isinstance(written["clean"], bool)
    assert written["cpu"]
    assert written["command"].startswith("python -m bench.example")
