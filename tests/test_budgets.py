# SPDX-License-Identifier: BSD-3-Clause
"""The budgets of reading count what they say."""

from tests.budgets import LICENCE, places, problems

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
        (tmp_path / f"{name}.py").write_text(f"Step = _own = 1\n{code}")
    for rule in CODE:
        (place,) = places(rule, tmp_path)
        assert place.startswith(f"{rule}.py:")
    (place,) = places("repeated_names", tmp_path)
    assert place.startswith("Step: long_calls.py, ")


def test_what_exceeds_a_budget_is_named(tmp_path):
    package = tmp_path / "package"
    budgets = tmp_path / "budgets.toml"
    (package / "room").mkdir(parents=True)
    # layout and words do not count
    code = f'{LICENCE}"""Text."""\n\ndef f(a):\n    """Text."""  # text\n    return a + 1\n'
    (package / "room" / "file.py").write_text(code)
    limits = "[rooms]\nroom = {}\n[beside]\n[line]\noverall = {}\nfile = {}\n[line.heavier]\n"
    limits += (
        "[function]\nmost = {}\ncompiled = 0\n[function.heavier]\n[rules]\nsplats = 0\n"
    )
    budgets.write_text(limits.format(10, 5, 5, 10))
    assert list(problems(package, budgets)) == []
    budgets.write_text(limits.format(9, 4.9, 4.9, 9))
    named = [line.split(" ")[0] for line in problems(package, budgets)]
    assert named == ["room/file.py", "a", "room", "room/file.py:f"]
