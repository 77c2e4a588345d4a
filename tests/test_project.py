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


def run(*command: str | Path, **options: object) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]
    assert result.returncode == 0, result.stdout + result.stderr


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
    for name in NAMED.findall(page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_sources_name_their_licence():
    assert (
        f"{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['license']}\n"
        in LICENCE
    )
    for folder in ("torchtitan_cad", "bench", "examples", "tests", "patches"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.read_text().startswith(LICENCE), (
                f"{path}: begin it with {LICENCE}"
            )


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
    run(
        Path(sys.executable).with_name("check-jsonschema"),
        "--builtin-schema",
        f"vendor.{schema}",
        *files,
    )


@pytest.mark.matrix
def test_wheel_is_typed_and_complete(tmp_path):
    """`make wheel` also runs it in an environment of its own, for which it needs a package index."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "torchtitan_cad",
        source / "torchtitan_cad",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    )
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "unpacked", "zip")
    written = {
        path.relative_to(ROOT) for path in (ROOT / "torchtitan_cad").rglob("*.py")
    }
    packed = tmp_path / "unpacked"
    assert {path.relative_to(packed) for path in packed.rglob("*.py")} == written
    assert (packed / "torchtitan_cad" / "py.typed").exists()
