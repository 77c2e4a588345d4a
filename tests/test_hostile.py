# SPDX-License-Identifier: BSD-3-Clause
"""Hostile layouts, plans and profiles: each works or is one line of error."""

import copy
import json
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from tests.lib.profiles import make_profile
from tests.lib.refusals import refusal
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    Profile,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.serialize import layout_to_dict
from torchtitan_cad.tools.main import main

NUMBERS = [
    *map(str, (0, -1, 1, 3, 128, 1e18, 1e100, 1e300, -1e300, 1.5, True, None)),
    *("nan", "inf", "two", "1_000", "0x10", "١٢"),
    "",
    *map(str, (2**31, 2**31 + 1, 2**63, 2**70)),
    "9" * 400,
    "9" * 5000,
]
VALUES: list[Any] = [
    *(None, True, False, "no", "128", "", 128.9, 0, -1, 1, 2**31, 2**62, 2**63, 2**70),
    *(10**400, 1e18, 1e100, 1e308, float("nan"), float("inf")),
    *([], {}, [[]], {"doc": 0}, "a\nb", "\x00", "é" * 300, list(range(99))),
]


def mutate(rng: Random, data: Any) -> Any:
    """One to three values anywhere in it replaced, removed or added."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        node = data
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], (dict, list)) and rng.random() < 0.85:
                node = node[key]
                continue
            action = rng.random()
            if action < 0.75:
                node[key] = copy.deepcopy(rng.choice(VALUES))
            elif action < 0.9:
                del node[key]
            elif isinstance(node, dict):
                node[rng.choice(["attend", "attends", "spread", "", "doc "])] = (
                    rng.choice(VALUES)
                )
            else:
                node.append(copy.deepcopy(node[key]))
            break
    return data


LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 3000)], [(1, 0, 200), (2, 0, 200)], [(0, 3000, 40)], []]
)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=4)


def _mutants(text: str, count: int) -> list[str]:
    data = json.loads(text)
    return [json.dumps(mutate(Random(seed), data)) for seed in range(count)]


def written_plan() -> str:
    return make_plan(
        LAYOUT, SHAPE, PlannerConfig(rank_speeds=(1.0, 0.5, 1.0, 1.0), ranks_per_node=2)
    ).to_json()


def use_plan(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()).fingerprint() == plan.fingerprint()
    for rank in range(plan.layout.num_ranks):
        plan.exchange(rank)


def written_profile() -> str:
    data = json.loads(make_profile(shape=SHAPE).to_json())
    data["grid"] |= {
        key: [[0.1] * 3] * 3 for key in ("forward_spread", "backward_spread")
    }
    return json.dumps(data)


def use_profile(profile: Profile) -> None:
    profile.noisy_cells()
    profile.throughput("forward")
    with suppress(ValueError):
        make_plan(LAYOUT, SHAPE, None, profile.cost_model("forward", SHAPE)).to_json()


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "write", "use"),
    [(Plan, written_plan, use_plan), (Profile, written_profile, use_profile)],
)
def test_mutated_files(kind, write, use, count):
    """What is read can be used: nothing but a ValueError, and that when it is read."""
    read = 0
    for text in _mutants(write(), count):
        try:
            found = kind.from_json(text)
        except ValueError:
            continue
        read += 1
        use(found)
    assert 0 < read < count


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_layouts(count, tmp_path, capsys):
    """A plan, or one line of error, also with options that are mutated."""
    path, codes = tmp_path / "layout.json", set()
    text = json.dumps(layout_to_dict(LAYOUT, SHAPE))
    for seed, mutant in enumerate(_mutants(text, count)):
        path.write_text(mutant if seed % 3 else text)
        rng = Random(seed)
        options = [
            rng.choice(["--tolerance", "--min-shard", "--tile", "--ranks-per-node"]),
            rng.choice(NUMBERS),
        ]
        codes.add(
            code := main(
                ["plan", str(path), *(options if seed % 3 == 0 else ["--validate"])]
            )
        )
        error = capsys.readouterr().err
        assert code == 0 or (code == 2 and error.count("\n") == 1), (
            mutant,
            options,
            error,
        )
    assert codes == {0, 2}


@pytest.mark.parametrize(
    "field", ["num_heads", "num_kv_heads", "head_dim", "dtype_bytes"]
)
@pytest.mark.parametrize(
    "value", [v for v in VALUES if not (type(v) is int and 0 < v < 2**20)]
)
def test_shapes(field, value):
    values = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype_bytes": 4} | {
        field: value
    }
    with refusal(f"attention.{field}"):
        AttentionShape(**values)


@pytest.mark.parametrize(
    "field",
    [
        "tolerance",
        "min_shard",
        "tile",
        "rank_speeds",
        "ranks_per_node",
        "inter_node_weight",
    ],
)
@pytest.mark.parametrize(
    "value",
    [True, "no", "128", -1, 0, 2**70, 10**400, float("nan"), float("inf"), [[]], {}],
)
def test_planner_options(field, value):
    if field == "tolerance" and value in (0, 2**70):
        return  # a tolerance may be any number
    with refusal(field, "="):
        PlannerConfig(**{field: value})
