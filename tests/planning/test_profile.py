"""Reading measured profiles, and plans made with them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.profiles import LLAMA, linear, make_profile
from torchtitan_cad.planning import Profile, TokenLayout

LAYOUT = TokenLayout.from_segments([[(0, 0, 16384)], [(i, 0, 2048) for i in range(1, 9)], [(9, 0, 8000)], []])


def test_json_round_trip(tmp_path: Path) -> None:
    profile, path = make_profile(), tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert Profile.read(path) == profile
    path.write_text(json.dumps(json.loads(profile.to_json()), indent=3, sort_keys=True))
    assert Profile.read(path).fingerprint() == profile.fingerprint()
    assert dataclasses.replace(profile, kernel="other").fingerprint() != profile.fingerprint()


def test_costs_are_those_of_the_best_query_length() -> None:
    profile = make_profile(forward=linear(0.001, fixed=0.01), backward=linear(0.004))
    tiles = np.array([1, 8, 64])
    assert profile.cost_model("forward", LLAMA).row_cost(tiles).tolist() == [
        round((0.01 + 0.001 * n) * 1e9) for n in tiles
    ]
    assert profile.cost_model("backward", LLAMA).row_cost(tiles).tolist() == [round(0.004 * n * 1e9) for n in tiles]


def test_throughput_counts_operations() -> None:
    operations = 4 * 512 * 1024 * 128 * 32
    assert make_profile(forward=linear(0.001)).throughput("forward")[2, 1] == pytest.approx(operations / (32 * 1e-6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 64}, "head_dim = 128, not 64"),
        ({"dtype_bytes": 4}, "elements of 2 bytes (bfloat16) = 2, not 4"),
        ({"num_kv_heads": 4}, "query heads per key head = 4, not 8"),
    ],
)
def test_another_kind_of_attention_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + ".*torchtitan-cad profile"):
        make_profile().cost_model("forward", dataclasses.replace(LLAMA, **change))


GRID = json.loads(make_profile().to_json())["grid"]
MISTAKES: list[tuple[tuple[str, ...], Any, str]] = [
    (("format",), 2, "format = 2: must be 1"),
    (("device",), None, "device = None: must be a string"),
    (("tile",), 0, "tile = 0: must be a positive integer"),
    (("attention", "dtype"), "int8", "attention.dtype = 'int8': must be one of bfloat16"),
    (("attention", "num_kv_heads"), 5, "attention.num_kv_heads = 5"),
    (("attention",), [], "attention = []: must be an object"),
    (("grid", "q_lengths"), [128, 128, 512], "grid.q_lengths = [128, 128, 512]"),
    (("grid", "kv_lengths"), [256, 1024, 8192], "grid.kv_lengths = [256, 1024, 8192]: must be multiples of the tile"),
    (("grid", "forward_ms"), GRID["forward_ms"][:2], "grid.forward_ms = '2 rows'"),
    (("grid", "backward_ms"), [[1, 2, 0]] * 3, "grid.backward_ms[0] = 0: must be positive milliseconds"),
    (("grid", "extra"), 1, "unknown key grid.extra"),
]


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES, ids=[".".join(path) for path, _, _ in MISTAKES])
def test_mistakes_name_file_key_and_value(path: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    data = json.loads(make_profile().to_json())
    table = data if len(path) == 1 else data[path[0]]
    table[path[-1]] = value
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(f"profile {file}: {message}")):
        Profile.read(file)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        Profile.read(tmp_path / "none.json")
    cut = json.dumps({key: value for key, value in json.loads(make_profile().to_json()).items() if key != "grid"})
    wrong = ("{", "not JSON"), ("[1]", "must be an object"), ("{}", "format = None"), (cut, "missing key grid")
    for content, message in wrong:
        with pytest.raises(ValueError, match=message):
            Profile.from_json(content)


def test_noisy_cells() -> None:
    """Where repeats lie far apart, and where a task takes longer than a larger one."""
    calm = ((0.1, 0.2, 0.0),) * 3
    profile = dataclasses.replace(make_profile(), forward_spread=calm, backward_spread=(*calm[:2], (0.0, 0.0, 0.3)))
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.noisy_cells() == [(512, 8192)]
    times = [list(row) for row in profile.backward_ms]
    times[1][0] = 2 * times[2][1]
    slow = dataclasses.replace(profile, backward_ms=tuple(map(tuple, times)))
    assert slow.noisy_cells() == [(128, 128), (512, 8192)]


@pytest.mark.parametrize("spread", [((0.1,) * 3,) * 2, ((0.1, 0.1, -1.0),) * 3, ((0.1, 0.1, float("nan")),) * 3])
def test_bad_spreads(spread: Any) -> None:
    with pytest.raises(ValueError, match=r"grid\.forward_spread"):
        dataclasses.replace(make_profile(), forward_spread=spread)
