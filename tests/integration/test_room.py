# SPDX-License-Identifier: BSD-3-Clause
"""What a job leaves for rows that servers keep: training and the simulation say the same."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.jobs.simulated import read_job
from torchtitan_cad.integration.room import room_of
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds
from torchtitan_cad.integration.torchtitan_v0_2.room import of_layers, read_parts
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, buffer_bytes
from torchtitan_cad.planning.keeping import FILLED
from torchtitan_cad.tools.simulated_job import build_on_meta, model_args
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
    job: Any = SimpleNamespace(
        cad=config.cad,
        topology=Topology(pp=1, dp=1, cp=1, tp=1),
        kinds=kinds,
        shape=kinds[0].shape,
        dtype=torch.bfloat16,
        experts_per_token=args.moe_args.top_k if hasattr(args, "moe_args") else 0,
        rows=config.training.local_batch_size,
        microbatches=1,
    )
    dims: Any = SimpleNamespace(dp_shard=1, cp=1)
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
    config: Any = SimpleNamespace(activation_checkpoint=section)
    assert of_layers(config) == kinds
