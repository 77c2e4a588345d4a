# SPDX-License-Identifier: BSD-3-Clause
"""The memory that weights, gradients and optimizer take of the room of a rank, of models in parts."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.room import RankParts, room_of
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.keeping import Checkpointing

HIDDEN = 16
VOCABULARY = 64
LAYERS = 4
ITEMSIZE = 2
DEVICE_BYTES = 1e9
TOKENS = 128


class Part(nn.Module):
    """Some layers of a model; the first part embeds tokens, and the last one has the output."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        if layers.start == 0:
            self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        blocks = {str(layer): nn.Linear(HIDDEN, 3 * HIDDEN) for layer in layers}
        self.layers = nn.ModuleDict(blocks)
        if layers.stop == LAYERS:
            self.output = nn.Linear(HIDDEN, VOCABULARY)


def bytes_of_training(part: Part) -> int:
    """Bytes of this rank's weights, gradients and Adam's moments: four numbers a weight."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in part.parameters())
    return sum(4 * parameter.nbytes for parameter in local)


def used(
    part: Part,
    *,
    shards: int = 1,
    pp: int = 1,
    checkpointing: Sequence[Checkpointing] = ("none",),
    compiles_loss: bool = True,
) -> float:
    job: Any = SimpleNamespace(
        cad=Cad(),
        topology=Topology(pp=pp, dp=shards, cp=1, tp=1),
        shape=AttentionShape(2, 1, 8, ITEMSIZE),
        dtype=torch.bfloat16,
        experts_per_token=0,
        rows=1,
        microbatches=1,
    )
    parts = RankParts(
        [part],
        hidden=HIDDEN,
        vocabulary=VOCABULARY,
        shards=shards,
        row_tokens=TOKENS,
        checkpointing=checkpointing,
        compiles_loss=compiles_loss,
        microbatches_in_flight=1,
    )
    return room_of(parts, job, DEVICE_BYTES).used


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, this one of which is the only one that there is."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("layers", [range(LAYERS), range(1)], ids=str)
def test_sharded_parts_need_what_they_gather_too(layers, mesh):
    """Of a whole model two layers and the output; in a stage all, with gradients in fp32 that are not yet reduced."""
    part = Part(layers)
    if len(layers) == LAYERS:
        gathered = 2 * ITEMSIZE * num_parameters(part.layers["1"])
        gathered += (ITEMSIZE + 4) * num_parameters(part.output)
        pp = 1
    else:
        gathered = (ITEMSIZE + 4) * num_parameters(part)
        pp = 2
    sharded = Part(layers)
    for module in (*sharded.layers.values(), sharded):
        fully_shard(module, mesh=mesh)
    by_room = used(sharded, shards=2, pp=pp) - used(part, pp=pp)
    in_training = bytes_of_training(sharded) - bytes_of_training(part)
    assert in_training < 0
    assert by_room - in_training == gathered


def test_layers_that_are_computed_again_in_turn_need_the_mean():
    part = Part(range(LAYERS))
    kept, again = (used(part, checkpointing=[kind]) for kind in ("none", "full"))
    every_third = used(part, checkpointing=["full", "none", "none"])
    assert again < kept
    assert every_third == pytest.approx((again + 2 * kept) / 3)


def test_a_loss_that_is_not_compiled_needs_fp32_gradients_of_all_logits():
    part = Part(range(LAYERS))
    more = used(part, compiles_loss=False) - used(part)
    assert more == 6 * VOCABULARY * TOKENS


def test_stages_need_together_what_the_model_needs():
    """Of weights, gradients and optimizer; a stage without them needs the rest."""
    nothing = Part(range(1, 1))
    first = Part(range(2))
    last = Part(range(2, LAYERS))
    first_bytes = bytes_of_training(first)
    last_bytes = bytes_of_training(last)
    assert first_bytes + last_bytes == bytes_of_training(Part(range(LAYERS)))
    of_first = used(first, pp=2)
    of_last = used(last, pp=2)
    assert of_first - of_last == first_bytes - last_bytes
    assert used(nothing, pp=2) < min(of_first, of_last)
