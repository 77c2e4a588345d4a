# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a test run: torchtitan's own training, whose results are written down at full precision.

Started by harness.py through rank_server.py. Most hooks only observe. `--init-seed` gives every parameter a value that
depends on its name alone, so that runs under different parallelisms start from the same weights without a checkpoint.
"""

import functools
import itertools
import json
import os
import random
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
import torchtitan.components.metrics as titan_metrics  # noqa: E402
import torchtitan.distributed.utils as dist_utils  # noqa: E402
import torchtitan.train as titan_train  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.attention import VarlenAttentionWrapper  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args  # noqa: E402
from torchtitan.models.moe import MoEArgs  # noqa: E402
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args  # noqa: E402

from tests.lib import cpu_memory  # noqa: E402
from tests.lib.jobs import dense_twin, tiny_models  # noqa: E402
from tests.lib.jobs.parameters import initialise, named_parameters, unwrapped, whole  # noqa: E402
from tests.lib.jobs.recording import before_clipping, record_metrics  # noqa: E402
from tests.lib.kernels_reference import dense_attention  # noqa: E402
from tests.lib.observer import observe  # noqa: E402
from tests.lib.plans import random_tasks  # noqa: E402
from tests.lib.texts import text_dataset  # noqa: E402
from torchtitan_cad.integration import session  # noqa: E402
from torchtitan_cad.integration.loading.placement import Placement  # noqa: E402
from torchtitan_cad.integration.session import current_session  # noqa: E402
from torchtitan_cad.planning import LayerTimes, register_planner  # noqa: E402
from torchtitan_cad.runtime.kernels.base import VarlenArgs  # noqa: E402


def main(argv: Sequence[str]) -> None:
    """Train by torchtitan's arguments ``argv[1:]``, with the hooks that ``argv[0]`` names in JSON."""
    hooks, *titan_args = argv
    cpu_memory.install()
    register_datasets()
    add_variants()
    register_flavors()
    tiny_models.register_flavors()
    dense_twin.install()
    register_split_keys_planner()
    attend_to_sharded_heads()
    balance_experts()
    tell_what_changes_its_microbatch()
    record_steps()
    for name, value in json.loads(hooks).items():
        HOOKS[name](value)
    # The final sleep lets other ranks finish before a store hosted by rank 0 disappears; here the harness hosts it.
    titan_train.time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    # The default of parse_args() was bound to this script's sys.argv when torchtitan was imported.
    parse_args = titan_train.ConfigManager.parse_args
    titan_train.ConfigManager.parse_args = functools.partialmethod(
        parse_args, titan_args
    )
    titan_train.main(titan_train.Trainer)
    assert "matplotlib" not in sys.modules, "training draws nothing"


def register_datasets() -> None:
    """Add `packed_documents`, whose lengths span two orders of magnitude, and the names of its variants."""
    rng = random.Random(0)
    lengths = [max(1, int(rng.lognormvariate(2.0, 1.2))) for _ in range(512)]
    packed = DatasetConfig(
        path="packed_documents",
        loader=lambda path: text_dataset(random.Random(path), lengths),
        sample_processor=lambda sample: sample["text"],
    )
    for variant in ("", "_with_ignored_labels", "_with_positions"):
        DATASETS[f"packed_documents{variant}"] = packed


def add_variants() -> None:
    """Batches of `packed_documents_with_ignored_labels` have no labels in the first third of every row, those of
    `packed_documents_with_positions` have positions for RoPE, from the end of every row."""
    iterate = HuggingFaceTextDataset.__iter__

    @functools.wraps(iterate)
    def iterate_variants(self):
        for inputs, labels in iterate(self):
            if self.dataset_name.endswith("_with_ignored_labels"):
                labels = labels.masked_fill(
                    torch.arange(len(labels)) < len(labels) // 3, IGNORE_INDEX
                )
            if self.dataset_name.endswith("_with_positions"):
                inputs["positions"] = torch.arange(len(labels)).flip(0)
            yield inputs, labels

    HuggingFaceTextDataset.__iter__ = iterate_variants


def register_flavors() -> None:
    """Add flavors small enough that starting the processes dominates a run."""
    tiny = functools.partial(
        TransformerModelArgs,
        dim=64,
        n_layers=2,
        n_heads=4,
        vocab_size=288,
        max_seq_len=2048,
    )
    varlen = functools.partial(tiny, attn_type="varlen", attn_mask_type="block_causal")
    llama3_args["tiny_sdpa"] = tiny()
    llama3_args["tiny_sdpa_gqa"] = tiny(n_kv_heads=2)
    llama3_args["tiny_varlen"] = varlen()
    llama3_args["tiny_varlen_gqa"] = varlen(n_kv_heads=2)
    llama3_args["tiny_varlen_8_2"] = varlen(dim=128, n_heads=8, n_kv_heads=2)
    llama3_args["tiny4_varlen"] = varlen(n_layers=4)
    llama3_args["tiny8_varlen"] = varlen(n_layers=8)
    llama3_args["tiny_sdpa_3_heads"] = tiny(dim=96, n_heads=3)
    tiny_qwen3 = functools.partial(
        Qwen3ModelArgs,
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=4,
        head_dim=16,
        hidden_dim=128,
        vocab_size=288,
        attn_type="varlen",
        attn_mask_type="block_causal",
    )
    qwen3_args["tiny_varlen"] = tiny_qwen3()
    qwen3_args["tiny_tied"] = tiny_qwen3(enable_weight_tying=True)
    experts = functools.partial(
        MoEArgs,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        top_k=2,
    )
    moe = functools.partial(tiny_qwen3, moe_enabled=True, moe_inter_dim=32)
    qwen3_args["tiny_moe"] = moe(moe_args=experts(use_grouped_mm=False))
    qwen3_args["tiny_moe_grouped"] = moe(moe_args=experts())


def attend_to_sharded_heads() -> None:
    """Let torchtitan's varlen attention take heads sharded over TP, which qwen3 gives it; it stops with an error."""
    attend = VarlenAttentionWrapper.forward

    @functools.wraps(attend)
    def attend_locally(self, xq, xk, xv, *args, **kwargs):
        if not isinstance(xq, DTensor):
            return attend(self, xq, xk, xv, *args, **kwargs)
        out = attend(self, xq.to_local(), xk.to_local(), xv.to_local(), *args, **kwargs)
        return DTensor.from_local(out, xq.device_mesh, [Shard(1)], run_check=False)

    attend_locally.__module__ = VarlenAttentionWrapper.__module__
    VarlenAttentionWrapper.forward = attend_locally


def balance_experts() -> None:
    """Update the biases of qwen3's experts as torchtitan does those of its other models."""
    qwen3.build_optimizers = build_optimizers_with_moe_load_balancing


def register_split_keys_planner() -> None:
    """Add planner `test_split_keys`: queries and keys are cut anywhere, and servers drawn."""

    @register_planner("test_split_keys")
    def plan(layout, *_):
        return random_tasks(np.random.default_rng(0), layout)


def tell_what_changes_its_microbatch() -> None:
    """Print for every step how many documents go to another microbatch than the one that they were loaded in."""
    choose = Placement.choose

    def microbatches(layouts):
        return {
            (i, doc)
            for i, nanos in enumerate(layouts)
            for nano in nanos
            for doc in nano.docs.tolist()
        }

    @functools.wraps(choose)
    def choose_and_tell(self, loaded, *args):
        placed = choose(self, loaded, *args)
        homes = [microbatch.layouts for microbatch in placed]
        print(
            f"{len(microbatches(homes) - microbatches(loaded))} documents change their microbatch"
        )
        return placed

    Placement.choose = choose_and_tell


def record(name: str) -> Path:
    """The file of this rank for what the harness reads afterwards, such as "grads_rank1.pt"."""
    name = name.format(rank=os.environ["RANK"])
    return Path(os.environ["RECORD_FOLDER"], name)


def record_steps() -> None:
    """Append figures of every logged step, and validation losses, to rank<r>.jsonl."""

    def is_metrics_rank(self):
        rank = titan_metrics._get_metrics_rank(self.parallel_dims, self.job_config)
        return os.environ["RANK"] == str(rank)

    path = record("rank{rank}.jsonl")
    record_metrics(titan_metrics.MetricsProcessor, path, is_metrics_rank)


def record_gradients(step: int) -> None:
    """Save {parameter name: full gradient} of this rank's model parts as they are before clipping at `step`.

    Biases of experts, which have no gradients but are updated by counts of tokens, are saved as they are.
    """

    def save(trainer):
        if trainer.step == step:
            gradients = dict(named_biases(trainer.model_parts))
            for name, parameter in named_parameters(trainer.model_parts):
                if parameter.grad is not None:
                    gradients[name] = whole(parameter.grad)
            torch.save(gradients, record("grads_rank{rank}.pt"))

    before_clipping(titan_train.Trainer, dist_utils, save)


def record_trace(step: int) -> None:
    """Save the engine's steps, the collectives and the most memory of `step` to trace_rank<r>.json."""
    train_step = titan_train.Trainer.train_step

    @functools.wraps(train_step)
    def traced_step(self, *args, **kwargs):
        if self.step != step:
            return train_step(self, *args, **kwargs)
        events = []
        engine = current_session().engine
        observe(engine, lambda name, key: events.append((name, key)))
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True
        ) as profile:
            train_step(self, *args, **kwargs)
        observe(engine, None)
        trace = {
            "events": events,
            "collectives": collectives(profile),
            "peak_bytes": peak_bytes(profile),
        }
        record("trace_rank{rank}.json").write_text(json.dumps(trace))

    titan_train.Trainer.train_step = traced_step


def collectives(profile: torch.profiler.profile) -> list[str]:
    """Names of the c10d operators that ran while profiled, compiled code or not."""
    events = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.name().startswith("c10d::")
    ]
    return [
        event.name() for event in sorted(events, key=lambda event: event.start_ns())
    ]


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Most bytes that were allocated at once while the profiler ran."""
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]"
    )
    return max(itertools.accumulate(num_bytes for _, num_bytes in changes))


class RoundRobinLoader(BaseDataLoader):
    """The batches of several data-parallel ranks, one after the other."""

    def __init__(self, loaders):
        self.loaders = loaders

    def __iter__(self):
        for batches in zip(*self.loaders, strict=True):
            yield from batches

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        raise NotImplementedError("a reference run is not resumed")


def take_turns(degree: int) -> None:
    """Give one process the batches that `degree` data-parallel ranks would get; with gradient accumulation over
    `degree` microbatches its step is theirs."""
    build = llama3.build_text_dataloader

    def build_all(dp_world_size, dp_rank, **kwargs):
        assert dp_world_size == 1
        return RoundRobinLoader(
            [build(dp_world_size=degree, dp_rank=r, **kwargs) for r in range(degree)]
        )

    llama3.build_text_dataloader = build_all


def plant_rates(link: float) -> None:
    """Make sessions measure links of that many bytes per second, and attention that takes 1 ms for a unit of cost."""

    def measure(_compute, _transport, hosts, *, overlaps, **_others):
        return LayerTimes(1e-3, 0.0, link, link, 0.0, overlaps, hosts)

    session.measure_times = measure


def compute_in_fp64(asked: bool) -> None:
    """Everything that is fp32 becomes fp64, and attention is the textbook's. Rotary angles keep their fp32 values."""
    if not asked:
        return
    TORCH_DTYPE_MAP["float32"] = torch.float64
    narrow = torch.Tensor.float
    convert = torch.Tensor.to
    torch.Tensor.float = lambda self: (
        self if self.dtype == torch.float64 else narrow(self)
    )

    def to(self, *args, **kwargs):
        is_narrowed = self.dtype == torch.float64 and torch.float32 in (
            *args,
            *kwargs.values(),
        )
        return self if is_narrowed else convert(self, *args, **kwargs)

    torch.Tensor.to = to

    def attend(self, xq, xk, xv, masks, scale=None):
        cu = masks.cu_seq_q.numpy()
        scale = scale or xq.shape[-1] ** -0.5
        call = VarlenArgs.from_numpy(cu, cu, causal=True, scale=scale)
        return dense_attention(
            *(x.transpose(1, 2).flatten(0, 1) for x in (xq, xk, xv)), call
        )[0]

    attend.__module__ = VarlenAttentionWrapper.__module__
    VarlenAttentionWrapper.forward = attend


def initialise_by_name(seed: int) -> None:
    """After a Trainer is built, set all but norms' weights to N(0, 0.02) from generators seeded by parameters' names.

    torchtitan's own initialisation draws from one stream per rank, so it depends on the parallelism.
    """
    init = titan_train.Trainer.__init__

    def value_of(name, noise):
        # weights of norms, which are 1
        if noise.dim() < 2 and not name.endswith(("bias", "sinks")):
            return None
        # of two experts rounding must not choose the other
        return noise * (0.2 if "router.gate" in name else 0.02)

    @functools.wraps(init)
    def init_then_fill(self, *args, **kwargs):
        init(self, *args, **kwargs)
        initialise(self.model_parts, seed, value_of)

    titan_train.Trainer.__init__ = init_then_fill


def named_biases(model_parts: list[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Biases by which torchtitan balances experts, under their names."""
    buffers = [
        (unwrapped(name), buffer)
        for part in model_parts
        for name, buffer in part.named_buffers()
    ]
    return [(name, buffer) for name, buffer in buffers if name.endswith("expert_bias")]


HOOKS = {
    "grads_at": record_gradients,
    "trace_at": record_trace,
    "init_seed": initialise_by_name,
    "as_dp": take_turns,
    "link": plant_rates,
    "fp64": compute_in_fp64,
}
"""What ``run`` of harness.py asks for by name."""
