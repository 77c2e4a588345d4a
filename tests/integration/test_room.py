# SPDX-License-Identifier: BSD-3-Clause
"""What a job is said to compute, and to leave of its memory for rows that servers keep."""

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lib.jobs.simulated import read_job
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.room import RankParts, room_of
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds
from torchtitan_cad.integration.torchtitan_v0_2.room import of_layers, read_parts
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, buffer_bytes
from torchtitan_cad.planning.keeping import FILLED, Checkpointing
from torchtitan_cad.planning.model.work import attention_flops
from torchtitan_cad.tools.simulated_job import SimulatedJob, build_on_meta, model_args
from torchtitan_cad.tools.simulation.batches import draw_batches
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.inputs import Rates
from torchtitan_cad.tools.simulation.memory import kept_bytes_per_call
from torchtitan_cad.tools.simulation.step import Step

DEVICE_BYTES = 64e9
JOBS = {
    "experts": ("--model.name=deepseek_v3", "--model.flavor=debugmodel"),
    "two nano-batches, op": (
        "--cad.nano_batches=2",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "full, attention kept": (
        "--activation_checkpoint.mode=full",
        "--cad.no-recompute_attention",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_training_leaves_as_much_room_as_the_simulation_says(name):
    written = read_job("llama3_debug_cpu", *JOBS[name], ranks=1)
    config = written.config
    inputs = written.inputs
    configuration = inputs.configuration
    documents = dataclasses.replace(inputs.documents, batches=1)
    cluster = dataclasses.replace(inputs.cluster, memory=FILLED * DEVICE_BYTES)
    costs = Costs(inputs.model, cluster, Rates())
    step = Step(costs, draw_batches(documents)[0], configuration)
    halves = configuration.nano_batches
    buffers = halves * BUFFERS_PER_CALL * buffer_bytes(None, halves)
    simulated = kept_bytes_per_call(step, buffers, in_ticks=False)

    args = model_args(config)
    model = build_on_meta(config, args)
    model.model_args = args
    kinds = attention_kinds(config, args, torch.float32)
    job = SimpleNamespace(
        cad=config.cad,
        topology=Topology(pp=1, dp=1, cp=1, tp=1),
        kinds=kinds,
        shape=kinds[0].shape,
        dtype=torch.bfloat16,
        experts_per_token=args.moe_args.top_k if hasattr(args, "moe_args") else 0,
        rows=config.training.local_batch_size,
        microbatches=1,
    )
    dims = SimpleNamespace(dp_shard=1, cp=1)
    parts = read_parts([model], dims, config, job)
    room = room_of(parts, job, DEVICE_BYTES)
    assert 0 < room.bytes_per_call == pytest.approx(simulated, rel=0.02)
    assert simulated < FILLED * DEVICE_BYTES


@pytest.mark.parametrize(
    ("option", "kinds"),
    [("op", ["selective"]), ("1", ["full"]), ("3", ["full", "none", "none"])],
)
def test_checkpointing_of_every_nth_layer_keeps_all_of_others(option, kinds):
    section = SimpleNamespace(mode="selective", selective_ac_option=option)
    config = SimpleNamespace(activation_checkpoint=section)
    assert of_layers(config) == kinds


# Memory that weights, gradients and optimizer take, of models in parts ------------------------------------------------

HIDDEN = 16
VOCABULARY = 64
LAYERS = 4
ITEMSIZE = 2
TOKENS = 128


class Part(nn.Module):
    """Some layers of a model; the first part embeds tokens, and the last one has the output."""

    def __init__(self, layers):
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
    job = SimpleNamespace(
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


# `cad/mfu(%)`: torchtitan's own count with a row's attention replaced by that of its documents ------------------------

ROW = 4096
MODELS = ("llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss")


def written(model: str, tp: int = 1) -> SimulatedJob:
    return read_job(
        "llama3_debug_cpu",
        f"--model.name={model}",
        "--model.flavor=debugmodel",
        f"--training.seq_len={ROW}",
        f"--parallelism.tensor_parallel_degree={tp}",
        ranks=2,
    )


@pytest.mark.parametrize("name", MODELS)
def test_linear_work_is_what_torchtitan_counts_for_rows_of_no_tokens(name):
    job = written(name)
    args = model_args(job.config)
    model = build_on_meta(job.config, args)
    _, with_rows = args.get_nparams_and_flops(model, ROW)
    _, linear = args.get_nparams_and_flops(model, 0)
    kinds = attention_kinds(job.config, args, torch.float32)
    assert with_rows - attention_flops(kinds, [ROW] * len(kinds)) == linear


@pytest.mark.parametrize("tp", [1, 2])
def test_a_job_counts_all_heads(tp):
    config = written("llama3", tp).config
    whole = written("llama3").config
    args = model_args(config)
    job = SimpleNamespace(
        kinds=attention_kinds(config, args, torch.float32),
        row_tokens=ROW,
        topology=SimpleNamespace(tp=tp),
    )
    of_a_pair = attention_flops(attention_kinds(whole, args, torch.float32), [1])
    assert Job.flops_beside_rows(job, [ROW / 2]) == -ROW / 2 * of_a_pair
