# SPDX-License-Identifier: BSD-3-Clause
"""What is said in one line where another version of torchtitan is installed than a job is for."""

import sys

import pytest

from tests.lib.refusals import refusal
from torchtitan_cad import titan, train
from torchtitan_cad.recipes import cad, llama3
from torchtitan_cad.tools import main as commands

RECIPE = "--module=torchtitan_cad.recipes.llama3"


@pytest.fixture
def installed(monkeypatch):
    """Makes another version of torchtitan the one that is installed."""

    def install(version):
        monkeypatch.setattr(titan, "version", lambda name: version)

    return install


@pytest.mark.parametrize(
    ("version", "recipes"), [("0.2.2", False), ("0.3.0", True), ("0.10.1.dev1", True)]
)
def test_versions(version, recipes, installed):
    installed(version)
    assert titan.has_recipes() == recipes


def test_recipes_under_toml(installed):
    installed("0.2.2")
    with refusal():
        cad(None)
    with refusal():
        _ = llama3.llama3_8b


@pytest.mark.parametrize(
    ("version", "option", "remedy"),
    [
        ("0.2.2", RECIPE, "--job.config_file"),
        ("0.3.0", "--job.config_file=a", "--module"),
    ],
)
def test_a_job_of_another_version(
    version, option, remedy, installed, monkeypatch, capsys
):
    installed(version)
    monkeypatch.setattr(sys, "argv", ["train", option])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: torchtitan {version} is installed")
    assert remedy in line


@pytest.mark.parametrize(
    ("version", "job", "problem"),
    [
        ("0.2.2", RECIPE, "--module"),
        ("0.3.0", RECIPE, "--module"),
        ("0.3.0", "train.toml", "train.toml: jobs of the installed torchtitan"),
    ],
)
def test_commands_read_no_recipe(version, job, problem, installed, capsys):
    installed(version)
    for command in ("doctor", "simulate", "compare"):
        assert commands.main([command, job]) == commands.USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"torchtitan-cad: error: {problem}")
        assert "train a recipe with --cad.shadow" in line
