"""The shipped configurations parse, and `make train` shows what it promises."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.compositions import TOLERANCE
from tests.integration.harness import run
from torchtitan_cad.integration.titan022.cpu import enable_cpu

enable_cpu()

from torchtitan.components.tokenizer import build_hf_tokenizer  # noqa: E402
from torchtitan.config import ConfigManager, JobConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_cad.demo.tokenizer import prepare_tokenizer  # noqa: E402
from torchtitan_cad.integration.loading.documents import document_starts  # noqa: E402
from torchtitan_cad.integration.titan022 import plugin  # noqa: E402
from torchtitan_cad.integration.titan022.checks import validate  # noqa: E402
from torchtitan_cad.planning import AttentionShape, Plan, make_plan  # noqa: E402
from torchtitan_cad.planning.model.batch import BatchShape, group_layout  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
RANKS = {"llama3_8b": 64, "llama3_8b_8gpus": 8, "llama3_8b_long": 64, "llama3_debug_cpu": 4, "qwen3_8b": 32}

Parse = Callable[..., JobConfig]


@pytest.fixture
def parse(monkeypatch) -> Parse:
    """Parses a configuration as a job would, but leaves torchtitan as it is."""

    def parse(name: str, *args: str) -> JobConfig:
        monkeypatch.setattr(plugin, "on_config", lambda config: validate(config, RANKS[name]))
        return ConfigManager().parse_args([f"--job.config_file={CONFIGS / name}.toml", *args])

    return parse


def test_every_configuration_is_tested():
    assert {path.stem for path in CONFIGS.iterdir()} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_parses(parse, name):
    config = parse(name)
    assert config.parallelism.cad
    assert config.model.flavor in get_train_spec(config.model.name).model_args
    assert config.training.dataset in DATASETS
    assert not parse(name, "--parallelism.no-cad").parallelism.cad


def test_make_train_is_uneven_and_gets_balanced(parse, tmp_path):
    """The bounds hold with a margin for the standard libraries of Python 3.11 to 3.13, with and without their tests."""
    config = parse("llama3_debug_cpu", f"--model.hf_assets_path={prepare_tokenizer(tmp_path)}")
    assert config.training.steps >= 20
    stats = [plan.stats for plan in plan_steps(config, RANKS["llama3_debug_cpu"])]
    assert np.mean([step.max_over_mean_before for step in stats]) > 1.4
    assert np.mean([step.max_over_mean for step in stats]) <= 1.05


@pytest.mark.slow
def test_make_train_computes_the_same_without_cad(tmp_path):
    """All steps of `make train` against stock torchtitan's varlen attention: losses and gradient norms."""
    args = [f"--model.hf_assets_path={prepare_tokenizer(tmp_path)}"]
    config = CONFIGS / "llama3_debug_cpu.toml"
    runs = [
        run([*args, switch], nranks=4, timeout_s=1500, config=config, init_seed=None)
        for switch in ("--parallelism.cad", "--parallelism.no-cad")
    ]
    for result in runs:
        assert result.ok, result.report()
        assert len(result.losses) >= 20
        assert result.losses[-1] < result.losses[0] - 1
    with_cad, without = runs
    assert with_cad.losses == pytest.approx(without.losses, rel=TOLERANCE)
    assert with_cad.grad_norms == pytest.approx(without.grad_norms, rel=TOLERANCE)


def plan_steps(config: JobConfig, ranks: int) -> Iterator[Plan]:
    """The plans of a data-parallel job's steps."""
    tokenizer = build_hf_tokenizer(config)
    loaders = [iter(build_text_dataloader(ranks, rank, tokenizer, config)) for rank in range(ranks)]
    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    attention = AttentionShape(args.n_heads, args.n_kv_heads or args.n_heads, args.dim // args.n_heads, dtype_bytes=4)
    rows, seq_len = config.training.local_batch_size, config.training.seq_len
    shape = BatchShape(rows, seq_len, rows_per_microbatch=rows)
    for _ in range(config.training.steps):
        starts = [document_starts(next(loader)[0]["input"], tokenizer.eos_id) for loader in loaders]
        yield make_plan(group_layout(starts, shape, 0, cp=1), attention, config.cad.planner_config())
