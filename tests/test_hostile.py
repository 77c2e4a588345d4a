# SPDX-License-Identifier: BSD-3-Clause
"""Hostile command lines, layouts, plans and profiles: each works or is one line of error, soon and in little memory."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.hostile import NUMBERS, VALUES, _mutate
from tests.lib.profiles import make_profile
from tests.lib.refusals import refusal
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    Profile,
    TokenLayout,
    make_plan,
    warm_up,
)
from torchtitan_cad.planning.serialize import layout_to_dict
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.prepare.tokenizer import prepare_tokenizer

MOST_SECONDS = 20
MOST_BYTES = 2 * 2**30
PROGRESS = ("compiling the planner", "torchtitan-cad: warning: ")


def _run(folder: Path, first: int, last: int, timeout: float) -> None:
    """Run the cases [first, last) in one process and check each."""
    warm_up()  # on disk, too: the first of a machine's processes takes longer
    results = folder / "results"
    command = [
        sys.executable,
        "-m",
        "tests.hostile",
        str(folder),
        str(results),
        str(first),
        str(last),
    ]
    try:
        subprocess.run(
            command, check=False, timeout=timeout, cwd=Path(__file__).parents[1]
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end after {timeout} s: {results.read_text().splitlines()[-1]}")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    cases, found = records[::2], records[1::2]
    assert [case["seed"] for case in cases] == list(range(first, last)), (
        "the process ended early"
    )
    assert len(found) == len(cases), f"the process died of {cases[-1]}"
    for case, outcome in zip(cases, found, strict=True):
        where = f"{case} -> {outcome}"
        assert outcome["code"] in (
            (0, 1, 2) if case["arguments"][:1] == ["doctor"] else (0, 2)
        ), where
        assert outcome["seconds"] < MOST_SECONDS, where
        assert outcome["peak_bytes"] < MOST_BYTES, where
        lines = [
            line
            for line in outcome["err"].splitlines()
            if not line.startswith(PROGRESS)
        ]
        if outcome["code"] == 2:
            assert len(lines) == 1, where
            assert lines[0].startswith("torchtitan-cad: error: "), where
            assert not outcome["out"], where
        else:
            assert "Traceback" not in outcome["out"] + outcome["err"], where
            assert "Warning" not in outcome["err"], where
    # The first few are all refused, by doctor or by the command.
    assert {outcome["code"] for outcome in found} >= (
        {1, 2} if last - first < 10 else {0, 1, 2}
    )


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(0, 40, marks=pytest.mark.matrix),
        *(
            pytest.param(first, first + 40, marks=pytest.mark.slow)
            for first in range(40, 240, 40)
        ),
    ],
)
def test_hostile_jobs(first, last, tmp_path):
    """simulate, advise and doctor: command lines, and jobs. What compare refuses is in test_cli_compare.py."""
    prepare_tokenizer(tmp_path / "assets", kind="bytes")
    _run(tmp_path, first, last, timeout=300)


LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 3000)], [(1, 0, 200), (2, 0, 200)], [(0, 3000, 40)], []]
)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=4)


def _mutants(text: str, count: int) -> list[str]:
    data = json.loads(text)
    return [json.dumps(_mutate(Random(seed), data)) for seed in range(count)]


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
