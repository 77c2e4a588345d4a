# SPDX-License-Identifier: BSD-3-Clause
"""Reading files that users name: once, with limits, and without waiting for a pipe or a device."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_cad.planning.text import parse_json, printable

MAX_BYTES = 2**26
"""bytes: most of a file that is read whole, some million segments, and of a line."""
MAX_BYTES_OF_LINES = 2**31
"""bytes: most of a file that is read line by line."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Kinds of files other than regular ones, in words."""


def kind_of(mode: int) -> str | None:
    """Return the kind of file in words, by its mode; None for a regular file."""
    return (
        None if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no regular file")
    )


def read_text(path: str | Path) -> str:
    """Return what a file holds. Raises ValueError naming the file, what is wrong with it, and the remedy."""
    with _opened(path, MAX_BYTES) as file:
        content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:  # of a file that does not tell its size
            raise ValueError(_too_large(MAX_BYTES))
        return _decoded(content)


def read_json(path: str | Path) -> Any:
    """Return what a JSON file holds. Raises ValueError as ``read_text``, and for what ``parse_json`` refuses."""
    text = read_text(path)
    try:
        return parse_json(text)
    except JSONDecodeError as error:
        raise ValueError(f"{printable(path)} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{printable(path)}: {error}") from None


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of every whole line that is not blank; a last line without an end may be half written.

    Raises:
        ValueError: as ``read_text``; names the line, too, where one is at fault.
    """
    with _opened(path, MAX_BYTES_OF_LINES) as file:
        number = 0
        while line := file.readline(MAX_BYTES + 1):
            number += 1
            if len(line) > MAX_BYTES:
                raise ValueError(f"line {number} {_too_large(MAX_BYTES)}")
            if not line.endswith(b"\n"):
                return
            if not line.isspace():
                yield number, _decoded(line[:-1], f"line {number} ")


@contextmanager
def _opened(path: str | Path, most: int) -> Iterator[BinaryIO]:
    """Open a regular file of at most ``most`` bytes; errors, also of the block, begin with the path."""
    try:
        # before it is opened: a pipe would wait, and a device may answer
        _check_kind(os.stat(path), most)
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"{printable(path)}: {error.strerror or error}; name a file that can be read"
        ) from None
    except ValueError as error:  # also for a null character in the path
        raise ValueError(f"{printable(path)}: {error}") from None


def _check_kind(found: os.stat_result, most: int) -> None:
    if kind := kind_of(found.st_mode):
        raise ValueError(f"this is {kind}; name a regular file")
    if found.st_size > most:
        raise ValueError(_too_large(most))


def _too_large(most: int) -> str:
    return f"has more than {most // 2**20} MiB; name a smaller file"


def _decoded(content: bytes, where: str = "") -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}is not UTF-8 at byte {error.start}; write it in UTF-8"
        ) from None
