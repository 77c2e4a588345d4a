# SPDX-License-Identifier: BSD-3-Clause
"""The budgets of reading count what they say."""

from tests.budgets import LICENCE, Source, places, problems

CODE = {
    "splats": "options = 1, 2\nprint(f(*options))\n",
    "walruses_in_and": "if a and (b := c):\n    pass\n",
    "tuple_assignments": "a, b = 1, 2\n",
    "nested_comprehensions": "[x for y in z for x in y]\n",
    "long_calls": "f(1, 2, 3, 4)\n",
    "pronouns": "def f(each): ...\n",
}


def test_rules_find_what_they_name(tmp_path):
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
    for rule in CODE:
        (place,) = places(rule, tmp_path)
        assert place.startswith(f"{rule}.py:")


def test_names_of_several_files_are_found(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"Step = 1\n{name} = 2\n_own = 3\n")
    assert places("repeated_names", tmp_path) == ["Step: one.py, two.py"]


def test_layout_and_words_do_not_count(tmp_path):
    code = "def f(a):\n    return a + 1\n"
    laid_out = f'{LICENCE}"""Text."""\n\ndef f(\n    a\n):\n    """Text."""  # text\n    return a + 1\n'
    file = tmp_path / "file.py"
    for text in (code, laid_out):
        file.write_text(text)
        source = Source(file, tmp_path)
        assert source.tokens.total() == 10
        assert list(source.functions()) == [("file.py:f", False, 10)]


def test_what_exceeds_a_budget_is_named(tmp_path):
    package = tmp_path / "package"
    budgets = tmp_path / "budgets.toml"
    (package / "room").mkdir(parents=True)
    (package / "room" / "file.py").write_text("def f(a):\n    return a + 1\n")
    limits = "[rooms]\nroom = {}\n[beside]\n[line]\noverall = {}\nfile = {}\n[line.heavier]\n"
    limits += (
        "[function]\nmost = {}\ncompiled = 0\n[function.heavier]\n[rules]\nsplats = 0\n"
    )
    budgets.write_text(limits.format(10, 5, 5, 10))
    assert list(problems(package, budgets)) == []
    budgets.write_text(limits.format(9, 4.9, 4.9, 9))
    named = [line.split(" ")[0] for line in problems(package, budgets)]
    assert named == ["room/file.py", "a", "room", "room/file.py:f"]
