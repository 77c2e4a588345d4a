"""The ping-pong loop on a CUDA device, eager and compiled: as the undivided operator, without synchronisation."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("torchtitan")

from torchtitan.models.attention import VarlenMetadata
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from tests.plans import random_plan
from torchtitan_cad.integration.loading.documents import BatchShape, nano_layouts
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.integration.titan022.blocks import TitanBlock
from torchtitan_cad.planning import AttentionShape, PlannerConfig, make_plan
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels import get_kernel
from torchtitan_cad.runtime.ops import core_attention

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROWS, SEQ_LEN, DIM = 2, 1024, 512
SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)
WHOLE, HALVES = "test_pingpong_gpu whole", "test_pingpong_gpu halves"


def new_model() -> nn.Module:
    torch.manual_seed(0)
    args = TransformerModelArgs(
        dim=DIM, n_layers=3, n_heads=8, n_kv_heads=2, vocab_size=64, max_seq_len=SEQ_LEN, attn_type="varlen"
    )
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    rope = model.freqs_cis
    model = model.to(DEVICE, torch.bfloat16)
    model.freqs_cis = rope.to(DEVICE)
    return model


def register_engines(seed: int) -> None:
    """One for the batch by an undivided plan, one for its halves by plans that cut documents at random."""
    rng = np.random.default_rng(seed)
    shape = BatchShape(ROWS, SEQ_LEN, ROWS)
    starts = [np.union1d([0, SEQ_LEN], rng.choice(ROWS * SEQ_LEN, 9))]
    kernel = get_kernel("auto", DEVICE, SHAPE.head_dim)
    for name, nano_batches in ((WHOLE, 1), (HALVES, 2)):
        engine = CoreAttentionEngine(kernel, None, rank=0, device=DEVICE, scale=SHAPE.head_dim**-0.5)
        for key, layout in enumerate(nano_layouts(starts, shape, 0, 1, nano_batches)):
            plan = make_plan(layout, SHAPE, PlannerConfig(planner="home"))
            engine.add_plan(key, random_plan(rng, layout, SHAPE, aligned=False, split_kv=True) if key else plan)
        register_engine(name, engine)


def whole_blocks(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.layers.values():
        x = block(x, model.freqs_cis, VarlenMetadata(None, None, None, None))
    return x


def attend_whole(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    return core_attention(*rows, torch.tensor(0), WHOLE).view(ROWS, SEQ_LEN, *rows[0].shape[1:])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_halves_give_what_the_whole_gives(compiled: bool) -> None:
    register_engines(seed=0)
    whole, halved = new_model(), new_model()
    for block in whole.layers.values():
        block.attention.inner_attention.forward = attend_whole
    loop = PingPong(map(TitanBlock, halved.layers.values()), HALVES)
    if compiled:
        loop.compile("inductor")
    exact = copy.deepcopy(whole).float()  # for what rounding alone may do: linear work in fp32
    exact.freqs_cis = whole.freqs_cis
    for block in exact.layers.values():
        block.attention.inner_attention.forward = lambda *qkv: attend_whole(*(x.bfloat16() for x in qkv[:3])).float()
    x = torch.randn(ROWS, SEQ_LEN, DIM, device=DEVICE, dtype=torch.bfloat16)
    runs = {
        "exact": (exact, lambda: whole_blocks(exact, x.float())),
        "whole": (whole, lambda: whole_blocks(whole, x)),
        "halved": (halved, lambda: loop(x, halved.freqs_cis, None, 0)),
    }
    results = {}
    for name, (model, run) in runs.items():
        out = run()
        out.float().square().mean().backward()
        results[name] = [out, *(p.grad for p in model.layers.parameters())]
    for want, whole_result, halved_result in zip(*results.values(), strict=True):
        scale = want.float().norm()
        errors = [(x.float() - want.float()).norm() / scale for x in (whole_result, halved_result)]
        assert errors[1] <= 2 * errors[0] + 1e-4


def test_the_loop_does_not_wait_for_the_device() -> None:
    register_engines(seed=1)
    model = new_model()
    loop = PingPong(map(TitanBlock, model.layers.values()), HALVES)
    x = torch.randn(ROWS, SEQ_LEN, DIM, device=DEVICE, dtype=torch.bfloat16)
    gradient = torch.ones_like(x)
    loop(x, model.freqs_cis, None, 0).backward(gradient)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop(x, model.freqs_cis, None, 0).backward(gradient)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
