# SPDX-License-Identifier: BSD-3-Clause
"""Every numeric option of every command, found in the commands' own tables: no number that means nothing is taken."""

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.lib.sets import params
from tests.test_files import JOB, LAYOUT, SIMULATED
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools import main as cli
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.simulation.batches import named_lengths

enable_cpu()
VALUES = ("0", "-1", "nan", "inf", "-inf", "1e400")
ALLOWED = {
    ("plan", "tolerance", "0"): "perfect balance",
    ("compare", "warmup", "0"): "all steps count",
    ("simulate", "latency", "0"): "an exchange takes what its bytes take",
    ("simulate", "seconds_per_step", "0"): "the default",
    ("simulate", "seed", "0"): "the default",
    ("simulate", "tolerance", "0"): "perfect balance",
}
ALLOWED |= {
    ("advise", option, value): why
    for (command, option, value), why in ALLOWED.items()
    if command == "simulate" and option != "tolerance"
}
"""Numbers that mean something, and what."""
BEGINNINGS = {
    "plan": ["plan", "{folder}/layout.json"],
    "profile": ["profile", "--output={folder}/profile.json", "--device=cpu"],
    "prepare": ["prepare", "--output={folder}/assets", "--sources={folder}"],
    "report": ["report", "{folder}"],
    "doctor": ["doctor", JOB],
    "compare": ["compare", JOB, "--output={folder}/compare"],
    "simulate": SIMULATED,
    "advise": ["advise", JOB],
    "serve": ["serve", "--join=localhost:1", "--token=0"],
}


class Reached(BaseException):
    """Says that the options were taken and the work would begin."""


def is_numeric(hint: object) -> bool:
    """Tell whether a type, or a part of it, is a number; True and False are none."""
    return hint in (int, float) or any(map(is_numeric, typing.get_args(hint)))


def numeric_options(command: str) -> Iterator[str]:
    """Yield the fields of a command's options, of the function's own and of dataclasses of them."""
    run = import_module(f"torchtitan_cad.tools.{command}").run
    hints = typing.get_type_hints(run)
    for name, parameter in inspect.signature(run).parameters.items():
        found = {name: hints[name]}
        if dataclasses.is_dataclass(parameter.default):
            found = typing.get_type_hints(type(parameter.default))
        yield from (field for field, hint in found.items() if is_numeric(hint))


CASES = [
    (command, option) for command in cli.COMMANDS for option in numeric_options(command)
]


def test_the_tables_are_found() -> None:
    assert {command for command, _ in CASES} == set(cli.COMMANDS) - {"report"}
    assert {
        ("simulate", "tokens_per_rank"),
        ("plan", "rank_speeds"),
        ("profile", "q_lengths"),
    } <= set(CASES)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops commands where their work begins."""

    def stop(*_: object, **__: object) -> None:
        raise Reached

    for command in ("plan", "simulate", "advise"):
        monkeypatch.setattr(f"torchtitan_cad.tools.{command}.load_planner", stop)
    monkeypatch.setattr("torchtitan_cad.tools.compare.comparison.run", stop)


@pytest.mark.parametrize("case", params(CASES, CASES[::4]), ids=" ".join)
@pytest.mark.usefixtures("stopped")
def test_numbers_that_mean_nothing_are_refused(
    case: tuple[str, str],
    tmp_path: Path,
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, option = case
    (tmp_path / "layout.json").write_text(json.dumps(LAYOUT))
    (tmp_path / "source.py").write_text("pass\n")
    words = [word.format(folder=tmp_path) for word in BEGINNINGS[command]]
    name = option.replace("_", "-")
    for value in VALUES:
        arguments = [*words, f"--{name}={value}"]
        if (command, option, value) in ALLOWED:
            with pytest.raises(Reached):
                main(arguments)
            capsys.readouterr()
            continue
        line = refused(*arguments)
        assert name in line or option in line, (value, line)


@pytest.mark.parametrize(
    "spec",
    [
        "uniform:min=5,max=2",
        "uniform:max=100",
        "pretrain:long=0.5,max=1000",
        "pretrain:long=0.5,from=1e9",
        "pretrain:long=1",
        "lognormal:median=2,median=3",
        *(
            f"{kind}={value}"
            for kind in (
                "lognormal:median",
                "lognormal:sigma",
                "uniform:min",
                "uniform:max",
                "pretrain:scale",
            )
            for value in ("-1", "nan", "inf", "1e99", "")
        ),
        *(
            f"{kind}=0"
            for kind in (
                "lognormal:median",
                "lognormal:max",
                "uniform:min",
                "fixed:length",
            )
        ),
        "fixed:length=1e18",
    ],
)
def test_distributions_that_contradict_themselves(spec: str) -> None:
    with pytest.raises(ValueError, match=f"^documents = '{spec}': "):
        named_lengths(spec)
