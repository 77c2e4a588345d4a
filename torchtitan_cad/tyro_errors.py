# SPDX-License-Identifier: BSD-3-Clause
"""What is wrong with a command line, in one sentence: tyro prints a box of many lines and ends the process."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator

HELP_INDENT = 8 * " "
"""Beginning of the lines of an option's help, inside of a box."""


@contextlib.contextmanager
def one_line_instead() -> Iterator[None]:
    """Raise ValueError where tyro ends the process over a job's options."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(
            f"{say_error(printed.getvalue())}; --help lists every option and what it takes"
        ) from None
    sys.stderr.write(printed.getvalue())


def say_error(box: str) -> str:
    """Return what tyro's box says of an error, and the nearest option if it knows one; without options' help."""
    paragraphs: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # behind the title
        text = line.strip("│╰╯─ ")
        if not text.strip("-"):
            paragraphs.append([])
        elif not line[2:].startswith(HELP_INDENT):
            paragraphs[-1].append(text)
    first, *others = filter(None, [*paragraphs, [box]])
    # Of options in a dataclass, tyro names a parameter of its own.
    what = re.sub(r"^Error parsing (?:\S*__tyro\S*: |--)", "", " ".join(first))
    what = what.rstrip(". ")
    for title, *options in others:
        if title == "Perhaps you meant:":
            return f"{what}; perhaps you meant {options[0]}"
    return what
