# SPDX-License-Identifier: BSD-3-Clause
"""Every numeric option of every command, found in the commands' own tables: no number that means nothing is taken."""

import dataclasses
import inspect
import typing
from importlib import import_module

import pytest

from tests.lib.refusals import refusal
from tests.lib.sets import params
from tests.test_files import EXAMPLE, JOB, SIMULATED
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools import main as cli
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.simulation.batches import named_lengths

enable_cpu()
VALUES = ("0", "-1", "nan", "inf", "-inf", "1e400")
ALLOWED = {
    "plan tolerance 0": "perfect balance",
    "compare warmup 0": "all steps count",
    "simulate latency 0": "an exchange takes what its bytes take",
    "simulate seed 0": "the default",
    "simulate tolerance 0": "perfect balance",
}
"""Numbers that mean something, and what."""

BEGINNINGS = {
    "plan": f"plan {EXAMPLE}",
    "prepare": "prepare --output={folder}/assets --sources={folder}",
    "doctor": f"doctor {JOB}",
    "compare": f"compare {JOB} --output={{folder}}/compare",
    "simulate": SIMULATED,
    "serve": "serve --join=localhost:1 --token=known",
}


class Reached(BaseException):
    """Says that the options were taken and the work would begin."""


def is_numeric(hint):
    """Tell whether a type, or a part of it, is a number; True and False are none."""
    return hint in (int, float) or any(map(is_numeric, typing.get_args(hint)))


def numeric_options(command):
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


def test_the_tables_are_found():
    assert {command for command, _ in CASES} == BEGINNINGS.keys()
    assert BEGINNINGS.keys() == set(cli.COMMANDS) - {"report"}
    assert ("simulate", "tokens_per_rank") in CASES


@pytest.fixture
def stopped(monkeypatch):
    """Stops commands where their work begins."""

    def stop(*_, **__):
        raise Reached

    for work in ("plan.load_planner", "simulate.load_planner"):
        monkeypatch.setattr(f"torchtitan_cad.tools.{work}", stop)
    monkeypatch.setattr("torchtitan_cad.tools.compare.comparison.run", stop)


@pytest.mark.parametrize("case", params(CASES, CASES[::4]), ids=" ".join)
@pytest.mark.usefixtures("stopped")
def test_numbers_that_mean_nothing_are_refused(case, tmp_path, refused, capsys):
    command, option = case
    (tmp_path / "source.py").write_text("pass\n")
    words = BEGINNINGS[command].format(folder=tmp_path).split()
    name = option.replace("_", "-")
    for value in VALUES:
        arguments = [*words, f"--{name}={value}"]
        if f"{command} {option} {value}" in ALLOWED:
            with pytest.raises(Reached):
                main(arguments)
            capsys.readouterr()
        else:
            line = refused(*arguments)
            assert name in line or option in line, (value, line)


def test_distributions_that_contradict_themselves():
    specs = [
        "uniform:min=5,max=2",
        "uniform:max=100",
        "pretrain",
        "lognormal:from=1e9",
        "lognormal:median=2,median=3",
        "lognormal:max=0",
        "fixed:length=0",
        "fixed:length=1e18",
    ]
    keys = "lognormal:median lognormal:sigma uniform:min uniform:max"
    for key in keys.split():
        specs += [f"{key}={value}" for value in ("-1", "nan", "inf", "1e99", "")]
    specs += ["lognormal:median=0", "uniform:min=0"]
    for spec in specs:
        with refusal("documents", spec):
            named_lengths(spec)
