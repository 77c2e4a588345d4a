"""Files that commands read and write: what is wrong with one is said before the work, not after it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan_cad.planning.text import parse_json

PICTURES = (".png", ".pdf", ".svg")

MAX_BYTES = 2**26
"""Of a file that is read: some million segments. A device without an end, or a wrong file, is not read to the end."""


def read_bytes(path: Path) -> bytes:
    """Return the file's content. Raises ValueError for more than ``MAX_BYTES``, OSError for what cannot be read."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES // 2**20} MiB: name a smaller file")
    return content


def read_json(path: Path) -> Any:
    """Return what the JSON file holds. Raises ValueError for none, OSError for what cannot be read."""
    content = read_bytes(path)
    try:
        return parse_json(content.decode())
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{path} is not JSON: {error}") from error


def check_job(path: Path) -> None:
    """Raise ValueError if there is no such file; make torchtitan, not imported before, run on CPU without a GPU."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    from torchtitan_cad.integration.titan022.cpu import enable_cpu

    enable_cpu()


def check_output(option: str, path: Path) -> None:
    """Raise ValueError for a path that no file can be written to."""
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder; name a file, such as {path / 'output'}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")


def check_folder(option: str, path: Path) -> None:
    """Make the folder; raise ValueError for a path that cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError for a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{option} {path}: {reason}; name a folder that can be written to") from error


def check_picture(option: str, path: Path) -> None:
    """Raise ValueError for a path that no picture can be written to, or without matplotlib."""
    check_output(option, path)
    if path.suffix.lower() not in PICTURES or (path.exists() and not path.is_file()):
        raise ValueError(f"{option} {path}: name a file that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} {path}: matplotlib is not installed; `pip install matplotlib`, or leave it out")
