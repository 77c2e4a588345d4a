"""`make train` shows what it promises; test_doctor.py examines every configuration."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.compositions import TOLERANCE
from tests.integration.harness import run
from torchtitan_cad.integration.titan022.cpu import enable_cpu

enable_cpu()

from torchtitan.components.tokenizer import build_hf_tokenizer  # noqa: E402
from torchtitan.config import ConfigManager, JobConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import build_text_dataloader  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_cad.demo.tokenizer import prepare_tokenizer  # noqa: E402
from torchtitan_cad.integration.loading.documents import document_starts  # noqa: E402
from torchtitan_cad.integration.titan022 import plugin  # noqa: E402
from torchtitan_cad.integration.titan022.checks import validate  # noqa: E402
from torchtitan_cad.planning import AttentionShape, Plan, make_plan  # noqa: E402
from torchtitan_cad.planning.model.batch import BatchShape, group_layout  # noqa: E402

CONFIG = Path(__file__).resolve().parents[2] / "train_configs" / "llama3_debug_cpu.toml"
RANKS = 4


def test_make_train_is_uneven_and_gets_balanced(monkeypatch, tmp_path):
    """The bounds hold with a margin for the standard libraries of Python 3.11 to 3.13, with and without their tests."""
    monkeypatch.setattr(plugin, "on_config", lambda config: validate(config, RANKS))  # torchtitan is left as it is
    config = ConfigManager().parse_args([f"--job.config_file={CONFIG}", *assets(tmp_path)])
    assert config.training.steps >= 20
    stats = [plan.stats for plan in plan_steps(config)]
    assert np.mean([step.max_over_mean_before for step in stats]) > 1.4
    assert np.mean([step.max_over_mean for step in stats]) <= 1.05


@pytest.mark.slow
def test_make_train_computes_the_same_without_cad(tmp_path):
    """All steps of `make train` against stock torchtitan's varlen attention: losses and gradient norms."""
    runs = [
        run([*assets(tmp_path), switch], RANKS, 1500, config=CONFIG, init_seed=None)
        for switch in ("--parallelism.cad", "--parallelism.no-cad")
    ]
    for result in runs:
        assert result.ok, result.report()
        assert len(result.losses) >= 20
        assert result.losses[-1] < result.losses[0] - 1
    with_cad, without = runs
    assert with_cad.losses == pytest.approx(without.losses, rel=TOLERANCE)
    assert with_cad.grad_norms == pytest.approx(without.grad_norms, rel=TOLERANCE)


def assets(folder: Path) -> list[str]:
    return [f"--model.hf_assets_path={prepare_tokenizer(folder)}"]


def plan_steps(config: JobConfig) -> Iterator[Plan]:
    """The plans of a data-parallel job's steps."""
    tokenizer = build_hf_tokenizer(config)
    loaders = [iter(build_text_dataloader(RANKS, rank, tokenizer, config)) for rank in range(RANKS)]
    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    attention = AttentionShape(args.n_heads, args.n_kv_heads or args.n_heads, args.dim // args.n_heads, dtype_bytes=4)
    rows, seq_len = config.training.local_batch_size, config.training.seq_len
    shape = BatchShape(rows, seq_len, rows_per_microbatch=rows)
    for _ in range(config.training.steps):
        starts = [document_starts(next(loader)[0]["input"], tokenizer.eos_id) for loader in loaders]
        yield make_plan(group_layout(starts, shape, 0, cp=1), attention, config.cad.planner_config())
