# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad simulate``: jobs, numbers, and what is wrong with them."""

import copy
import json
from pathlib import Path

import pytest

from tests.lib.sets import CONFIGS, every_config
from torchtitan_cad.integration.report.steps_file import DOCUMENTS_NAME
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.options import Options, read_inputs

enable_cpu()

from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_cad.tools.simulated_job import build_on_meta, read_simulated_job  # noqa: E402
from torchtitan_cad.tools.simulation.inputs import OPEN  # noqa: E402
from torchtitan_cad.tools.simulation.systems import SYSTEMS  # noqa: E402

SMALL = [
    "--ranks=8", "--layers=2", "--hidden=512", "--heads=4", "--kv-heads=2", "--head-dim=128", "--ffn=1024",
    "--vocabulary=512", "--tokens-per-rank=8192", "--batches=2", "--documents=lognormal:median=2000,sigma=1",
]  # fmt: skip


@every_config
def test_every_configuration_is_simulated(config: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out.json"
    assert (
        main(["simulate", str(config), "--output", str(output), "--batches", "1"]) == 0
    )
    systems = json.loads(output.read_text())["systems"]
    assert list(systems) == list(SYSTEMS)
    for system in systems.values():
        assert system["seconds_per_step"] > 0
        assert system["tokens_per_second"] > 0
        assert 0 < system["share_of_perfect"] <= 1 + 1e-9
    # whose exchange takes longer than the work that it evens out
    if config.stem != "llama3_debug_cpu":
        shares = {
            name: systems[name]["share_of_perfect"]
            for name in ("packed", "reorder", "packing_cp")
        }
        assert systems["cad"]["share_of_perfect"] >= max(shares.values())
    # whose exchange can be hidden
    if config.stem in (
        "llama3_8b",
        "qwen3_8b",
        "llama3_8b_8gpus",
    ):
        assert systems["cad"]["share_of_perfect"] > 0.98
    if config.stem == "llama3_8b_long":  # rows halved in the middle: not all of it
        assert systems["cad"]["share_of_perfect"] > 0.95
    printed = capsys.readouterr().out
    assert "ranks: 64, as data_parallel_shard_degree = -1 leaves it open" in printed
    assert "net: 4e+10 (default)" in printed


def test_numbers_of_a_job() -> None:
    job = read_simulated_job(
        [
            f"--job.config_file={CONFIGS / 'llama3_8b.toml'}",
            "--parallelism.context_parallel_degree=2",
        ],
        64,
    )
    model, configuration = job.model, job.configuration
    assert (
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.head_dim,
    ) == (32, 4096, 32, 8, 128)
    assert (model.ffn, model.vocabulary, model.dtype_bytes) == (14336, 128256, 2)
    assert (configuration.pp, configuration.cp, configuration.checkpointing) == (
        1,
        2,
        "selective",
    )
    assert (
        job.cluster.ranks,
        job.cluster.tp,
        job.cluster.fsdp,
        job.cluster.replicas,
    ) == (64, 2, True, 1)
    assert (job.row_tokens, job.step_tokens) == (32768, 16 * 32768)


def test_numbers_of_a_job_with_experts() -> None:
    """A token passes through 8 of 128 experts, of which a rank gathers the 16 that it has."""
    job = read_simulated_job(
        [f"--job.config_file={CONFIGS / 'qwen3_30b_a3b_long.toml'}"], 64
    )
    model, width = job.model, 768
    attention = 2048 * 128 * (2 * 32 + 2 * 4)
    assert model.layer_parameters == attention + 3 * 2048 * 8 * width
    assert model.gathered_parameters == attention + 3 * 2048 * 16 * width
    assert (
        model.parameters
        == 48 * (attention + 3 * 2048 * 128 * width) + 2 * 2048 * 151936
    )
    assert model.held_parameters == 48 * model.gathered_parameters + 2 * 2048 * 151936
    assert any(note.startswith("experts: ") for note in job.notes)


@pytest.mark.parametrize(
    ("name", "flavor", "kinds"),
    [
        ("gpt_oss", "20b", {"full": 12, "window": 12}),
        ("llama4", "17bx16e_irope", {"full": 12, "chunked": 36}),
        ("deepseek_v3", "671B", {"full": 61}),
    ],
)
def test_every_model_is_known(name: str, flavor: str, kinds: dict[str, int]) -> None:
    """Its parameters, all and those of a token, are those that torchtitan counts, but for routers, norms and biases."""
    args = [
        f"--model.name={name}",
        f"--model.flavor={flavor}",
        "--parallelism.expert_parallel_degree=8",
    ]
    job = read_simulated_job(
        [f"--job.config_file={CONFIGS / 'llama3_8b.toml'}", *args], 64
    )
    model, own = job.model, copy.deepcopy(get_train_spec(name).model_args[flavor])
    assert {kind.name: kind.layers for kind in model.attention} == kinds
    own.attn_type, own.moe_impl = "sdpa", "standard"
    every, flops = own.get_nparams_and_flops(build_on_meta(job.config, own), 0)
    active = model.layers * model.layer_parameters + model.hidden * model.vocabulary
    assert (model.parameters, 6 * active) == pytest.approx((every, flops), rel=0.01)
    assert model.expert_ranks == 4  # with TP's two: the 8 ranks of expert parallelism


@pytest.mark.matrix
def test_layers_of_several_kinds_are_simulated_and_advised(tmp_path: Path) -> None:
    job, output = str(CONFIGS / "llama3_debug_cpu.toml"), tmp_path / "out.json"
    args = [
        job,
        "--model.name=llama4",
        "--model.flavor=debugmodel_irope",
        "--batches=1",
        "--ranks=4",
    ]
    assert (
        main(["simulate", *args, "--output", str(output)])
        == main(["advise", *args])
        == 0
    )
    written = json.loads(output.read_text())
    assert [kind["name"] for kind in written["inputs"]["model"]["attention"]] == [
        "full",
        "chunked",
    ]
    assert (
        0
        < written["systems"]["packed"]["share_of_perfect"]
        < written["systems"]["cad"]["share_of_perfect"]
    )


def test_settings_come_from_the_job_and_options_replace_them() -> None:
    job = CONFIGS / "llama3_8b_8gpus.toml"
    overrides = (
        "--cad.placement=balanced",
        "--cad.backward=keep",
        "--cad.tolerance=0.05",
        "--cad.receive_buffer_gb=0.5",
    )
    written, own, other = (
        read_inputs(job, args, options)[0].configuration
        for args, options in (
            ((), Options()),
            (overrides, Options()),
            (overrides, Options(placement="loader", backward="resend", tolerance=0.1)),
        )
    )
    assert [
        (each.placement, each.backward, each.tolerance)
        for each in (written, own, other)
    ] == [
        ("balanced", "auto", "auto"),
        ("balanced", "keep", 0.05),
        ("loader", "resend", 0.1),
    ]
    assert own.receive_buffer_gb == 0.5


def test_another_model_leaves_what_the_job_says_of_training() -> None:
    job = CONFIGS / "llama3_8b_8gpus.toml"
    overrides = (
        "--activation_checkpoint.mode=full",
        "--training.mixed_precision_param=float32",
    )
    figures = []
    for options in (
        Options(),
        Options(model="llama-34b"),
        Options(model="llama-34b", checkpointing="none"),
    ):
        inputs, _, _ = read_inputs(job, overrides, options)
        figures.append(
            (
                inputs.model.layers,
                inputs.model.dtype_bytes,
                inputs.configuration.checkpointing,
            )
        )
    assert figures == [(32, 4, "full"), (48, 4, "full"), (48, 4, "none")]


def test_systems_choose_what_neither_the_job_nor_an_option_says() -> None:
    job = CONFIGS / "llama3_8b_8gpus.toml"
    assert read_inputs(job, (), Options())[0].open == OPEN - {"pp", "checkpointing"}
    assert read_inputs(job, (), Options(nano_batches=1, cp=1))[0].open == {
        "microbatches",
        "schedule",
        "placement",
    }
    assert read_inputs(None, (), Options(ranks=8, model="llama-8b", pp=1))[
        0
    ].open == OPEN - {"pp"}


def test_synthetic_documents_are_the_jobs_own() -> None:
    data = ["--training.dataset=synthetic", "--training.dataset_path=fixed:300,200"]
    job = read_simulated_job(
        [f"--job.config_file={CONFIGS / 'llama3_8b.toml'}", *data], 64
    )
    assert set(job.lengths.tolist()) == {200, 300}


def test_what_a_deterministic_job_does_not_measure_is_noted() -> None:
    job = read_simulated_job(
        [f"--job.config_file={CONFIGS / 'llama3_8b.toml'}", "--debug.deterministic"], 64
    )
    assert (
        "tolerance: auto, as without debug.deterministic, with which it is 0.02"
        in job.notes
    )


def test_numbers_without_a_job(tmp_path: Path, capsys) -> None:
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    args = [
        "simulate",
        *SMALL,
        "--output",
        str(output),
        "--plot",
        str(plot),
        "--cp=1",
        "--pp=1",
    ]
    assert main(args) == 0
    inputs = json.loads(output.read_text())["inputs"]
    assert inputs["cluster"]["ranks"] == 8
    assert (
        inputs["configuration"]["placement"],
        inputs["configuration"]["tolerance"],
    ) == ("balanced", "auto")
    assert plot.stat().st_size > 10_000
    assert "of perfect" in capsys.readouterr().out


def test_lengths_from_a_file(tmp_path: Path) -> None:
    lengths, output = tmp_path / "lengths.json", tmp_path / "out.json"
    lengths.write_text("[8192]")
    assert (
        main(
            [
                "simulate",
                *SMALL,
                f"--documents=histogram:{lengths}",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    assert json.loads(output.read_text())["systems"]["cad"][
        "share_of_perfect"
    ] == pytest.approx(1)


@pytest.mark.matrix
def test_batches_from_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.json", tmp_path / "out.json"
    batches = [[[8192], *[[4096, 4096]] * 7], [[1024, 7168]] * 8]
    for content, count in ((batches, 2), (batches[0], 1)):
        rows.write_text(json.dumps(content))
        options = [f"--documents={rows}", "--packing-cp=1", "--placement=loader"]
        assert main(["simulate", *SMALL, *options, "--output", str(output)]) == 0
        written = json.loads(output.read_text())
        assert (written["inputs"]["documents"]["batches"], written["step_tokens"]) == (
            count,
            8 * 8192,
        )
        assert len(written["systems"]["packed"]["seconds_per_batch"]) == count
        assert written["systems"]["packing_cp"]["configuration"]["cp"] == 1
    assert written["systems"]["packed"]["share_of_perfect"] < 1


def recorded(folder: Path, *lines: object) -> Path:
    """A dump folder with these lines in its record."""
    (folder / DOCUMENTS_NAME).parent.mkdir()
    (folder / DOCUMENTS_NAME).write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
    )
    return folder


STEP = {
    "version": 1, "step": 1, "ranks": 2, "row_tokens": 8192,
    "microbatches": [[[[8192]], [[4096, 4096]]], [[[8192]], [[4096, 4096]]]],
}  # fmt: skip
"""Two microbatches with a long document on the first rank and two short ones on the second."""


def test_recorded_steps_are_simulated_as_they_were(tmp_path: Path) -> None:
    """On the job's number of ranks and in its microbatches. The long document has 2080 tiles, the others 1056."""
    output = tmp_path / "out.json"
    even = {**STEP, "step": 2, "microbatches": [[[[8192]], [[8192]]]] * 2}
    dump = recorded(tmp_path, even, STEP, {**STEP, "step": 2})
    args = [
        "simulate",
        *SMALL,
        f"--documents={dump}",
        "--pp=1",
        "--cp=1",
        "--output",
        str(output),
    ]
    args.remove("--ranks=8")
    for option, count in ((["--batches=1"], 1), (["--batches=10"], 2)):
        assert main([*args, *option]) == 0
        written = json.loads(output.read_text())
        assert written["inputs"]["documents"]["batches"] == count
        assert (written["inputs"]["cluster"]["ranks"], written["step_tokens"]) == (
            2,
            4 * 8192,
        )
        systems = written["systems"]
        assert systems["packed"]["configuration"]["microbatches"] == 2
        assert systems["packed"]["max_over_mean"] == pytest.approx(
            2080 / ((2080 + 1056) / 2)
        )
        assert systems["reorder"]["max_over_mean"] == pytest.approx(1)
        assert systems["perfect"]["max_over_mean"] == 1
        assert 1 <= systems["greedy"]["max_over_mean"] < 1.1


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"step": 0},
        {"ranks": "2"},
        {"row_tokens": 4096},
        {"microbatches": [[[[8193, -1]]]]},
        {"microbatches": [[[8192]]]},
        {"microbatches": [[[[8192]]], [[[8192]]] * 2]},
        {"microbatches": [[[[8192]]], []]},
        {"microbatches": ["ab"]},
        {"microbatches": {"a": 1}},
        {"microbatches": None},
    ],
)
def test_what_is_no_record_is_one_line(
    change: dict[str, object], tmp_path: Path, refused
) -> None:
    dump = recorded(tmp_path, {**STEP, **change})
    error = refused("simulate", *SMALL, f"--documents={dump}")
    assert f"--documents {dump / DOCUMENTS_NAME} " in error


def test_folders_without_a_record(tmp_path: Path, refused) -> None:
    refused("simulate", *SMALL, f"--documents={tmp_path}")
    refused("simulate", *SMALL, f"--documents={recorded(tmp_path)}")


@pytest.mark.parametrize(
    "args",
    [
        ["nothing.toml"],
        [],
        ["--ranks=8"],
        ["--ranks=8", "--model=gpt"],
        [*SMALL, "--net=40"],
        [*SMALL, "--linear-flops=615"],
        [*SMALL, "--documents=zipf"],
        [*SMALL, "--documents=lognormal:mean=3"],
        [*SMALL, "--documents=lognormal:median=x"],
        [*SMALL, "--documents=none.json"],
        [*SMALL, "--row-tokens=1000"],
        [*SMALL, "--profile=none.json"],
        [str(CONFIGS / "llama3_8b.toml"), "--ranks=3"],
        [str(CONFIGS / "llama3_8b.toml"), "--training.seqlen=3"],
    ],
)
def test_mistakes_are_one_line(args: list[str], refused) -> None:
    refused("simulate", *args)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "write a JSON list of lengths in tokens, one or more"),
        ('[5, "abc"]', "'abc' is no length"),
        ("[5, -1]", "'-1' is no length"),
        ("[[5, -1]]", "'-1' is no length"),
        (
            "[[8192], [4096]]",
            "documents given have 4096 to 8192 tokens in a row: write equally many in each",
        ),
    ],
)
def test_lengths_that_are_none_are_named(
    content: str, message: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    assert main(["simulate", *SMALL, f"--documents={path}"]) == 2
    assert f"--documents {path}: {message}" in capsys.readouterr().err
