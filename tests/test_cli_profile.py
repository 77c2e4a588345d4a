"""``torchtitan-cad profile``, and plans with what it measured."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.profiles import linear, make_profile
from torchtitan_cad.cli import main
from torchtitan_cad.cli.profile_command import report
from torchtitan_cad.planning import AttentionShape, Plan, Profile, validate_plan

SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--repeats", "2"]
GRID = ["--q-lengths", "64", "128", "--kv-lengths", "128", "256", "640"]
LAYOUT = {
    "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype_bytes": 4},
    "ranks": [[{"doc": 0, "start": 0, "length": 8192}], [{"doc": 1, "start": 0, "length": 3000}], []],
}


def test_from_measuring_to_a_plan(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torchtitan_cad.runtime.profiling.CPU_ROWS", 1024)  # short calls: what they take is not asked
    output = tmp_path / "profile.json"
    assert main(["profile", "--output", str(output), *SMALL, *GRID]) == 0
    profile = Profile.read(output)
    assert (profile.kernel, profile.dtype, profile.repeats) == ("cpu", "float32", 2)
    assert (profile.q_lengths, profile.kv_lengths) == ((64, 128), (128, 256, 640))
    printed = capsys.readouterr().out
    assert report(profile) in printed
    assert printed.count("FLOP/s") == printed.count("saturated from") == 2

    layout, plan_file = tmp_path / "layout.json", tmp_path / "plan.json"
    layout.write_text(json.dumps(LAYOUT))
    command = ["plan", str(layout), "--profile", str(output), "--output", str(plan_file), "--validate"]
    assert main(command) == 0
    plan = Plan.from_json(plan_file.read_text())
    validate_plan(plan)
    loads = profile.cost_model("forward", plan.shape).cost(plan.tasks)
    assert plan.stats.loads.sum() == loads.sum()
    assert plan.stats.max_over_mean < plan.stats.max_over_mean_before
    # Half the measured heads: the whole document takes half the sum of the measured rows.
    whole = profile.cost_model("forward", AttentionShape(4, 2, 16, 4)).prefix_cost(8192)[-1]
    assert plan.stats.loads_before[0] == pytest.approx(whole / 2, rel=1e-6)


def test_the_table_shows_where_throughput_saturates() -> None:
    """In the artificial profile 64 queries take as long as 128, and tasks below 512 a tenth longer."""
    table = report(make_profile(forward=linear(0.001), backward=linear(0.002))).splitlines()
    operations = 4 * 128 * 128 * 128 * 32 / 1e-6 / 1e12
    assert [float(cell) for cell in table[5].split()[2:]] == [round(operations, 1)] * 3
    assert [float(cell) for cell in table[3].split()[2:]] == [round(operations / 2.2, 1)] * 3
    assert table[6].split() == ["saturated", "from", "512", "512", "512"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-lengths", "256"], "grid.kv_lengths = [256]"),
        (["--repeats", "0"], "repeats = 0"),
        (["--kernel", "warp"], "cad.kernel = 'warp' is unknown"),
        (["--kernel", "varlen"], "cad.kernel = 'varlen' does not run on cpu"),
    ],
)
def test_mistakes_are_found_before_measuring(options: list[str], message: str, tmp_path: Path, refused) -> None:
    output = tmp_path / "profile.json"
    assert message in refused("profile", "--output", str(output), *SMALL, *options)
    assert not output.exists()


def test_noisy_cells_are_named(tmp_path, monkeypatch, capsys) -> None:
    spread = ((0.0, 0.1, 0.0), (0.0, 0.9, 0.0), (0.0, 0.0, 0.0))
    noisy = dataclasses.replace(make_profile(), forward_spread=spread, backward_spread=spread)
    monkeypatch.setattr("torchtitan_cad.runtime.profiling.measure_profile", lambda *_: noisy)
    assert main(["profile", "--output", str(tmp_path / "profile.json"), *SMALL, *GRID]) == 0
    captured = capsys.readouterr()
    warning = captured.err.splitlines()[-1]
    assert warning.startswith("torchtitan-cad: warning: 1 of 6 cells stayed noisy (queries x keys): 128 x 1024; ")
    assert warning.endswith("measure again, with --repeats 4")
    assert captured.out.count("?") == 2
    assert Profile.read(tmp_path / "profile.json") == noisy
