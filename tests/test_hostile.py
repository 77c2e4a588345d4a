# SPDX-License-Identifier: BSD-3-Clause
"""Hostile layouts and plans: each works or is one line of error."""

import copy
import dataclasses
import json
from random import Random

import pytest

from tests.lib.refusals import refusal
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout
from torchtitan_cad.planning.serialize import layout_to_dict
from torchtitan_cad.tools.main import main

VALUES = [
    *(None, True, False, "no", "128", "", "1_000", "١٢", "9" * 5000, 128.9),
    *(0, -1, 1, 3, 128, 2**31, 2**62, 2**63, 2**70, 10**400),
    *(1e18, 1e100, 1e308, -1e300, float("nan"), float("inf")),
    *([], {}, [[]], {"doc": 0}, "a\nb", "\x00", "é" * 300, list(range(99))),
]
NEW_KEYS = ("attend", "attends", "spread", "", "doc ")


def draw_value(rng):
    return copy.deepcopy(rng.choice(VALUES))


def containers(data):
    """Yield every table and list in it that has something."""
    if data and isinstance(data, dict | list):
        yield data
        for value in data.values() if isinstance(data, dict) else data:
            yield from containers(value)


def mutate(rng, data):
    """One to three values anywhere in it replaced, removed or added."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        node = rng.choice(list(containers(data)))
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        match rng.randrange(8):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[rng.choice(NEW_KEYS)] = draw_value(rng)
            case 1:
                node.append(copy.deepcopy(node[key]))
            case _:
                node[key] = draw_value(rng)
    return data


LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 3000)], [(1, 0, 200), (2, 0, 200)], [(0, 3000, 40)], []]
)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=4)


def _mutants(text, count):
    data = json.loads(text)
    return [json.dumps(mutate(Random(seed), data)) for seed in range(count)]


@pytest.mark.parametrize("count", [50, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_layouts(count, tmp_path, capsys):
    """A plan, or one line of error; wrong options are in test_numbers.py."""
    path = tmp_path / "layout.json"
    codes = set()
    text = json.dumps(layout_to_dict(LAYOUT, SHAPE))
    for mutant in [text, *_mutants(text, count)]:
        path.write_text(mutant)
        code = main(["plan", str(path)])
        codes.add(code)
        error = capsys.readouterr().err
        is_one_line = code == 2 and error.count("\n") == 1
        assert code == 0 or is_one_line, (mutant, error)
    assert codes == {0, 2}


def test_shapes():
    for field in ("num_heads", "num_kv_heads", "head_dim", "dtype_bytes"):
        for value in VALUES:
            if type(value) is int and 0 < value < 2**20:
                continue
            with refusal(f"attention.{field}"):
                dataclasses.replace(SHAPE, **{field: value})


def test_planner_options():
    no_numbers = (True, "no", "128", -1, 10**400, [[]], {}, float("nan"), float("inf"))
    for field in ("tolerance", "min_shard", "tile", "ranks_per_node"):
        no_counts = () if field == "tolerance" else (0, 2**70)
        for value in (*no_numbers, *no_counts):
            with refusal(field, "="):
                PlannerConfig(**{field: value})
