# SPDX-License-Identifier: BSD-3-Clause
"""The budgets of reading count what they say."""

import pytest

from tests.budgets import LICENCE, Source, places, problems

CODE = {
    "splats": "options = 1, 2\nprint(f(*options))\n",
    "walruses_in_and": "if a and (b := c):\n    pass\n",
    "tuple_assignments": "a, b = 1, 2\n",
    "nested_comprehensions": "[x for y in z for x in y]\n",
    "long_calls": "f(1, 2, 3, 4)\n",
}


@pytest.mark.parametrize("rule", CODE)
def test_rules_find_what_they_name(rule, tmp_path):
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
    assert {place.split(":")[0] for place in places(rule, tmp_path)} == {f"{rule}.py"}


def test_names_of_several_files_are_found(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"Step = 1\n{name} = 2\n_own = 3\n")
    assert places("repeated_names", tmp_path) == ["Step: one.py, two.py"]


def test_layout_and_words_do_not_count(tmp_path):
    (tmp_path / "short.py").write_text("def f(a):\n    return a + 1\n")
    (tmp_path / "long.py").write_text(
        f'{LICENCE}"""Text."""\n\ndef f(\n    a\n):\n    """Text."""  # text\n    return a + 1\n'
    )
    short, long = (
        Source(tmp_path / f"{name}.py", tmp_path) for name in ("short", "long")
    )
    assert short.tokens.total() == long.tokens.total() == 10
    assert list(long.functions()) == [("long.py:f", False, 10)]


def test_what_exceeds_a_budget_is_named(tmp_path):
    package, budgets = tmp_path / "package", tmp_path / "budgets.toml"
    (package / "room").mkdir(parents=True)
    (package / "room" / "file.py").write_text("def f(a):\n    return a + 1\n")
    limits = "[rooms]\nroom = {}\n[beside]\n[line]\noverall = {}\nfile = {}\n[line.heavier]\n"
    limits += (
        "[function]\nmost = {}\ncompiled = 0\n[function.heavier]\n[rules]\nsplats = 0\n"
    )
    budgets.write_text(limits.format(10, 5, 5, 10))
    assert list(problems(package, budgets)) == []
    budgets.write_text(limits.format(9, 4.9, 4.9, 9))
    assert [line.split(" ")[0] for line in problems(package, budgets)] == [
        "room/file.py",
        "a",
        "room",
        "room/file.py:f",
    ]
