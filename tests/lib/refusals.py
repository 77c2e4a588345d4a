# SPDX-License-Identifier: BSD-3-Clause
"""Errors in tests: key, value and remedy are checked by structure, the prose of all of them is in one golden file.

``make errors`` writes tests/golden/errors.txt again; its change shows what users will read.
"""

import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden" / "errors.txt"
REMEDY = re.compile(
    r"(?i)\b(set|give|add|leave|install|write|correct|remove|choose|name|take|make|measure|plan|keep|run|start|train|"
    r"did you mean|must be|(n)?one of|--help)\b"
)
HERE = (
    (re.escape(str(TESTS.parent)), "REPOSITORY"),
    (r"/\S*?/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[^/\s'\":;,]+", "FOLDER"),
    (r"/tmp/tmp\w+", "FOLDER"),
    (re.escape(sysconfig.get_path("stdlib")), "STDLIB"),
    (r"/proc/\d+/fd/\d+", "/proc/PID/fd/NUMBER"),
    (r"\(pid \d+\)", "(pid NUMBER)"),
    (r"localhost:\d+", "localhost:PORT"),
    (r"\b[0-9a-f]{16}\b", "FINGERPRINT"),
    (r"this device's [\d.]+ GB", "this device's NUMBER GB"),
    (re.escape(torch.__version__), "TORCH"),
    # planners of the bench
    ("greedy, home", "home"),
    (", ten times the moves, within the limits alone", ""),
)
"""What differs from run to run, and what the golden file has in its place."""
VERSIONS = (
    f"Python {sys.version_info.major}.{sys.version_info.minor}, "
    f"torch {torch.__version__.partition('+')[0]}"
)
UNLISTED = ("matrix", "slow", "gpu")
"""Marks of tests whose errors the golden file need not have, as writing it would take too long."""
DRAWN = ("test_hostile.py", "test_numbers.py")
"""Files whose tests draw many wrong values of the same keys."""


class Prose:
    """Texts of errors by test: compared with the golden file, or collected to be written into it."""

    def __init__(self) -> None:
        self.is_written = False
        self.is_comparable = True
        """False if other versions of Python or torch wrote the file, whose own words are in some errors."""
        self.test = None
        self.texts = {}

    def begin(self, item: pytest.Item) -> None:
        is_drawn = item.path.name in DRAWN
        is_listed = not is_drawn and not any(map(item.get_closest_marker, UNLISTED))
        self.test = item.nodeid.removeprefix("tests/") if is_listed else None

    def read(self) -> None:
        """Take what the golden file has."""
        versions, *paragraphs = GOLDEN.read_text().strip().split("\n\n")
        self.is_comparable = versions == VERSIONS
        for paragraph in paragraphs:
            test, *texts = paragraph.split("\n    ")
            self.texts[test] = texts

    def forget(self, files: set[str]) -> None:
        """Take out the texts of tests in these files, which run again, and of tests that are gone."""
        for test in list(self.texts):
            file, _, name = test.partition("::")
            function = f"def {name.partition('[')[0]}("
            path = TESTS / file
            is_gone = not path.exists() or function not in path.read_text()
            if file in files or is_gone:
                del self.texts[test]

    def write(self) -> None:
        paragraphs = [
            "\n    ".join([test, *self.texts[test]]) for test in sorted(self.texts)
        ]
        GOLDEN.write_text("\n\n".join([VERSIONS, *paragraphs]) + "\n")

    def told(self, text: str) -> None:
        """Compare the text of an error that the running test has met, or collect it."""
        if self.test is None or not (self.is_written or self.is_comparable):
            return
        for pattern, name in HERE:
            text = re.sub(pattern, name, text)
        text = " ".join(text.split())
        texts = self.texts.setdefault(self.test, [])
        if self.is_written and text not in texts:
            texts.append(text)
        assert text in texts, (
            f"{text!r} is not in tests/golden/errors.txt; if it reads well: make errors"
        )


PROSE = Prose()


def check_refusal(
    text: str, key: str = "", value=None, remedy: str | None = ""
) -> None:
    """Check that the error names ``key``, then ``value``, and then says what to do, naming ``remedy``.

    The prose of errors in processes that a test starts is not compared; None: nothing can be done.
    """
    PROSE.told(text)
    assert key in text, text
    if value is None and not remedy:
        return
    after = text[text.index(key) + len(key) :]
    assert str(value or "") in after, text
    if remedy is not None:
        verb = REMEDY.search(after, after.find(str(value or "")))
        assert verb, text
        assert remedy in after[verb.end() :], text


@contextmanager
def refusal(
    key: str = "",
    value=None,
    remedy: str | None = "",
    error: type[BaseException] = ValueError,
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error, and check it as `check_refusal` does."""
    with pytest.raises(error) as raised:
        yield raised
    check_refusal(str(raised.value), key, value, remedy)
