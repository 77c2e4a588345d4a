# SPDX-License-Identifier: BSD-3-Clause
"""Shadow, checkpoints, and what is refused, with torchtitan 0.3.0."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.config import ConfigManager, derive
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.trainer import Trainer

from tests.lib.jobs.compositions import options
from tests.lib.sets import matrix
from tests.titan030 import tiny
from tests.titan030.harness import run, squared_norms
from torchtitan_cad.integration.torchtitan_v0_3 import parts
from torchtitan_cad.integration.torchtitan_v0_3.checks import check_recipe
from torchtitan_cad.integration.torchtitan_v0_3.parts import (
    KeptAttentionAlone,
    PlannedValidator,
)
from torchtitan_cad.integration.torchtitan_v0_3.trainer import CadTrainer
from torchtitan_cad.recipes import cad, deepseek_v3, gpt_oss, llama3, qwen3

CHECKPOINTS = (
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--training.steps=4",
    "--checkpoint.no-last_save_model_only",
)


@pytest.mark.parametrize("words", ["", pytest.param("stages2", marks=matrix)])
def test_a_shadow_trains_as_stock_to_the_bit(words, tmp_path):
    job = ("llama3_deep", *options(words))
    stock = run(*job, with_cad=False)
    shadow = run(*job, "--cad.shadow", dump_folder=tmp_path)
    assert (shadow.losses, shadow.grad_norms) == (stock.losses, stock.grad_norms)
    (record,) = tmp_path.rglob("steps.jsonl")
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert len(steps[0]["microbatches"]) == (2 if words else 1)


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_of_one_resumes_in_the_other(first, tmp_path):
    whole = run("llama3", *CHECKPOINTS, with_cad=first, dump_folder=tmp_path)
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    rest = run("llama3", *CHECKPOINTS, with_cad=not first, dump_folder=tmp_path)
    assert len(rest.losses) == 2
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    norms = squared_norms(whole)
    for step, norm in squared_norms(rest).items():
        assert norm == pytest.approx(norms[step], rel=2e-5)


def test_recipes_are_upstreams_with_cad():
    for module in (llama3, qwen3, deepseek_v3, gpt_oss):
        names = [name for name in dir(module) if name.endswith("debugmodel")]
        assert names, module
        config = getattr(module, names[0])()
        assert config.cad.documents == "positions"
        assert not config.cad.shadow
    config = cad(config, tolerance=0.5)
    assert (config.cad.tolerance, config.cad.documents) == (0.5, "positions")
    with pytest.raises(AttributeError):
        _ = llama3.llama3_of_nobody


class OwnAttention(FlexAttention):
    """A user's attention that changes the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, *rows, **others):
        return super().forward(*rows, score_mod=None, **others)


class OwnMasks(Llama3Model):
    """A user's model that masks what CAD would not."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def get_attention_masks(self, positions):
        return super().get_attention_masks(positions)


MODEL = "model_spec.model"
ATTENTION = f"{MODEL}.layers.0.attention"
INNER = f"{ATTENTION}.inner_attention"


def put(config, path, value):
    *parents, name = path.split(".")
    for parent in parents:
        config = config[0] if parent == "0" else getattr(config, parent)
    setattr(config, name, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cad.nano_batches": 2},
            "cad.nano_batches = 2: .*torchtitan 0.2.2 only.*set it to 1",
        ),
        ({"cad.streams": "traced"}, "cad.streams = 'traced'"),
        ({"cad.documents": "eos"}, "cad.documents = 'eos'.*set it to 'pos"),
        ({"cad.eos_id": 3}, "cad.eos_id = 3"),
        ({"cad.kernel": "fast"}, "cad.kernel = 'fast': set cad.kernel to one of"),
        ({"cad.tolerance": -1.0}, "cad.tolerance"),
        ({"cad.heartbeat_seconds": 0.0}, "cad.heartbeat_seconds = 0.0"),
        (
            {"parallelism.pipeline_parallel_schedule": "CAD1F1B"},
            "pipeline_parallel_schedule = 'CAD1F1B'.*'1F1B'",
        ),
        (
            {"parallelism.tensor_parallel_degree": 3},
            "tensor_parallel_degree = 3 does not divide",
        ),
        (
            {
                "parallelism.context_parallel_degree": 2,
                "parallelism.spmd_backend": "partial_dtensor",
            },
            "spmd_backend = 'partial_dtensor'",
        ),
        ({"validator.enable": True, "validator.steps": -1}, "validator.steps = -1"),
        (
            {INNER: VarlenAttention.Config(window_size=(-1, -1))},
            r"inner_attention .*window_size = \(-1, 0\)",
        ),
        (
            {INNER: ScaledDotProductAttention.Config()},
            "inner_attention .* is ScaledDotProduct",
        ),
        (
            {"cad.shadow": True, INNER: FlexAttention.Config()},
            "llama3 debugmodel has FlexAttention, .*CPU",
        ),
        (
            {INNER: OwnAttention.Config()},
            "inner_attention .* CAD replaces FlexAttention",
        ),
        ({ATTENTION: None}, "masks that CAD does not know"),
        (
            {MODEL: derive(tiny.recipe("llama3").model_spec.model, OwnMasks.Config)},
            "masks that CAD does not know",
        ),
        (
            {"compile": SimpleNamespace(mode="aot_fx_trace")},
            "compile.mode = 'aot_fx_trace': .* set it to None",
        ),
        ({"debug.spmd_typechecking": True}, "debug.spmd_typechecking = True"),
    ],
)
def test_refused_in_one_line(changes, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = cad(tiny.recipe("llama3"))
    for path, value in changes.items():
        put(config, path, value)
    with pytest.raises(ValueError, match=message) as refused:
        check_recipe(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["float8.Float8Linear", "mx.MXFP8Linear", "nvfp4.NVFP4Linear"]
)
def test_quantized_models_are_refused(name, monkeypatch):
    """Without torchao, by a class in place of torchtitan's, which is None then."""

    class Quantized(Linear):
        @dataclass(kw_only=True, slots=True)
        class Config(Linear.Config):
            pass

    monkeypatch.setattr(f"torchtitan.components.quantization.{name}", Quantized)
    config = tiny.with_cad("llama3")
    check_recipe(config)
    model = config.model_spec.model
    _, linear, parent, key = next(model.layers[0].traverse(Linear.Config))
    setattr(parent, key, derive(linear, Quantized.Config))
    with pytest.raises(ValueError, match=r"llama3 debugmodel is quantized, .* take a"):
        check_recipe(config)


def test_models_are_not_given_document_ids(monkeypatch):
    """In validation plans are made by them; a shadow has recorded them already. A recipe's own class sees them."""

    def stock(_, batch, labels, *more):
        others = dict(batch)
        return others.pop("input"), labels, others | {"seen": list(batch)}

    session = SimpleNamespace(plan_now=lambda batch: batch["document_ids"])
    monkeypatch.setattr(parts, "current_session", lambda: session)
    batch = {"input": 1, "document_ids": 2}
    seen = {"seen": list(batch)}
    own = type("Own", (), {"post_dataloading_process": stock})
    validator = type("Validator", (PlannedValidator, own), {})()
    planned = validator.post_dataloading_process(batch, 3, [])
    assert planned == (1, 3, seen | {"attention_masks": 2})

    monkeypatch.setattr(Trainer, "post_dataloading_process", stock)
    trainer = CadTrainer.__new__(CadTrainer)
    trainer.shadow = True
    assert trainer.post_dataloading_process(batch, 3) == (1, 3, seen)


def test_a_key_that_does_not_exist():
    with pytest.raises(
        ValueError, match=r"cad\(tolerence=...\): no such key; set one of: .*tolerance"
    ):
        cad(tiny.recipe("llama3"), tolerence=0.02)


ROOT = Path(__file__).parents[2]


def test_documented_recipes_are_read():
    pages = (ROOT / "README.md", ROOT / "docs/get_started.md")
    text = re.sub(r"\s*\\\n\s*", " ", "".join(page.read_text() for page in pages))
    commands = re.findall(r"^ {4}.* -m \S+ (--module .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        config = ConfigManager().parse_args(command.split())
        assert config.cad == llama3.llama3_8b().cad


def test_full_checkpointing_keeps_attention_alone():
    kept = KeptAttentionAlone().get_save_ops()
    assert [operator.name() for operator in kept] == ["torchtitan_cad::core_attention"]
