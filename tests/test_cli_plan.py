# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad plan``, and what all commands have in common."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import torchtitan_cad
from torchtitan_cad.planning import Plan, make_plan, validate_plan
from torchtitan_cad.planning.serialize import layout_from_dict
from torchtitan_cad.tools.main import main, separate_overrides
from torchtitan_cad.tools.plan.plot import BARS, FEW

SEGMENT = {"doc": 0, "start": 0, "length": 9}
LAYOUT: dict[str, Any] = {
    "attention": {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "dtype_bytes": 2,
    },
    "ranks": [
        [{"doc": 0, "start": 0, "length": 32768}],
        [{"doc": 1, "start": 0, "length": 5000}],
        [],
    ],
}
SHELL = [
    sys.executable,
    "-c",
    "import sys; from torchtitan_cad.tools.main import main; sys.exit(main())",
]


def write_layout(folder: Path, **changes: Any) -> str:
    path = folder / "layout.json"
    path.write_text(json.dumps(LAYOUT | changes))
    return str(path)


@pytest.fixture
def layout_file(tmp_path: Path) -> str:
    return write_layout(tmp_path)


@pytest.fixture
def plan(layout_file: str, tmp_path: Path) -> Callable[..., Plan]:
    """Plans the layout file with some options and reads what is written."""

    def run(*options: str) -> Plan:
        output = tmp_path / "plan.json"
        assert (
            main(["plan", layout_file, *options, "--output", str(output), "--validate"])
            == 0
        )
        return Plan.from_json(output.read_text())

    return run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were drawn, none of which is written."""
    figures: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
    )
    return figures


def test_writes_the_plan_and_prints_its_figures(
    plan, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan("--tolerance", "0.05")
    validate_plan(found)
    assert found.config.tolerance == 0.05
    assert found.stats.max_over_mean <= 1.05
    printed = capsys.readouterr().out
    assert f"{found.stats.max_over_mean:.4f}" in printed
    assert found.fingerprint() in printed
    memory = [
        line.split(":")[1]
        for line in printed.splitlines()
        if line.startswith("memory of a layer")
    ]
    assert [line.split()[0] for line in memory] == [
        "buffers",
        "forward",
        "backward",
        "kept",
    ]
    assert ["without CAD" in line for line in memory] == [False, True, True, False]


def test_options_reach_the_planner(plan, capsys: pytest.CaptureFixture[str]) -> None:
    config = plan(
        "--planner", "home", "--min-shard", "256", "--no-split-kv", "--tile", "64"
    ).config
    assert (config.planner, config.min_shard, config.split_kv, config.tile) == (
        "home",
        256,
        False,
        64,
    )
    found = plan(
        "--rank-speeds",
        "1",
        "0.5",
        "0.75",
        "--ranks-per-node",
        "2",
        "--inter-node-weight",
        "3",
    )
    config = found.config
    assert (config.rank_speeds, config.ranks_per_node, config.inter_node_weight) == (
        (1, 0.5, 0.75),
        2,
        3,
    )
    assert f"{found.stats.inter_node_bytes / 1e6:.4f} MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        {**LAYOUT, "ranks": 3},
        {**LAYOUT, "ranks": [3]},
        {**LAYOUT, "ranks": [[{"doc": 0, "start": 0}]]},
        {**LAYOUT, "ranks": [[{**SEGMENT, "length": "9"}]]},
        {**LAYOUT, "ranks": [[{**SEGMENT, "start": 5}]]},
        {**LAYOUT, "ranks": [[{**SEGMENT, "attends": "no"}]]},
        {**LAYOUT, "ranks": [[{**SEGMENT, "attend": 1}]]},
        {"ranks": LAYOUT["ranks"]},
        {**LAYOUT, "attention": {"num_heads": 32}},
        {**LAYOUT, "attention": {**LAYOUT["attention"], "bits": 8}},
    ],
)
def test_bad_layouts_are_one_line(content: object, tmp_path: Path, refused) -> None:
    path = tmp_path / "layout.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    refused("plan", str(path))


@pytest.mark.parametrize(
    "options",
    [
        ["--tolerance", "-1"],
        ["--rank-speeds", "1e300", "1e-300", "1"],
        ["--planner", "magic"],
        ["--output", "/no/such/directory/plan.json"],
        ["--plot", "plan.docx"],
        ["--profile", "none.json"],
        ["--tolerance", "two"],
        ["--to", "1"],
    ],
)
def test_bad_options_are_one_line(
    options: list[str], layout_file: str, refused
) -> None:
    refused("plan", layout_file, *options)


@pytest.mark.parametrize("option", ["--output", "--plot"])
@pytest.mark.parametrize("path", [".", "none/plan.png"])
def test_paths_that_no_file_can_have(
    layout_file: str, option: str, path: str, tmp_path: Path, refused
) -> None:
    before = sorted(tmp_path.iterdir())
    line = refused("plan", layout_file, option, str(tmp_path / path))
    assert line.startswith(f"torchtitan-cad: error: {option} {tmp_path / path}: ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["plan"],
        ["doctor", "job.toml", "--nproc", str(2**70)],
    ],
)
def test_usage_errors_are_one_line(argv: list[str], refused) -> None:
    refused(*argv)


@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_nested_brackets_are_one_line(command: str, tmp_path: Path, refused) -> None:
    path = tmp_path / "job.toml"
    path.write_text("a = " + "[" * 100_000)
    refused(command, str(path))


def _without_progress(text: bytes) -> bytes:
    """A slow machine takes longer than a moment to load the planner, which is then announced."""
    return b"".join(
        line
        for line in text.splitlines(keepends=True)
        if not line.startswith(b"compiling the planner")
    )


def test_console_script_into_a_closed_pipe(layout_file: str) -> None:
    with subprocess.Popen(
        [*SHELL, "plan", layout_file], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert _without_progress(process.stderr.read()) == b""
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_is_one_line(layout_file: str) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [*SHELL, "plan", layout_file],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert found.returncode == 2
    assert _without_progress(found.stderr).count(b"\n") == 1
    assert b"No space left on device" in found.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchtitan-cad {torchtitan_cad.__version__}\n"


def test_memory_of_many_rows_is_not_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes the tables of all ranks: minutes for a long document over hundreds of them."""
    share = 2**18
    ranks = [
        [{"doc": 0, "start": rank * share, "length": share}] for rank in range(512)
    ]
    begin = time.process_time()
    assert main(["plan", write_layout(tmp_path, ranks=ranks)]) == 0
    assert time.process_time() - begin < 20
    assert "not stated for more than 16777216 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("doctor a.toml --nproc 4", "doctor a.toml --nproc 4"),
        ("doctor a.toml --training.steps 5", "doctor -- a.toml --training.steps 5"),
        (
            "simulate a.toml --training.steps 5 --net 1 --tp 2",
            "simulate --net 1 --tp 2 -- a.toml --training.steps 5",
        ),
        (
            "simulate --ranks 8 a.toml --cad.tile=64",
            "simulate --ranks 8 -- a.toml --cad.tile=64",
        ),
        (
            "advise a.toml --a.b 1 --ranks 4 --c.d 2",
            "advise --ranks 4 -- a.toml --a.b 1 --c.d 2",
        ),
        ("doctor a.toml -- --training.steps 5", "doctor a.toml -- --training.steps 5"),
    ],
)
def test_arguments_of_the_job_may_stand_anywhere(given: str, wanted: str) -> None:
    assert separate_overrides(given.split()) == wanted.split()


def test_place_assigns_the_tokens_anew(
    plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], drawn
) -> None:
    ranks = [[{"doc": 0, "start": 8192 * rank, "length": 8192}] for rank in range(4)]
    ranks += [
        [{"doc": 8 * rank + i, "start": 0, "length": 1024} for i in range(8)]
        for rank in range(4, 8)
    ]
    write_layout(tmp_path, ranks=ranks)
    placed = plan("--place", "--plot", str(tmp_path / "plan.png"))
    assert placed.layout.tokens_per_rank.tolist() == [8192] * 8
    before = make_plan(
        layout_from_dict({"ranks": ranks}), placed.shape, placed.config
    ).stats.max_rank_bytes
    assert placed.stats.max_rank_bytes < before
    assert re.search(
        rf"worst rank bytes with them +{before / 1e6:.4f} MB", capsys.readouterr().out
    )
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert f"worst rank {before / 1e6:.2f} -> " in titles[-1]


@pytest.mark.parametrize("num_ranks", [FEW, FEW + 1, BARS + 1])
def test_plots_of_many_ranks(num_ranks: int, tmp_path: Path, drawn) -> None:
    """Few ranks have colours of their own; very many have no single bars."""
    ranks = [
        [{"doc": i, "start": 0, "length": 9000 if i == 0 else 500}]
        for i in range(num_ranks)
    ]
    assert (
        main(
            [
                "plan",
                write_layout(tmp_path, ranks=ranks),
                "--plot",
                str(tmp_path / "plan.png"),
            ]
        )
        == 0
    )
    *_, loads, volume = drawn[0].axes
    assert len(volume.containers) == (0 if num_ranks > BARS else 2)
    assert len({patch.get_facecolor() for patch in loads.patches}) == (
        num_ranks + 1 if num_ranks == FEW else 2
    )


def test_plot_shows_the_plan(plan, tmp_path: Path, drawn) -> None:
    """A triangle with a patch per task, its moved tasks numbered; bars of the ranks' loads and bytes."""
    found = plan("--plot", str(tmp_path / "x.png"))
    triangle, loads, volume = drawn[0].axes
    tasks = found.tasks[found.tasks["doc"] == 0]
    # the home of the document's only run
    assert len(triangle.patches) == len(tasks) + 1
    numbers = {text.get_text() for text in triangle.texts}
    assert {str(server) for server in tasks["server"].tolist()} <= numbers
    stats = found.stats
    heights = [
        [bar.get_height() for bar in bars]
        for axes in (loads, volume)
        for bars in axes.containers[:2]
    ]
    wanted = [stats.loads_before / stats.mean_load, stats.loads / stats.mean_load]
    wanted += [stats.bytes_in / 1e6, -stats.bytes_out / 1e6]
    assert heights == [each.tolist() for each in wanted]


def test_plot_without_matplotlib(
    layout_file: str, monkeypatch: pytest.MonkeyPatch, refused
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "torchtitan_cad.tools.shared.find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    refused("plan", layout_file, "--plot", "plan.png")
