"""Ping-pong asks of a block no more than ``BlockView``: blocks in plain PyTorch do, without torchtitan."""

import subprocess
import sys

import pytest
import torch

from tests.runtime.threaded import needs_compiler
from tests.support.plain_blocks import HalvesAndWhole
from torchtitan_cad.planning import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)


@pytest.mark.parametrize(
    "backend",
    [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.matrix])],
    ids=["eager", "compiled"],
)
def test_halves_of_plain_blocks_give_what_the_whole_gives(backend: str | None) -> None:
    HalvesAndWhole(torch.device("cpu"), torch.float32, dim=32, seq_len=64, shape=SHAPE, seed=0).check(backend)


def test_torchtitan_is_not_needed() -> None:
    code = "import sys, tests.support.plain_blocks; print([name for name in sys.modules if name == 'torchtitan'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
