# SPDX-License-Identifier: BSD-3-Clause
"""The package's layers: which part may import which, read from the source, imports inside functions included."""

import ast
import functools
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "torchtitan_cad"
PARTS_OF_BLOCKS = "attention feed_forward ffn_norm wq wk wv wo w1 w2 w3 q_norm k_norm"
"""torchtitan 0.2.2's names of the parts of a transformer block"""

MAY_IMPORT = {  # besides itself and the standard library
    "planning": {"numpy", "numba", "filelock", "llvmlite"},
    "runtime": {"numpy", "torch", "triton", "filelock", "planning"},
    "demo": {"numpy", "torch", "torchtitan", "datasets", "tqdm", "planning"},
    "tools.simulation": {"numpy", "planning", "integration.config", "demo.lengths"},
}

ADAPTERS = ("integration.torchtitan_v0_2", "integration.torchtitan_v0_3")

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}


OF_REPOSITORY = re.compile(r"^\s*(?:from|import) ((?:bench|tests)[\w.]*)", re.MULTILINE)


@functools.cache
def _parse(name):
    return ast.parse(MODULES[name].read_text())


@functools.cache
def _imports(name):
    """Modules that a module imports, in full; ``from package import name`` counts as the module if it is one."""
    found = set()
    for node in ast.walk(_parse(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{name}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {node.module}
    return found


def _outside(part):
    """Modules of a part of the package, each with every module of other parts that it imports."""
    prefix = f"{PACKAGE}.{part}"
    return [
        (name, target)
        for name in MODULES
        if name.startswith(prefix)
        for target in _imports(name)
        if not target.startswith(prefix)
    ]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_layers(part):
    """Planning knows no torch, runtime and simulation no torchtitan, and nothing imports a layer above it."""
    allowed = MAY_IMPORT[part] | sys.stdlib_module_names
    for name, target in _outside(part):
        own = target.removeprefix(f"{PACKAGE}.")
        assert {own, own.split(".")[0]} & allowed, f"{name} imports {target}"


def test_one_package_knows_a_version_of_torchtitan():
    """Besides the examples' data and the entry points, which name torchtitan's own classes."""
    adapters = tuple(f"{PACKAGE}.{adapter}" for adapter in ADAPTERS)
    for name in MODULES:
        if name.startswith(f"{PACKAGE}.integration.") and not name.startswith(adapters):
            for target in _imports(name):
                assert target.split(".")[0] != "torchtitan", (name, target)
                assert not target.startswith(adapters), (name, target)
            nodes = ast.walk(_parse(name))
            named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            assert named.isdisjoint(PARTS_OF_BLOCKS.split()), name


def test_adapters_share_no_code_of_their_own():
    for adapter in ADAPTERS:
        for name, target in _outside(adapter):
            assert "integration.torchtitan_v0" not in target, (name, target)


def test_nothing_that_trains_imports_tools():
    """And no tool imports the command line."""
    tools = f"{PACKAGE}.tools"
    for name in MODULES:
        wrong = f"{tools}.main" if name.startswith(tools) else tools
        for target in _imports(name):
            assert not target.startswith(wrong), f"{name} imports {target}"


def test_benches_and_tests_share_helpers_alone():
    """Benches import tests.lib and no other tests, and tests.lib imports neither benches nor tests."""
    for folder, wanted in (
        ("bench", ("tests.lib", "bench")),
        ("tests/lib", "tests.lib"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            for module in OF_REPOSITORY.findall(path.read_text()):
                assert module.startswith(wanted), f"{path} imports {module}"


def test_no_circles():
    """Whoever imports a module needs what it imports, and never the other way round; packages stand for their lists."""
    graph = {name: (_imports(name) & MODULES.keys()) - {name} for name in MODULES}
    TopologicalSorter(graph).prepare()
