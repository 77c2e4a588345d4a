"""``torchtitan-cad plan``."""

import importlib.util
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import torchtitan_cad
from torchtitan_cad.cli import main
from torchtitan_cad.cli.doctor_command import separate_overrides
from torchtitan_cad.cli.plan_plot import BARS, FEW, _colors, _ink
from torchtitan_cad.planning import Plan, make_plan, validate_plan
from torchtitan_cad.planning.serialize import layout_from_dict

LAYOUT = {
    "attention": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2},
    "ranks": [[{"doc": 0, "start": 0, "length": 32768}], [{"doc": 1, "start": 0, "length": 5000}], []],
}


@pytest.fixture
def layout_file(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT))
    return path


def test_writes_the_plan_and_prints_its_figures(
    layout_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    assert main(["plan", str(layout_file), "--tolerance", "0.05", "--output", str(output), "--validate"]) == 0
    plan = Plan.from_json(output.read_text())
    validate_plan(plan)
    assert plan.config.tolerance == 0.05
    assert plan.stats.max_over_mean <= 1.05
    printed = capsys.readouterr().out
    assert f"{plan.stats.max_over_mean:.4f}" in printed
    assert plan.fingerprint() in printed


def test_options_reach_the_planner(layout_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    options = ["--planner", "home", "--min-shard", "256", "--no-split-kv", "--tile", "64", "--output", str(output)]
    assert main(["plan", str(layout_file), *options]) == 0
    config = Plan.from_json(output.read_text()).config
    assert (config.planner, config.min_shard, config.split_kv, config.tile) == ("home", 256, False, 64)


def test_limits_reach_the_planner(layout_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    options = ["--rank-speeds", "1", "0.5", "0.75"]
    options += ["--ranks-per-node", "2", "--inter-node-weight", "3", "--output", str(output), "--validate"]
    assert main(["plan", str(layout_file), *options]) == 0
    plan = Plan.from_json(output.read_text())
    config = plan.config
    assert config.rank_speeds == (1, 0.5, 0.75)
    assert (config.ranks_per_node, config.inter_node_weight) == (2, 3)
    assert f"{plan.stats.inter_node_bytes / 1e6:.4f} MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{", [], "is not JSON"),
        ("[]", [], "missing key 'ranks'"),
        ({**LAYOUT, "ranks": 3}, [], "'ranks' must be a list"),
        ({**LAYOUT, "ranks": [3]}, [], "'ranks'[0] must be a list of segments"),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 0}]]}, [], "'ranks'[0]: missing key 'length'"),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 0, "length": "9"}]]}, [], "'length' must be an integer"),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 5, "length": 9}]]}, [], "a document starts at position 0"),
        ({"ranks": LAYOUT["ranks"]}, [], "missing key 'attention'"),
        ({**LAYOUT, "attention": {"num_heads": 32}}, [], "missing key 'num_kv_heads'"),
        ({**LAYOUT, "attention": {**LAYOUT["attention"], "bits": 8}}, [], "unknown key 'bits'"),
        ("[" * 100_000, [], "nested too deeply"),
        (
            {**LAYOUT, "ranks": [[{"doc": 0, "start": 0, "length": 9, "attends": "no"}]]},
            [],
            "'attends' must be true or",
        ),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 0, "length": 9, "attend": 1}]]}, [], "unknown key 'attend'"),
        ({**LAYOUT, "attention": {**LAYOUT["attention"], "head_dim": 10**18}}, [], "attention.head_dim = 10000000"),
        ({**LAYOUT, "attention": {**LAYOUT["attention"], "num_heads": 1e100}}, [], "'num_heads' must be an integer"),
        (LAYOUT, ["--min-shard", str(2**63)], "min_shard = 9223372036854775808: set a positive integer, at most"),
        (LAYOUT, ["--ranks-per-node", str(2**70)], "ranks_per_node = 1180591620717411303424: set"),
        (LAYOUT, ["--inter-node-weight", "1e300"], "inter_node_weight = 1e+300: set"),
        (LAYOUT, ["--rank-speeds", "1e300", "1e-300", "1"], "rank_speeds = (1e+300, 1e-300, 1.0): set"),
        (LAYOUT, ["--tolerance", "-1"], "tolerance = -1.0"),
        (LAYOUT, ["--min-shard", "0"], "min_shard = 0"),
        (LAYOUT, ["--rank-speeds", "1", "2"], "rank_speeds has 2 entries for 3 ranks"),
        (LAYOUT, ["--ranks-per-node", "0"], "ranks_per_node = 0"),
        (LAYOUT, ["--inter-node-weight", "0"], "inter_node_weight = 0.0"),
        (LAYOUT, ["--planner", "magic"], "--planner magic: choose one of greedy, home, local_search"),
        (LAYOUT, ["--output", "/no/such/directory/plan.json"], "there is no folder /no/such"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    content: object, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layout.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["plan", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchtitan-cad: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["plan"], ["plan", "x", "--tolerance", "two"], ["plan", "x", "--to", "1"]]
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchtitan-cad: error: ")
    assert captured.err.count("\n") == 1


def test_console_script(layout_file: Path) -> None:
    program = "import sys; from torchtitan_cad.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "plan", str(layout_file)]
    assert "load max/mean" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    command[-1] += ".missing"
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


SHELL = [sys.executable, "-c", "import sys; from torchtitan_cad.cli import main; sys.exit(main())"]


def _without_progress(text: bytes) -> bytes:
    """A slow machine takes longer than a moment to load the planner, which is then announced."""
    return b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(b"compiling the planner"))


def test_a_closed_pipe_is_no_error(layout_file: Path) -> None:
    with subprocess.Popen(
        [*SHELL, "plan", str(layout_file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert _without_progress(process.stderr.read()) == b""
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_is_one_line(layout_file: Path) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run([*SHELL, "plan", str(layout_file)], stdout=full, stderr=subprocess.PIPE, check=False)
    assert found.returncode == 2
    assert _without_progress(found.stderr).count(b"\n") == 1
    assert b"No space left on device" in found.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchtitan-cad {torchtitan_cad.__version__}\n"
    with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "torchtitan_cad.__version__"}


def test_memory_is_stated_beside_that_without_cad(layout_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(layout_file)]) == 0
    lines = [
        line.split(":")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("memory of a layer")
    ]
    assert [line.split()[0] for line in lines] == ["buffers", "forward", "backward"]
    assert ["without CAD" in line for line in lines] == [False, True, True]


def test_memory_of_many_rows_is_not_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes the tables of all ranks: minutes for a long document over hundreds of them."""
    share = 2**18
    ranks = [[{"doc": 0, "start": rank * share, "length": share}] for rank in range(512)]
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"attention": shape, "ranks": ranks}))
    begin = time.process_time()
    assert main(["plan", str(path)]) == 0
    assert time.process_time() - begin < 20
    assert "not stated for more than 16777216 rows" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_nested_brackets_are_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("a = " + "[" * 100_000)
    assert main([command, str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "torchtitan-cad: error: a file is nested too deeply: write it with fewer brackets within brackets"
    ]


def test_too_many_ranks_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "job.toml"), "--nproc", str(2**70)]) == 2
    assert "of which the product is at most 65536" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("doctor a.toml --nproc 4", "doctor a.toml --nproc 4"),
        ("doctor a.toml --training.steps 5", "doctor -- a.toml --training.steps 5"),
        ("simulate a.toml --training.steps 5 --net 1 --tp 2", "simulate --net 1 --tp 2 -- a.toml --training.steps 5"),
        ("simulate --ranks 8 a.toml --cad.tile=64", "simulate --ranks 8 -- a.toml --cad.tile=64"),
        ("advise a.toml --a.b 1 --ranks 4 --c.d 2", "advise --ranks 4 -- a.toml --a.b 1 --c.d 2"),
        ("doctor a.toml -- --training.steps 5", "doctor a.toml -- --training.steps 5"),
    ],
)
def test_arguments_of_the_job_may_stand_anywhere(given: str, wanted: str) -> None:
    assert separate_overrides(given.split()) == wanted.split()


def test_place_deals_the_tokens_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    ranks = [[{"doc": 0, "start": 8192 * rank, "length": 8192}] for rank in range(4)]
    ranks += [[{"doc": 8 * rank + i, "start": 0, "length": 1024} for i in range(8)] for rank in range(4, 8)]
    layout, output = tmp_path / "layout.json", tmp_path / "plan.json"
    layout.write_text(json.dumps({**LAYOUT, "ranks": ranks}))
    assert main(["plan", str(layout), "--place", "--output", str(output), "--plot", str(tmp_path / "plan.png")]) == 0
    plan = Plan.from_json(output.read_text())
    assert plan.layout.tokens_per_rank.tolist() == [8192] * 8
    before = make_plan(layout_from_dict({**LAYOUT, "ranks": ranks}), plan.shape, plan.config).stats.max_rank_bytes
    assert plan.stats.max_rank_bytes < before
    assert re.search(rf"worst rank bytes with them +{before / 1e6:.4f} MB", capsys.readouterr().out)
    texts = {text.get_text() for axes in drawn[0].axes for text in axes.texts}
    assert {"home", "before"} <= texts


@pytest.mark.parametrize("option", ["--output", "--plot"])
@pytest.mark.parametrize("path", [".", "none/plan.png"])
def test_paths_that_no_file_can_have(
    layout_file: Path, option: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["plan", str(layout_file), option, str(tmp_path / path)]) == 2
    assert capsys.readouterr().err.startswith(f"torchtitan-cad: error: {option} {tmp_path / path}: ")
    assert sorted(tmp_path.iterdir()) == before


def test_small_plans_are_not_of_no_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype_bytes": 4}
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"attention": shape, "ranks": [[{"doc": 0, "start": 0, "length": 700}], []]}))
    assert main(["plan", str(layout)]) == 0
    assert re.search(r"total bytes +\d+\.\d{4} kB\n", capsys.readouterr().out)


def test_digits_can_be_read_on_every_colour() -> None:
    """WCAG asks for a contrast of 4.5: of luminances L, (L + 0.05) / 0.05 for black, 1.05 / (L + 0.05) for white."""
    full = [color for num_ranks in (FEW, FEW + 1, 4096) for color in _colors(num_ranks)]
    for color in full + [tuple(1 - 0.25 * (1 - c) for c in color) for color in full]:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        shifted = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05
        assert (shifted / 0.05 if _ink(color) == "black" else 1.05 / shifted) >= 4.5


@pytest.mark.parametrize("num_ranks", [FEW, FEW + 1, BARS + 1])
def test_plots_of_many_ranks(num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few ranks have colours of their own; very many have no single bars."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    layout = tmp_path / "layout.json"
    ranks = [[{"doc": i, "start": 0, "length": 9000 if i == 0 else 500}] for i in range(num_ranks)]
    layout.write_text(json.dumps({**LAYOUT, "ranks": ranks}))
    assert main(["plan", str(layout), "--plot", str(tmp_path / "plan.png")]) == 0
    *_, loads, volume = drawn[0].axes
    assert len(volume.containers) == (0 if num_ranks > BARS else 2)
    assert len({patch.get_facecolor() for patch in loads.patches}) == (num_ranks + 2 if num_ranks == FEW else 2)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("planner", ["local_search", "home"])
def test_plot(layout_file: Path, tmp_path: Path, suffix: str, planner: str) -> None:
    picture = tmp_path / f"plan.{suffix}"
    assert main(["plan", str(layout_file), "--plot", str(picture), "--planner", planner]) == 0
    assert picture.stat().st_size > 10_000


def test_plot_shows_the_plan(layout_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A triangle with a patch per task, its moved tasks numbered; bars of the ranks' loads and bytes."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    output = tmp_path / "plan.json"
    assert main(["plan", str(layout_file), "--plot", str(tmp_path / "x.png"), "--output", str(output)]) == 0
    plan = Plan.from_json(output.read_text())
    triangle, loads, volume = drawn[0].axes
    tasks = plan.tasks[plan.tasks["doc"] == 0]
    assert len(triangle.patches) == len(tasks) + 1  # the home of the document's only run
    numbers = {text.get_text() for text in triangle.texts}
    assert {str(server) for server in tasks["server"].tolist()} <= numbers
    mean = plan.stats.mean_load
    assert [bar.get_height() for bar in loads.containers[0]] == (plan.stats.loads_before / mean).tolist()
    assert [bar.get_height() for bar in loads.containers[1]] == (plan.stats.loads / mean).tolist()
    assert [bar.get_height() for bar in volume.containers[0]] == (plan.stats.bytes_in / 1e6).tolist()
    assert [bar.get_height() for bar in volume.containers[1]] == (-plan.stats.bytes_out / 1e6).tolist()


def test_plot_without_matplotlib(
    layout_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "torchtitan_cad.cli.shared.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert main(["plan", str(layout_file), "--plot", "plan.png"]) == 2
    assert "--plot plan.png: matplotlib is not installed" in capsys.readouterr().err


def test_plot_in_an_unknown_format(layout_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(layout_file), "--plot", str(tmp_path / "plan.docx")]) == 2
    assert "docx" in capsys.readouterr().err
