"""The ping-pong loop with all ranks as threads: any plans, any delays, the same results, and no deadlock."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.accuracy import assert_as_exact
from tests.plans import random_plan
from tests.runtime.kernels_reference import dense_attention
from tests.runtime.threaded import needs_linux, run_ranks, symmetric_transports, thread_transports
from tests.sets import params, seeds
from torchtitan_cad.integration.titan022.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
from torchtitan.distributed import activation_checkpoint  # noqa: E402
from torchtitan.models.attention import VarlenMetadata  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs  # noqa: E402
from torchtitan.models.llama3.model.model import Transformer  # noqa: E402

from torchtitan_cad.integration.pingpong.loop import PingPong  # noqa: E402
from torchtitan_cad.integration.titan022.blocks import TitanBlock, apply_ac  # noqa: E402
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, make_plan, validate_plan  # noqa: E402
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts  # noqa: E402
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine  # noqa: E402
from torchtitan_cad.runtime.kernels import VarlenArgs  # noqa: E402
from torchtitan_cad.runtime.kernels.select import get_kernel  # noqa: E402

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)
AC_MODES = {
    "none": None,
    "op": SimpleNamespace(mode="selective", selective_ac_option="op"),
    "layer": SimpleNamespace(mode="selective", selective_ac_option="2"),
    "full": SimpleNamespace(mode="full", selective_ac_option="op"),
}
MICROBATCHES = 2
ENGINE = "test_pingpong_threads"


def new_model() -> nn.Module:
    torch.manual_seed(0)
    args = TransformerModelArgs(
        dim=32, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=32, max_seq_len=64, attn_type="varlen"
    )
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    return model


class Job:
    """Random documents and plans for a number of ranks; every rank takes two microbatches forward, then backward."""

    def __init__(self, seed: int, *, symmetric: bool = False) -> None:
        self.symmetric = symmetric
        rng = np.random.default_rng(seed)
        self.ranks, self.rows, seq_len = int(rng.integers(1, 4)), int(rng.integers(1, 5)), 2 * int(rng.integers(4, 24))
        self.keep, self.ac = bool(rng.integers(2)), str(rng.choice(list(AC_MODES)))
        self.model = new_model()
        self.tokens = torch.from_numpy(rng.integers(0, 32, (self.ranks, self.rows, seq_len)))
        size = self.rows * seq_len
        drawn = [rng.choice(size, int(rng.integers(0, 6))) for _ in range(self.ranks)]
        starts = [np.union1d(np.arange(0, size, seq_len), more) for more in drawn]
        shape = BatchShape(self.rows, seq_len, self.rows)
        self.layouts = nano_layouts(starts, shape, 0, 1, nano_batches=2)
        self.offsets = [[*of_rank.tolist(), size] for of_rank in starts]
        self.plans = [self._any_plan(rng, layout) for _ in range(MICROBATCHES) for layout in self.layouts]

    @staticmethod
    def _any_plan(rng: np.random.Generator, layout: TokenLayout) -> Any:
        if layout.seg_attends.all():
            plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
        else:
            plan = make_plan(layout, SHAPE, PlannerConfig(tolerance=0.0, min_shard=int(rng.choice([1, 4])), tile=1))
        validate_plan(plan)
        return plan

    def pingpong(self, max_delay_s: float = 0.0) -> list[list[Tensor]]:
        """Per rank the outputs of the blocks and the gradients of their parameters."""
        transports: list[Any] = symmetric_transports(self.ranks) if self.symmetric else []
        transports = transports or thread_transports(self.ranks, max_delay_s)
        models = [copy.deepcopy(self.model) for _ in range(self.ranks)]

        loops = []
        for rank in range(self.ranks):
            engine = self._engine(rank, transports[rank])
            for key, plan in enumerate(self.plans):
                engine.add_plan(key, plan)
            register_engine(f"{ENGINE} {rank}", engine)
            loops.append(PingPong(map(TitanBlock, models[rank].layers.values()), f"{ENGINE} {rank}"))
            if AC_MODES[self.ac] is not None:
                apply_ac(loops[-1], checkpoint, AC_MODES[self.ac])

        def body(rank: int) -> list[Tensor]:
            rope = models[rank].freqs_cis
            return self._train(rank, models[rank], lambda h, key: loops[rank](h, rope, None, 2 * key))

        return run_ranks(self.ranks, body)

    def undivided(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """The same without nano-batches, in which every rank computes a dense softmax of its documents."""
        results = []
        for rank in range(self.ranks):
            model = copy.deepcopy(self.model)
            model = model.double() if dtype == torch.float64 else model  # .to() would make rotary angles real
            for block in model.layers.values():
                block.attention.inner_attention.forward = attention_of(self.offsets[rank])

            def blocks(h: Tensor, _: int, model: nn.Module = model) -> Tensor:
                for block in model.layers.values():
                    h = block(h, model.freqs_cis, VarlenMetadata(None, None, None, None))
                return h

            results.append(self._train(rank, model, blocks))
        return results

    def _engine(self, rank: int, transport: Any) -> CoreAttentionEngine:
        kernel = get_kernel("cpu", CPU)
        return CoreAttentionEngine(kernel, transport, rank=rank, device=CPU, scale=8**-0.5, keep=self.keep)

    def _train(self, rank: int, model: nn.Module, blocks: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        outputs = [blocks(model.tok_embeddings(self.tokens[rank]), key) for key in range(MICROBATCHES)]
        for i, out in enumerate(outputs):
            (out * torch.linspace(1, 2 + i, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach() for out in outputs] + gradients


def attention_of(offsets: list[int]) -> Callable[..., Tensor]:
    """Dense attention over documents that begin at these tokens; the last offset is the end."""
    call = VarlenArgs.from_numpy(offsets, offsets, causal=True, scale=8**-0.5, device=CPU)

    def forward(xq: Tensor, xk: Tensor, xv: Tensor, *_: Any) -> Tensor:
        return dense_attention(*(x.transpose(1, 2).flatten(0, 1) for x in (xq, xk, xv)), call)[0]

    return forward


def checkpoint(model: nn.Module, config: SimpleNamespace) -> None:
    activation_checkpoint._layer_sac_count = 0  # counts all ranks' blocks, as they share a process
    config = SimpleNamespace(
        **vars(config),
        preserve_rng_state=False,
        determinism_check="default",
        early_stop=True,
        debug=False,
        per_op_sac_force_recompute_mm_shapes_by_fqns=[],
    )
    activation_checkpoint.apply_ac(model, config, op_sac_save_list={torch.ops.aten.mm.default})


def check(seed: int, max_delay_s: float = 0.0, *, symmetric: bool = False) -> None:
    job = Job(seed, symmetric=symmetric)
    results = job.pingpong(max_delay_s), *(job.undivided(dtype) for dtype in (torch.float32, torch.float64))
    for of_rank in zip(*results, strict=True):
        for got, other, reference in zip(*of_rank, strict=True):
            assert_as_exact(got, other, reference)


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_any_plans_and_delays_give_the_undivided_result(seed: int) -> None:
    check(seed, 0.002)


@needs_linux
@pytest.mark.parametrize("seed", params(range(20, 26), (20, 21)))
def test_exchanges_of_both_halves_fit_into_symmetric_memory(seed: int) -> None:
    check(seed, symmetric=True)
