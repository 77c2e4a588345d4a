# SPDX-License-Identifier: BSD-3-Clause
"""Every command of the documentation is one that its program takes, and those that take seconds run."""

import argparse
import ast
import functools
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import tyro

from tests.lib.jobs.harness import tokenizer_folder
from tests.lib.sets import matrix
from tests.test_project import PAGES, ROOT
from torchtitan_cad import launch
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools import main as cli
from torchtitan_cad.tools.prepare.tokenizer import prepare_tokenizer

FIRST = [ROOT / "README.md", ROOT / "docs/get_started.md"]
"""What a new user reads before the other pages."""
IN_REPOSITORY = re.compile(r"(bench|docs|examples|patches|tests|train_configs)/")


PROGRAM = re.compile(
    r"(?:\S*/)?(?:torchtitan-cad|make|torchrun|python -m|python \S+\.py)(?: |$)|--\w+\.\w+ "
)
JOB = "train_configs/llama3_debug_cpu.toml"
"""Takes the place of a reader's own train.toml."""
LONG = re.compile(
    r"torchtitan-cad (compare|simulate|serve|\w+$|report)|make (?!train)|pytest|(launch|torchrun)$"
    r"|torchtitan\.train|--module |bench\.(by_commit|gpu|long_run|memory|network|overlap|paper|pipeline|placement)"
    r"|bench\.(planner|servers|tolerance|trace)|\$|FOLDER|^--|patches/"
)
"""Commands that take minutes or read what another wrote, what lacks a part that a reader fills in, and recipes, which
need torchtitan 0.3.0 (tests/titan030)."""
WRITTEN = ("bench", "train_configs")
SHORTER = {
    "seq_len = 16384": "seq_len = 2048",
    "steps = 20": "steps = 4",
    "--training.steps 6": "--training.steps 2",
    "--nproc_per_node=8": "--nproc_per_node=2",
    "--nproc_per_node=4": "--nproc_per_node=2",
    "make train": "make train NRANKS=2",
}


NO_COMMANDS = ("torchtitan-cad", "torchtitan-cad COMMAND")


def commands_of(page):
    """Yield what stands in blocks and in backquotes."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    for block, span in re.findall(r"^ {4,}(\S.*)$|`([^`]+)`", text, re.MULTILINE):
        for words in re.split(r" +#| && ", " ".join((block or span).split())):
            command = words.removeprefix("srun ").removesuffix(" ...")
            command = command.replace(" ... ", " ")
            if PROGRAM.match(command) and command not in NO_COMMANDS:
                yield command


COMMANDS = list(
    dict.fromkeys(command for page in [*FIRST, *PAGES] for command in commands_of(page))
)


class Parsed(Exception):
    """Carries what a parser has read, in place of what the program would do with it."""


def parsed(start, *arguments):
    """Return what a program reads from its command line. Fails where its parser does."""

    def stopping(parse):
        def parse_and_stop(target, *args, **kwargs):
            if inspect.isfunction(target):  # tyro would call it
                target = functools.wraps(target)(lambda *_, **__: None)
            raise Parsed(parse(target, *args, **kwargs))

        return parse_and_stop

    with (
        mock.patch.object(tyro, "cli", stopping(tyro.cli)),
        mock.patch.object(
            argparse.ArgumentParser,
            "parse_args",
            stopping(argparse.ArgumentParser.parse_args),
        ),
        mock.patch.object(sys, "argv", ["", *arguments]),
        pytest.raises(Parsed) as stopped,
    ):
        start()
    return stopped.value.args[0]


def run_main(name):
    """Run what a module does as a program, in the module as others import it."""
    module = import_module(name)
    if hasattr(module, "__path__"):
        module = import_module(f"{name}.__main__")
    block = ast.parse(inspect.getsource(module)).body[-1]
    exec(compile(ast.Module(block.body, []), name, "exec"), vars(module))


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_are_taken(command, monkeypatch):
    enable_cpu()
    from torchtitan_cad.integration.torchtitan_v0_2.manager import read_config

    monkeypatch.chdir(ROOT)
    of_reader = {"train.toml": JOB, "outputs/assets": str(tokenizer_folder())}
    words = [of_reader.get(word, word) for word in shlex.split(command)]
    for word in words:
        assert Path(word).exists() or not IN_REPOSITORY.match(word), word
    program, *arguments = words
    match [Path(program).name, *arguments]:
        case [option, *_] if option.startswith("--"):
            read_config(words)
        case ["make", *_]:
            make = ["make", "--dry-run", *arguments]
            done = subprocess.run(make, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            for name in re.findall(r"(\w+)=", command):
                assert f"$({name})" in Path("Makefile").read_text(), name
        case ["torchtitan-cad", name]:
            assert name in cli.COMMANDS
        case ["torchtitan-cad", *_]:
            options = parsed(cli.main, *arguments).keywords
            if overrides := options.get("overrides"):
                read_config([f"--job.config_file={options['job']}", *overrides])
        case ["torchrun", *launched] | [
            "python",
            "-m",
            "torchtitan_cad.launch",
            *launched,
        ] if launched:
            options = parsed(launch.main, *launched)
            assert find_spec(options.training_script) is not None
            match options.training_script_args:
                case ["--module", recipes, *_]:  # tests/titan030 reads the others
                    assert find_spec(recipes) is not None
                case of_job:
                    read_config(of_job)
        case ["python", "-m", "torchtitan_cad.launch" | "pytest", *_]:
            pass
        case ["python", "-m", module, *of_module]:
            parsed(functools.partial(run_main, module), *of_module)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Make a folder where commands may write, with links to all else, a tokenizer, and shorter training.

    The package has no link: under a second path its planner would be compiled anew, in the same folder.
    """
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.glob("[!.]*"):
        if path.name in WRITTEN:
            shutil.copytree(path, folder / path.name)
        elif path.name not in ("outputs", "torchtitan_cad"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    prepare_tokenizer(folder / "outputs/assets")
    for name in (JOB, "train.toml"):
        (folder / name).write_text(shorter((ROOT / JOB).read_text()))
    return folder


def shorter(text):
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


@matrix
@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if not LONG.search(command)]
)
def test_documented_commands_run(command, clone):
    """Each runs by itself, in any order; two ranks stand for four and for eight."""
    command = shorter(command).replace("make ", "make --old-file=.venv/.installed ")
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", "600", "bash", "-c", command],
        cwd=clone,
        env={**os.environ, "PATH": search, "PYTHONPATH": f"{clone}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
