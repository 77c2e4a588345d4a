# SPDX-License-Identifier: BSD-3-Clause
"""Files of results, one for every GPU and part, and what says which code they are of.

    python -m bench.gpu.results FOLDER --commit REVISION

copies results of a machine without the repository's history to bench/results/gpu, with the commit whose sources they
are of.
"""

import hashlib
import io
import json
import math
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu.process import ROOT
from bench.record import git

Result = dict[str, Any]
"""A part's outcome, with its date, its command and the ``identity`` of what was measured."""
PAGE = "README.md"
SOURCES = ("torchtitan_cad", "bench", "tests/gpu")
KEYS = {
    *(
        "part",
        "date",
        "command",
        "gpu",
        "torch",
        "python",
        "commit",
        "clean",
        "sources",
        "dry_run",
    ),
    *("status", "why", "seconds", "figures", "output"),
}
"""What every result has."""
RESULTS = ROOT / "bench" / "results" / "gpu"


def identity(environment: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
    """Return what tells results apart: the GPU, the versions, and the code.

    ``commit`` is HEAD of the working tree and ``clean`` whether it has no changes; both are None without git.
    ``sources`` is a hash of the code itself.

    Args:
        environment: figures of the part ``environment``.
    """
    versions = {
        name: str(environment.get(name, "unknown"))
        for name in ("gpu", "torch", "python")
    }
    changes = git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", *SOURCES)
    return {
        **versions,
        "commit": git(ROOT, "rev-parse", "--short=12", "HEAD"),
        "clean": None if changes is None else not changes,
        "sources": source_hash(),
        "dry_run": dry_run,
    }


def gpu_name(result: Result) -> str:
    """Return the GPU's name in the names of files: "h200" for NVIDIA H200, "cpu" for stand-ins."""
    if result["dry_run"]:
        return "cpu"
    words = re.findall(r"\w+", result["gpu"].lower().removeprefix("nvidia"))
    return "-".join(words)


def write(folder: Path, result: Result) -> None:
    """Write a part's result in place of an earlier one of the GPU, unless that has figures and this was skipped."""
    path = folder / f"{gpu_name(result)}-{result['part']}.json"
    if result["status"] != "skipped" or not any(
        earlier["figures"] for earlier in _read_files([path])
    ):
        _write(path, json.dumps(_strict(result), indent=1) + "\n")


def write_page(folder: Path, text: str) -> None:
    """Write the page of all results of a folder."""
    _write(folder / PAGE, text)


def read(folder: Path) -> list[Result]:
    """Return all results of a folder; a file that holds something else is left out."""
    return _read_files(sorted(folder.glob("*.json")))


def _read_files(paths: list[Path]) -> list[Result]:
    found = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.keys() >= KEYS:
            found.append(content)
    return found


def _strict(value: Any) -> Any:
    """Return the value with null in place of what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def same_code(result: Result, other: Result) -> bool:
    """Return whether two results are of one state of the sources, on the same GPU and torch."""
    return all(
        result[name] == other[name] for name in ("gpu", "torch", "sources", "dry_run")
    )


def done(found: list[Result], own: dict[str, Any]) -> set[str]:
    """Return the names of the parts that are done for an ``identity``."""
    return {
        result["part"]
        for result in found
        if result["status"] == "done" and same_code(result, own)
    }


def source_hash(root: Path = ROOT) -> str:
    """Return a hash of all code measured and measuring, which shows edits that no commit has."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(
        path for folder in SOURCES for path in (root / folder).rglob("*.py")
    ):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def adopt(measured: Path, revision: str, destination: Path = RESULTS) -> list[str]:
    """Copy results to ``destination`` with the commit that they are of, and return the names of their parts.

    Args:
        measured: folder of results.
        revision: the commit; its sources must have the results' hash.

    Raises:
        ValueError: there are no results of a GPU, no such commit, or some results are of other sources than its own.
    """
    found = read(measured)
    if not found or any(result["dry_run"] for result in found):
        raise ValueError(
            f"{measured} has no results of a GPU: name what `python -m bench.gpu --output` wrote to there"
        )
    commit = git(ROOT, "rev-parse", "--short=12", f"{revision}^{{commit}}")
    if commit is None:
        raise ValueError(
            f"--commit {revision}: there is no such commit here; name the one that was measured"
        )
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(name, filter="data")
        sources = source_hash(Path(name))
    for result in found:
        if result["sources"] != sources:
            raise ValueError(
                f"{result['part']} was measured on sources {result['sources']}, but those of {revision} are {sources}: "
                "name the commit that was measured"
            )
    destination.mkdir(parents=True, exist_ok=True)
    for result in found:
        write(destination, {**result, "commit": commit, "clean": True})
    return [result["part"] for result in found]


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    unfinished = path.with_suffix(path.suffix + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    import tyro  # only here: the run needs no command line of this module

    from bench.gpu.report import page

    def main(folder: tyro.conf.Positional[Path], commit: str = "HEAD") -> None:
        """Copy results to bench/results/gpu, with the commit whose sources they are of, and write their page."""
        try:
            print("copied:", ", ".join(adopt(folder, commit)))
        except ValueError as error:
            sys.exit(f"error: {error}")
        write_page(RESULTS, page(read(RESULTS)))

    tyro.cli(main)
