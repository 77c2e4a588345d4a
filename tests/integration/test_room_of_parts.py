# SPDX-License-Identifier: BSD-3-Clause
"""The memory that weights, gradients and optimizer take of the room of a rank, of models in parts."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.lib.processes import run_processes, values
from torchtitan_cad.integration.room import RankParts, room_of
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape

HIDDEN, VOCABULARY, LAYERS = 16, 64, 4
ITEMSIZE = 2
DEVICE_BYTES = 1e9


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


def shard(part: Part, group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (group.size(),))
    for block in part.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(part, mesh=mesh)


def bytes_of_training(part: Part) -> int:
    """Bytes of this rank's weights, gradients and Adam's moments, which a step makes."""
    optimizer = torch.optim.AdamW(part.parameters(), foreach=False)
    held = list[Tensor]()
    for parameter in part.parameters():
        parameter.grad = torch.zeros_like(parameter)
        held += [parameter, parameter.grad]
    optimizer.step()
    for state in optimizer.state.values():
        held += [state["exp_avg"], state["exp_avg_sq"]]
    return sum(local(x).nbytes for x in held)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def used(part: Part, *, shards: int, pp: int = 1) -> float:
    job: Any = SimpleNamespace(
        cad=SimpleNamespace(nano_batches=1, receive_buffer_gb=None),
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
        row_tokens=128,
        checkpointing="none",
        microbatches_in_flight=1,
    )
    return room_of(parts, job, DEVICE_BYTES).used


def sharded_and_whole(
    group: dist.ProcessGroup, parts: list[tuple[range, int]]
) -> list[tuple[float, int]]:
    """How much more sharded parts need than whole ones, by the room and in training; of each its layers and stages."""
    found = []
    for layers, pp in parts:
        whole, sharded = Part(layers), Part(layers)
        shard(sharded, group)
        more = used(sharded, shards=group.size(), pp=pp) - used(whole, shards=1, pp=pp)
        found.append((more, bytes_of_training(sharded) - bytes_of_training(whole)))
    return found


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_sharded_parts_need_what_they_gather_too() -> None:
    """Of a whole model two layers; in a stage all, with gradients in fp32 that are not yet reduced."""
    every, first, last = range(LAYERS), range(1), range(1, LAYERS)
    two_layers = 2 * ITEMSIZE * num_parameters(Part(every).layers["0"])
    stages = [(ITEMSIZE + 4) * num_parameters(Part(layers)) for layers in (first, last)]
    parts = [(every, 1), (first, 2), (last, 2)]
    for of_rank in values(run_processes(2, sharded_and_whole, parts)):
        for (by_room, in_training), gathered in zip(
            of_rank, (two_layers, *stages), strict=True
        ):
            assert in_training < 0
            assert by_room == in_training + gathered


def test_stages_need_together_what_the_model_needs() -> None:
    """Of weights, gradients and optimizer; a stage without them needs the rest."""
    nothing = Part(range(1, 1))
    stages = Part(range(2)), Part(range(2, LAYERS))
    of_stages = [used(each, shards=1, pp=2) for each in stages]
    states = [bytes_of_training(each) for each in stages]
    assert sum(states) == bytes_of_training(Part(range(LAYERS)))
    assert of_stages[0] - of_stages[1] == states[0] - states[1]
    assert used(nothing, shards=1, pp=2) < min(of_stages)
