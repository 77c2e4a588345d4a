# SPDX-License-Identifier: BSD-3-Clause
"""CAD composed with everything torchtitan offers, each composition against a run without CAD.

The reference is the same job with ``parallelism.cad`` off, on torchtitan's own varlen attention. Where stock torchtitan
0.2.2 cannot run that job (context parallelism with varlen, documents under pipelining) or scales its gradients wrongly
(PP, DDP; see patches/), the reference is the equivalent job it can run: the same global batch without that parallelism.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, run, tokenizer_folder
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
import torchtitan.distributed.context_parallel as titan_cp  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2.models import ADAPTERS  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.plugin import cad_train_spec  # noqa: E402

SHORT = {
    "collective": (),
    "symm_mem": ("ac_full_resend",),
}
"""Compositions that the short set trains by each transport, beside those of test_defaults.py, test_placement.py
and test_compile_caches.py: one of every kind."""
SLOW = (
    "compile_resend_ac_op_tp2",
    "pp2_interleaved_tolerance_auto",
    "pp2_dualpipev",
    "hsdp2x2",
    "tp2_no_loss_parallel",
)
"""Combinations of what other compositions show, too long for the matrix."""
SYMMETRIC = ("fsdp4", "pp2xcp2", "validation")
"""Compositions that the matrix trains over symmetric memory too; the slow set trains all."""


def cases_and_transports() -> Iterator[object]:
    for case in c.COMPOSITIONS:
        for transport in ("collective", "symm_mem") if case.moves else ("collective",):
            in_matrix = (
                case.name not in SLOW
                if transport == "collective"
                else case.name in SYMMETRIC
            )
            marks = [needs_linux] if transport == "symm_mem" else []
            if case.name not in SHORT[transport]:
                marks.append(pytest.mark.matrix if in_matrix else pytest.mark.slow)
            name = (
                case.name if transport == "collective" else f"{case.name}-{transport}"
            )
            yield pytest.param(case, transport, id=name, marks=marks)


@pytest.mark.matrix
def test_starts_from_the_parameters_of_stock():
    """What a job measures at its start takes none of torchtitan's random numbers, from which parameters are drawn."""
    args = (*c.VALIDATION, *c.global_batch(12))
    cad = run([*c.COMMON, *args, *c.CAD, *c.TOLERANCE_AUTO], 2, init_seed=None)
    assert cad.losses == pytest.approx(c.stock(2, *args).losses, rel=c.TOLERANCE)


@pytest.mark.parametrize(("case", "transport"), list(cases_and_transports()))
def test_composition_trains_like_its_reference(case, transport):
    result = check(case, f"--cad.transport={transport}")
    assert f"CAD exchanges rows by {transport}" in result.logs[0] or not case.moves
    if case.moves:
        summary = c.cad_summary(result)
        assert summary["loss_last"] == pytest.approx(result.losses[-1])
        assert summary["tasks_moved"] > 0
        assert summary["imbalance_after"] < summary["imbalance_before"]


def check(
    case: c.Composition,
    *more: str,
    cad: tuple[str, ...] = c.CAD,
    link: float | None = None,
) -> RunResult:
    """The composition's run, with ``more`` arguments; it has trained as its reference does."""
    if TorchVersion(torch.__version__) < case.needs_torch:
        pytest.skip(
            f"stock torchtitan cannot run this with torch below {case.needs_torch}"
        )
    validation = c.VALIDATION if case.validates else ()
    args = [*c.COMMON, *validation, *cad, *case.shared, *case.args, *more]
    result = run(args, case.nranks, grads_at=2, link=link)
    expected = c.reference(
        case.reference_nranks or case.nranks, (*case.shared, *case.reference_args)
    )
    assert (
        not case.validates
        or result.validation_losses.keys() == expected.validation_losses.keys()
    )
    c.assert_trains_alike(result, expected, reports_loss=case.reports_loss)
    c.assert_not_recompiled(result)
    return result


every_model = pytest.mark.parametrize("name", list(ADAPTERS))


def build_on_meta(name: str, flavor: str) -> tuple[Any, Any]:
    """A CAD flavor's arguments and its model of two layers, without memory."""
    spec = cad_train_spec(get_train_spec(name), ADAPTERS[name], flavor)
    args = spec.model_args[flavor]
    args.update_from_config(
        ConfigManager().parse_args([*c.CAD[:1], f"--model.name={name}"])
    )
    args.n_layers = min(args.n_layers, 2)
    with torch.device("meta"):
        return args, spec.model_cls(args)


@every_model
def test_every_flavor_becomes_a_cad_flavor(name):
    for flavor in list(get_train_spec(name).model_args):
        args, model = build_on_meta(name, flavor)
        assert (args.attn_type, args.attn_mask_type) == ("varlen", "block_causal")
        assert all(
            hasattr(block.attention, "inner_attention")
            for block in model.layers.values()
        )


@every_model
def test_every_parameter_is_initialised(name):
    _, model = build_on_meta(name, "debugmodel")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
        model.init_weights(buffer_device=torch.device("cpu"))
    named = (*model.named_parameters(), *model.named_buffers())
    assert [tensor_name for tensor_name, tensor in named if tensor.isnan().any()] == []


def test_preparing_for_one_job_after_another_leaves_no_trace():
    def state() -> tuple:
        return (
            get_train_spec("llama3").model_cls,
            titan_cp.cp_shard,
            Trainer.train,
            Trainer.close,
        )

    before = state()
    for _ in range(2):
        ConfigManager().parse_args(
            [*c.CAD, f"--model.hf_assets_path={tokenizer_folder()}"]
        )
        assert get_train_spec("llama3").model_cls.__name__ == "CadTransformer"
        assert all(now is not then for now, then in zip(state(), before, strict=True))
    ConfigManager().parse_args([c.CAD[0], "--parallelism.no-cad"])
    assert state() == before
    ConfigManager().parse_args([])
    assert state() == before


def test_without_cad_a_job_is_stock_torchtitan():
    """The config module alone changes nothing, to the bit."""
    result = run(
        [*c.COMMON, "--job.custom_config_module=torchtitan_cad.job_config"], nranks=2
    )
    stock = c.reference(2, ())
    assert (result.losses, result.grad_norms) == (stock.losses, stock.grad_norms)
    assert not any("CAD" in log for log in result.logs)


STEPS, SETTLED, WINDOW, LOG_FREQ = 2000, 300, 100, 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs the memory figures of Linux"
)
@pytest.mark.parametrize(
    "transport", ["collective", pytest.param("symm_mem", marks=needs_linux)]
)
def test_resident_memory_does_not_grow(transport):
    """From step 300 on, means over 100 steps are within 1% of each other, on every rank and over 1,700 plans."""
    job = [
        *c.PLACED,
        f"--cad.transport={transport}",
        f"--training.steps={STEPS}",
        f"--metrics.log_freq={LOG_FREQ}",
    ]
    result = run(job, nranks=2, timeout_s=3000)
    assert len(result.resident_bytes) == 2
    for memory in result.resident_bytes:
        starts = range(SETTLED, STEPS, WINDOW)
        means = [
            fmean(n for step, n in memory.items() if start < step <= start + WINDOW)
            for start in starts
        ]
        assert max(means) <= 1.01 * min(means), [
            f"{mean / 2**20:.1f} MiB" for mean in means
        ]
