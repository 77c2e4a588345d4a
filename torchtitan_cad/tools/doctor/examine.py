# SPDX-License-Identifier: BSD-3-Clause
"""Would this job run? A list of checks, each asking what a training process asks at its start, without training.

The checks are those of training itself, called by one process that stands for rank 0. What only several ranks or
several hosts can find out is said to be so.
"""

import copy
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any, Literal

import torch
from torchtitan.components.validate import build_validator
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools import utils

from torchtitan_cad.integration.engines import kernel_shape
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.topology import Topology, degrees_of
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.folders import (
    check_folders,
    checkpoint_folder,
    nearest_folder,
    resumed_from,
)
from torchtitan_cad.integration.torchtitan_v0_2.inputs import SYNTHETIC, load_tokenizer
from torchtitan_cad.integration.torchtitan_v0_2.job import (
    attention_dtype,
    attention_kinds,
    cad_table,
    document_rule,
)
from torchtitan_cad.integration.torchtitan_v0_2.manager import quiet, read_config
from torchtitan_cad.integration.torchtitan_v0_2.models import adapter_of, has_experts
from torchtitan_cad.integration.torchtitan_v0_2.streams import choose_streams
from torchtitan_cad.planning.compile_once import is_compiled
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.kernels.select import choose_kernel, slower_than_possible
from torchtitan_cad.runtime.transport.build import expected_transport
from torchtitan_cad.tools.doctor.sample import first_batch
from torchtitan_cad.tools.simulated_job import build_on_meta, model_args

ADAM_STATES = 2
"""tensors: those that a checkpoint holds beside every parameter."""
DEFAULT_CONNECTIONS = 8
"""hardware queues of a process, among which CUDA divides its streams"""

Level = Literal["ok", "note", "skip", "FAIL"]
Answer = str | tuple[Level, str]
"""Result of a check: a text where all is well, otherwise a level and a text."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: FAIL would end the job, note is worth knowing, skip could not be found out here."""

    level: Level
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5} {self.check:<11} {self.text}"


@dataclasses.dataclass
class Job:
    """The job, and what checks have found of it for those that come after; empty where they found errors.

    Attributes:
        ranks_per_host: None if nobody has said: one.
        config: as it was read, valid or not.
        model: its arguments, updated from the config.
    """

    args: list[str]
    ranks_per_host: int | None
    num_hosts: int
    config: Any = None
    is_valid: bool = False
    model: Any = None
    num_parameters: int = 0
    tokenizer: Any = None

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return (self.ranks_per_host or 1) * self.num_hosts

    @property
    def device(self) -> torch.device:
        """The first device of this machine."""
        return torch.device(utils.device_type, 0)

    @property
    def has_cad(self) -> bool:
        """Tell whether ``parallelism.cad`` is on."""
        return self.config.parallelism.cad

    @property
    def has_cad_attention(self) -> bool:
        """Tell whether CAD attends; with ``cad.shadow`` torchtitan does, and CAD records documents."""
        return self.has_cad and not self.config.cad.shadow

    @property
    def spec(self) -> Any:
        """The model's TrainSpec; None if there is none, or CAD cannot train it."""
        name = self.config.model.name
        if self.has_cad and adapter_of(name) is None:
            return None
        with suppress(ValueError):
            return plugin.registered_spec(self.config)
        return None

    @property
    def topology(self) -> Topology:
        """Groups of ranks."""
        return Topology.from_job(self.config.parallelism, self.world_size)

    def kinds(self, model_args: Any) -> tuple[AttentionKind, ...]:
        """Return the kinds of a model's attention in a TP rank. Raises ValueError if TP does not divide the heads."""
        dtype = attention_dtype(self.config, self.topology)
        return attention_kinds(self.config, model_args, dtype)

    def documents(self) -> DocumentRule:
        """Return how documents are told apart."""
        eos_id = self.tokenizer.eos_id
        if not self.has_cad:
            return DocumentRule(eos_id)
        return document_rule(self.config.cad, eos_id, self.model.vocab_size)


def examine(
    args: Sequence[str], ranks_per_host: int | None = 1, num_hosts: int = 1
) -> Iterator[Finding]:
    """Examine a job, without training or writing, and leave torchtitan as it is.

    ``args`` are as for `-m torchtitan.train`; ``ranks_per_host`` None: one, and the config's check asks for it.
    """
    job = Job(list(args), ranks_per_host, num_hosts)
    for name, (check, *needs) in CHECKS.items():
        answer = _answer(job, check, needs)
        level, text = answer if isinstance(answer, tuple) else ("ok", answer)
        yield Finding(level, name, " ".join(text.split()))
        if job.config is None:
            return


def _answer(
    job: Job, check: Callable[[Job], Answer], needs: list[tuple[str, str]]
) -> Answer:
    """Return what a check says, or why it is left out; an error is a finding, whatever it is."""
    try:
        for attribute, reason in needs:
            if not getattr(job, attribute):
                return "skip", reason
        with quiet():  # a check that fails says what log lines and warnings say
            return check(job)
    except ValueError as error:
        return "FAIL", str(error)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {error}"


def _check_config(job: Job) -> Answer:
    job.config = read_config(job.args)
    config = job.config
    training = config.training
    degrees = math.prod(degrees_of(config.parallelism).values())
    if job.ranks_per_host is None and degrees > 1:
        raise ValueError(
            "--nproc: set it to the ranks per node, as torchrun's --nproc_per_node; the job's degrees multiply to "
            f"{degrees}"
        )
    plugin.check(config, job.world_size)
    job.is_valid = True
    return (
        f"{config.model.name} {config.model.flavor} on {job.world_size} ranks, {training.steps} steps of "
        f"{training.local_batch_size} x {training.seq_len} tokens a data-parallel rank"
    )


def _check_device(job: Job) -> Answer:
    versions = f"torch {torch.__version__}, torchtitan {version('torchtitan')}"
    if job.device.type == "cpu":
        return (
            "note",
            "cpu: no accelerator here, so `-m torchtitan_cad.train` is needed, and nothing is said of GPUs; "
            + versions,
        )
    count = utils.device_module.device_count()
    ranks = job.ranks_per_host or 1
    if count < ranks:
        raise ValueError(
            f"--nproc {ranks}: this machine has {count} devices; set it to {count} or less"
        )
    return f"{count} x {utils.device_module.get_device_name(0)}; {versions}"


def _check_cad(job: Job) -> Answer:
    if not job.has_cad:
        return (
            "note",
            "off: stock torchtitan; set parallelism.cad = true, or add --parallelism.cad",
        )
    if not job.has_cad_attention:
        return "note", "cad.shadow: torchtitan attends, and documents are recorded"
    if not job.is_valid:
        return "skip", VALID[1]
    topology = job.topology
    if topology.group_size == 1:
        return "note", "groups of one rank: there is nothing to balance"
    return (
        f"{topology.num_groups * topology.tp} x {topology.group_size} ranks balance attention: pipeline parallel "
        f"{topology.group_stages} x data parallel {topology.dp} x context parallel {topology.cp}"
    )


def _check_model(job: Job) -> Answer:
    config = job.config
    spec = job.spec
    args = copy.deepcopy(spec.model_args.get(config.model.flavor))
    if args is None:
        return "skip", "needs a flavor that is known"
    if config.training.seq_len < 1:
        return "skip", "needs rows that have tokens"
    if job.has_cad and job.is_valid:
        job.kinds(args)
    stays_inside = "documents" if args.attn_mask_type != "causal" else "rows"
    changes = ""
    if job.has_cad_attention:
        args = model_args(config)
        if stays_inside == "rows" and config.cad.documents != "row":
            stays_inside = "documents"
            changes = ", which without cad it would not"
    else:
        args.update_from_config(config)
    built = build_on_meta(config, args)
    job.model = args
    job.num_parameters = sum(parameter.numel() for parameter in built.parameters())
    return (
        f"{job.num_parameters:,} parameters, {args.n_layers} layers, {args.n_heads} query heads; attention stays "
        f"inside {stays_inside}{changes}"
    )


def _check_tokenizer(job: Job) -> Answer:
    if job.spec.build_tokenizer_fn is None:
        return "skip", "the model has none"
    vocab_size = job.model.vocab_size
    tokenizer = load_tokenizer(job.spec.build_tokenizer_fn, job.config, vocab_size)
    job.tokenizer = tokenizer
    tokens = f"{tokenizer.get_vocab_size()} tokens of the model's {vocab_size}"
    return f"{job.config.model.hf_assets_path}: {tokens}, {job.documents().described}"


def _check_dataset(job: Job) -> Answer:
    if job.spec.build_dataloader_fn is None:
        return "skip", "the model has none"
    return _look_into("training", job, job.spec.build_dataloader_fn)


def _check_validation(job: Job) -> Answer:
    if not job.config.validation.enable:
        return "skip", "validation.enable is false"
    if job.spec.build_validator_fn is not build_validator:
        return "skip", "the model's TrainSpec has none, or one of its own"
    return _look_into("validation", job, build_text_validation_dataloader)


def _look_into(section: str, job: Job, build: Callable[..., Any]) -> Answer:
    """Draw tokens as the first data-parallel rank would; without a tokenizer only open the data."""
    name = getattr(job.config, section).dataset
    if name == SYNTHETIC and job.tokenizer is None:
        return "skip", "needs a tokenizer without errors"
    ranks = job.topology.dp if job.is_valid else 1
    batch = first_batch(
        section, job.config, build, tokenizer=job.tokenizer, ranks=ranks
    )
    if batch is None:
        return "note", f"{name}: no answer yet, for which a job would wait as well"
    if job.tokenizer is None:
        return f"{name}: can be opened; what it holds needs a tokenizer without errors"
    documents = len(job.documents().starts(batch))
    tokens = batch["input"].numel()
    return f"{name}: documents in the first {tokens} tokens of rank 0: {documents}"


def _check_kernel(job: Job) -> Answer:
    name = job.config.cad.kernel
    shape = kernel_shape(job.kinds(job.model))
    dtype = attention_dtype(job.config, job.topology)
    debug = job.config.debug
    with _deterministic_as(debug):
        kernel, reason = choose_kernel(name, job.device, shape)
        kernel.check(dtype, shape)
    heads = f"{shape.num_heads} query and {shape.num_kv_heads} key heads of {shape.head_dim} a rank"
    text = f"{kernel} (cad.kernel = {name!r}: {reason}), {dtype}, {heads}"
    remark = slower_than_possible(kernel, job.device)
    return ("note", f"{text}; {remark}") if remark else text


@contextmanager
def _deterministic_as(debug: Any) -> Iterator[None]:
    """Let torch be as deterministic as the job will be when it takes a kernel."""
    before = torch.get_deterministic_debug_mode()
    if debug.deterministic:
        mode = "warn" if debug.deterministic_warn_only else "error"
        torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _check_transport(job: Job) -> Answer:
    cad = job.config.cad
    ranks = job.topology.group_ranks(0)
    if len(ranks) == 1:
        return "skip", "groups of one rank exchange nothing"
    hosts = len({rank // (job.ranks_per_host or 1) for rank in ranks})
    chosen, reason = expected_transport(cad.transport, job.device, hosts)
    text = f"{chosen} (cad.transport = {cad.transport!r}: {reason})"
    if chosen == "collective":
        return text
    buffers = f"{BUFFERS_PER_CALL * cad.nano_batches} receive buffers of {_size(cad.buffer_bytes)}"
    return f"expected: {text}; a rank has {buffers} (cad.receive_buffer_gb)"


def _check_environment(job: Job) -> Answer:
    """Look at variables of this process that CUDA reads in a job that is started from the same shell."""
    if job.device.type != "cuda":
        return "skip", "CUDA alone reads the variables in question"
    remarks = []
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdecimal() and int(connections) < DEFAULT_CONNECTIONS:
        remarks.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS = {connections}: streams share a hardware queue, in which a put that waits "
            "for a peer may hold back compute; leave it out, or set it to 32"
        )
    degree = job.config.parallelism.pipeline_parallel_degree
    loading = os.environ.get("CUDA_MODULE_LOADING", "LAZY, the default")
    if degree > 1 and loading.upper() != "EAGER":
        remarks.append(
            f"CUDA_MODULE_LOADING = {loading}, with pipeline_parallel_degree = {degree}: a kernel that is loaded while "
            "a receive of NCCL is waiting may wait for it; set it to EAGER"
        )
    if remarks:
        return "note", "; ".join(remarks)
    return "no variable that is known to hold back a job"


def _check_planner(job: Job) -> Answer:
    cad = cad_table(job.config)
    traced, _ = choose_streams(job.config, job.device, has_experts(job.model))
    text = (
        f"{cad.planner}, tolerance {cad.tolerance}, shards of {cad.min_shard} tokens; nano_batches = "
        f"{cad.nano_batches}, streams {'traced' if traced else 'opaque'}"
    )
    if is_plain_python():
        return (
            "note",
            f"{text}; planning is slow: install a numba that can be imported, and unset NUMBA_DISABLE_JIT",
        )
    if is_compiled():
        return f"{text}; compiled code is cached"
    return (
        "note",
        f"{text}; the planner is yet to be compiled on this machine: its first job does that, or "
        "`torchtitan-cad prepare` before",
    )


def _check_checkpoint(job: Job) -> Answer:
    config = job.config
    checkpoint = config.checkpoint
    check_folders(config)
    if not checkpoint.enable:
        return "note", "checkpoint.enable is false: nothing is saved, nothing resumed"
    folder = checkpoint_folder(config)
    start = resumed_from(config)
    begins = f"{folder}: resumes from {start}" if start else f"{folder}: begins anew"
    free = shutil.disk_usage(nearest_folder(folder)).free
    tensors = 1 + ADAM_STATES
    if checkpoint.last_save_model_only and checkpoint.interval >= config.training.steps:
        tensors = 1
    itemsize = TORCH_DTYPE_MAP[config.training.dtype].itemsize
    size = job.num_parameters * itemsize * tensors
    if size > free:
        raise ValueError(
            f"job.dump_folder = {config.job.dump_folder!r}: a checkpoint takes {_size(size)}, {_size(free)} are free; "
            "make room, or set it to another disk"
        )
    return f"{begins}; a checkpoint takes about {_size(size)}, {_size(free)} are free"


def _size(num_bytes: float) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB"


CAD = ("has_cad_attention", "cad is off, or cad.shadow is on")
VALID = ("is_valid", "needs a config without errors")
MODEL = ("model", "needs a model without errors")
SPEC = ("spec", "needs a model that is known")
CHECKS: dict[str, tuple[Any, ...]] = {
    "config": (_check_config,),
    "device": (_check_device,),
    "cad": (_check_cad,),
    "model": (_check_model, SPEC),
    "tokenizer": (_check_tokenizer, SPEC, MODEL),
    "dataset": (_check_dataset, SPEC),
    "validation": (_check_validation, SPEC),
    "kernel": (_check_kernel, CAD, VALID, MODEL),
    "transport": (_check_transport, CAD, VALID),
    "environment": (_check_environment, CAD, VALID),
    "planner": (_check_planner, CAD, VALID),
    "checkpoint": (_check_checkpoint,),
}
"""Checks in the order of the report, each with the attributes of ``Job`` that it needs and why it is else left out."""
