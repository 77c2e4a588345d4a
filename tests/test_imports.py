# SPDX-License-Identifier: BSD-3-Clause
"""The package's layers: which part may import which, read from the source, imports inside functions included."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.lib.sets import matrix

ROOT = Path(__file__).parents[1]
PACKAGE = "torchtitan_cad"
PARTS_OF_BLOCKS = {
    "attention",
    "feed_forward",
    "ffn_norm",
    "wq",
    "wk",
    "wv",
    "wo",
    "w1",
    "w2",
    "w3",
}
PARTS_OF_BLOCKS |= {"q_norm", "k_norm"}
"""torchtitan 0.2.2's names of the parts of a transformer block"""
MAY_IMPORT = {  # besides itself and the standard library
    "planning": {"numpy", "numba", "filelock", "llvmlite"},
    "runtime": {"numpy", "torch", "triton", "filelock", "planning"},
    "demo": {"numpy", "torch", "torchtitan", "datasets", "tqdm", "planning"},
    "tools.simulation": {"numpy", "planning", "integration.config"},
}

ADAPTERS = (
    f"{PACKAGE}.integration.torchtitan_v0_2",
    f"{PACKAGE}.integration.torchtitan_v0_3",
)

PATHS = sorted((ROOT / PACKAGE).rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in PATHS
}


def _parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def _imports(name: str) -> set[str]:
    """Modules that a module imports, in full; ``from package import name`` counts as the module if it is one."""
    found = set()
    for node in ast.walk(_parse(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{name}: a relative import"
            found |= {
                f"{node.module}.{alias.name}" for alias in node.names
            } & MODULES.keys() or {node.module}
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_layers(part):
    """Planning knows no torch, runtime and simulation no torchtitan, and nothing imports a layer above it."""
    for name in MODULES:
        if name.startswith(f"{PACKAGE}.{part}"):
            for target in _imports(name):
                if not target.startswith(f"{PACKAGE}.{part}"):
                    own = target.removeprefix(f"{PACKAGE}.")
                    allowed = MAY_IMPORT[part] | sys.stdlib_module_names
                    assert {own, own.split(".")[0]} & allowed, (
                        f"{name} imports {target}"
                    )


@matrix
def test_jobs_import_no_tools_and_the_demo_only_if_they_name_it():
    code = (
        "from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu; enable_cpu(); "
        "import sys, torchtitan.train; "
        "import torchtitan_cad.train, torchtitan_cad.job_config, torchtitan_cad.integration.torchtitan_v0_2.manager; "
        "unwanted = ('torchtitan_cad.demo', 'torchtitan_cad.tools', 'matplotlib'); "
        "sys.exit(str([name for name in sys.modules if name.startswith(unwanted)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr.splitlines()[-1] == "[]"


def test_one_package_knows_a_version_of_torchtitan():
    """Besides the examples' data and the entry points, which name torchtitan's own classes."""
    for name in MODULES:
        if name.startswith(f"{PACKAGE}.integration.") and not name.startswith(ADAPTERS):
            for target in _imports(name):
                assert target.split(".")[0] != "torchtitan", f"{name} imports {target}"
                assert "torchtitan_v0" not in target, f"{name} imports {target}"
            named = {
                node.attr
                for node in ast.walk(_parse(name))
                if isinstance(node, ast.Attribute)
            }
            assert not named & PARTS_OF_BLOCKS, (
                f"{name} names {named & PARTS_OF_BLOCKS} of a block"
            )


def test_adapters_share_no_code_of_their_own():
    for own, other in (ADAPTERS, ADAPTERS[::-1]):
        for name in MODULES:
            if name.startswith(own):
                assert not any(target.startswith(other) for target in _imports(name)), (
                    name
                )


def test_nothing_that_trains_imports_tools():
    for name in MODULES:
        if not name.startswith(f"{PACKAGE}.tools"):
            assert not any(
                target.startswith(f"{PACKAGE}.tools") for target in _imports(name)
            ), name


def test_no_tool_imports_the_command_line():
    for name in MODULES:
        assert f"{PACKAGE}.tools.main" not in _imports(name), name


def test_benches_and_tests_share_helpers_alone():
    """Benches import tests.lib and no other tests, and tests.lib imports neither benches nor tests."""
    for folder, wanted in (("bench", "tests.lib"), ("tests/lib", "tests.lib")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            modules = re.findall(
                r"^\s*(?:from|import) ((?:bench|tests)[\w.]*)",
                path.read_text(),
                re.MULTILINE,
            )
            if folder == "bench":
                modules = [
                    module for module in modules if not module.startswith("bench")
                ]
            assert all(module.startswith(wanted) for module in modules), (
                f"{path} imports {modules}"
            )


def test_no_circles():
    """Whoever imports a module needs what it imports, and never the other way round; packages stand for their lists."""
    graph = {
        name: {each for each in _imports(name) if each in MODULES and each != name}
        for name in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")
