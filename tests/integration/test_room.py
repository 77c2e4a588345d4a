# SPDX-License-Identifier: BSD-3-Clause
"""What a job leaves for rows that servers keep: training and the simulation say the same."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from tests.lib.sets import CONFIGS  # noqa: E402
from torchtitan_cad.integration.topology import Topology  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.job import attention_kinds  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.model import update_without_cp  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.room import read_room  # noqa: E402
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, buffer_bytes  # noqa: E402
from torchtitan_cad.planning.keeping import FILLED  # noqa: E402
from torchtitan_cad.tools.simulated_job import build_on_meta, read_simulated_job  # noqa: E402
from torchtitan_cad.tools.simulation.batches import draw_batches  # noqa: E402
from torchtitan_cad.tools.simulation.costs import Costs  # noqa: E402
from torchtitan_cad.tools.simulation.inputs import Documents, Rates  # noqa: E402
from torchtitan_cad.tools.simulation.memory import kept_bytes_per_call  # noqa: E402
from torchtitan_cad.tools.simulation.step import Step  # noqa: E402

DEVICE_BYTES = 64e9
JOBS = {
    "dense": (),
    "experts": ("--model.name=deepseek_v3", "--model.flavor=debugmodel"),
    "two nano-batches, op": (
        "--cad.nano_batches=2",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "full": ("--activation_checkpoint.mode=full",),
    "full, attention kept": (
        "--activation_checkpoint.mode=full",
        "--cad.no-recompute_attention",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_training_leaves_as_much_room_as_the_simulation_says(name):
    written = read_simulated_job(
        [f"--job.config_file={CONFIGS / 'llama3_debug_cpu.toml'}", *JOBS[name]], 1
    )
    config, configuration = written.config, written.configuration
    documents = Documents(
        written.lengths, written.row_tokens, written.step_tokens, batches=1
    )
    cluster = dataclasses.replace(written.cluster, memory=FILLED * DEVICE_BYTES)
    step = Step(
        Costs(written.model, cluster, Rates()),
        draw_batches(documents)[0],
        configuration,
    )
    buffers = (
        configuration.nano_batches
        * BUFFERS_PER_CALL
        * buffer_bytes(None, configuration.nano_batches)
    )
    simulated = kept_bytes_per_call(step, buffers, in_ticks=False)

    args: Any = copy.deepcopy(
        get_train_spec(config.model.name).model_args[config.model.flavor]
    )
    args.attn_type = "sdpa"
    update_without_cp(args.update_from_config, config)
    model: Any = build_on_meta(config, args)
    model.model_args = args
    job: Any = SimpleNamespace(
        cad=config.cad,
        topology=Topology(pp=1, dp=1, cp=1, tp=1),
        kinds=(kinds := attention_kinds(config, args)),
        shape=kinds[0].shape,
        dtype=torch.bfloat16,
        experts_per_token=args.moe_args.top_k if hasattr(args, "moe_args") else 0,
        rows=config.training.local_batch_size,
        microbatches=1,
    )
    room = read_room(
        [model], SimpleNamespace(dp_shard=1, cp=1), config, job, DEVICE_BYTES
    )  # type: ignore[arg-type]
    assert 0 < room.bytes_per_call == pytest.approx(simulated, rel=0.02)
    assert simulated < FILLED * DEVICE_BYTES
