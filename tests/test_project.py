# SPDX-License-Identifier: BSD-3-Clause
"""What surrounds the code: the wheel, workflows, and links of the documentation."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.budgets import LICENCE

ROOT = Path(__file__).parents[1]
FOLDERS = ("*.md", "docs/**/*.md", "patches/*.md", ".github/**/*.*")
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:docs|bench|tests|patches|train_configs|examples)/[\w/.-]+)`")


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def anchors(page):
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text().lower(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    text = page.read_text()
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
    for name in NAMED.findall(text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_sources_name_their_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{project['license']}\n" in LICENCE
    for folder in ("torchtitan_cad", "bench", "examples", "tests", "patches"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.read_text().startswith(LICENCE), path


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_of_hosts(schema, pattern):
    files = sorted(ROOT.glob(pattern))
    assert files
    checker = Path(sys.executable).with_name("check-jsonschema")
    run(checker, f"--builtin-schema=vendor.{schema}", *files)


@pytest.mark.matrix
def test_wheel_is_typed_and_complete(tmp_path):
    """`make wheel` also runs it in an environment of its own, for which it needs a package index."""
    source = tmp_path / "source"
    package = ROOT / "torchtitan_cad"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, source / "torchtitan_cad", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = "--no-deps --no-build-isolation -w"
    run(sys.executable, "-m", "pip", "wheel", *options.split(), tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(wheel, unpacked, "zip")
    packed = {path.relative_to(unpacked) for path in unpacked.rglob("*.py")}
    assert packed == {path.relative_to(ROOT) for path in package.rglob("*.py")}
    assert (unpacked / "torchtitan_cad" / "py.typed").exists()
