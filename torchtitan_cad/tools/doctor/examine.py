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
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any, Literal

import torch
from torchtitan.components.validate import build_validator
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from torchtitan_cad.integration.engines import kernel_shape
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.machine import other_device
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.integration.torchtitan_v0_2 import plugin
from torchtitan_cad.integration.torchtitan_v0_2.checks import choose_streams
from torchtitan_cad.integration.torchtitan_v0_2.folders import (
    check_folders,
    checkpoint_folder,
    nearest_folder,
    resumed_from,
)
from torchtitan_cad.integration.torchtitan_v0_2.inputs import (
    SYNTHETIC,
    load_tokenizer,
    open_dataset,
)
from torchtitan_cad.integration.torchtitan_v0_2.job import (
    attention_dtype,
    attention_kinds,
    cad_table,
    document_rule,
)
from torchtitan_cad.integration.torchtitan_v0_2.job_checks import launched_ranks
from torchtitan_cad.integration.torchtitan_v0_2.manager import quiet, read_config
from torchtitan_cad.integration.torchtitan_v0_2.models import adapter_of, has_experts
from torchtitan_cad.planning.compile_once import is_compiled
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.runtime.kernels.select import choose_kernel, slower_than_possible
from torchtitan_cad.runtime.transport import expected_transport
from torchtitan_cad.runtime.triton.nvshmem_library import lacks_between_hosts
from torchtitan_cad.tools.doctor.defects import defects_met
from torchtitan_cad.tools.simulated_job import build_on_meta, model_args

PATIENCE_S = 30.0
"""seconds: a dataset's to answer, longer than the hub's client takes to find that there is no network."""
SILENCE_S = 2.0
"""seconds: after which the command says what it waits for"""
SAMPLE_TOKENS = 2**16
"""tokens: the most that are drawn from a dataset"""
DRAWING = "doctor draws from a dataset"
"""name of the thread"""
ADAM_STATES = 2
"""tensors: those that a checkpoint holds beside every parameter."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MODULE_LOADING = "CUDA_MODULE_LOADING"
DEFAULT_CONNECTIONS = 8
"""hardware queues of a process, among which CUDA divides its streams"""

DEGREES = {
    "dp_shard": "data_parallel_shard",
    "dp_replicate": "data_parallel_replicate",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}
"""Argument of ``ParallelDims``: key of [parallelism], without ``_degree``."""

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
        names_module: the job names a ``custom_config_module``.
        dims: degrees of parallelism, of a valid config.
        model: its arguments, updated from the config.
    """

    args: list[str]
    ranks_per_host: int | None
    num_hosts: int
    config: Any = None
    names_module: bool = False
    dims: ParallelDims | None = None
    model: Any = None
    num_parameters: int = 0
    tokenizer: Any = None
    kernel: Any = None

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return (self.ranks_per_host or 1) * self.num_hosts

    @property
    def device(self) -> torch.device:
        """The first device of this machine."""
        return torch.device(utils.device_type, 0)

    @property
    def is_valid(self) -> bool:
        """Tell whether the config has no errors."""
        return self.dims is not None

    @property
    def has_cad(self) -> bool:
        """Tell whether ``parallelism.cad`` is on."""
        return getattr(self.config.parallelism, "cad", False)

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
            return get_train_spec(name)
        return None

    @property
    def topology(self) -> Topology:
        """Groups of ranks."""
        return Topology.from_job(self.config.parallelism, self.world_size)

    def kinds(self, model_args: Any) -> tuple[AttentionKind, ...]:
        """Return the kinds of a model's attention in a TP rank. Raises ValueError if TP does not divide the heads."""
        dtype = attention_dtype(self.config, self.topology)
        return attention_kinds(self.config, model_args, dtype)

    def documents(self, tokenizer: Any) -> DocumentRule:
        """Return how documents are told apart."""
        if not self.has_cad:
            return DocumentRule(tokenizer.eos_id)
        return document_rule(self.config.cad, tokenizer.eos_id, self.model.vocab_size)


def examine(
    args: Sequence[str], ranks_per_host: int | None = 1, num_hosts: int = 1
) -> Iterator[Finding]:
    """Examine a job, without training or writing, and leave torchtitan as it is.

    ``args`` are as for `-m torchtitan.train`; ``ranks_per_host`` None: one, and the config's check asks for it.
    """
    job = Job(list(args), ranks_per_host, num_hosts)
    for name, (check, *needs) in CHECKS.items():
        with quiet():  # a check that fails says what log lines and warnings say
            try:
                missing = [reason for need, reason in needs if not getattr(job, need)]
                answer: Answer = ("skip", missing[0]) if missing else check(job)
            except Exception as error:
                # what would end the job is a finding, whatever it is
                answer = (
                    "FAIL",
                    str(error)
                    if type(error) is ValueError
                    else f"{type(error).__name__}: {error}",
                )
        level, text = answer if isinstance(answer, tuple) else ("ok", answer)
        yield Finding(level, name, " ".join(text.split()))
        if job.config is None:
            return


def _check_config(job: Job) -> str:
    job.config, job.names_module = read_config(job.args)
    config = job.config
    training = job.config.training
    parallelism = job.config.parallelism
    degrees = {
        dim: getattr(parallelism, f"{name}_degree") for dim, name in DEGREES.items()
    }
    product = math.prod(
        max(1, degree) for dim, degree in degrees.items() if dim not in ("ep", "etp")
    )
    if job.ranks_per_host is None and job.world_size % product:
        raise ValueError(
            "--nproc: set it to the ranks per node, as torchrun's --nproc_per_node; the job's degrees multiply to "
            f"{product}"
        )
    if config.comm.mode != "default":
        launched_ranks(config)  # of a dry run, which the environment must say
    plugin.check(config, job.world_size)
    # as torchtitan's Trainer makes it, with its checks
    job.dims = ParallelDims(**degrees, world_size=job.world_size)
    ranks = (
        f"{job.world_size} ranks"
        if job.num_hosts == 1
        else f"{job.num_hosts} x {job.ranks_per_host or 1} ranks"
    )
    return (
        f"{config.model.name} {config.model.flavor} on {ranks}, {training.steps} steps of "
        f"{training.local_batch_size} x {training.seq_len} tokens a data-parallel rank"
    )


def _check_device(job: Job) -> Answer:
    versions = f"torch {torch.__version__}, torchtitan {version('torchtitan')}"
    if job.device.type == "cpu":
        text = "cpu: no accelerator here, so `-m torchtitan_cad.train` is needed, and nothing is said of GPUs; "
        return "note", text + versions
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
    groups = f"{topology.num_groups * topology.tp} group{'s' if topology.num_groups * topology.tp > 1 else ''}"
    stages = f"pipeline parallel {topology.pp} x " if topology.across_stages else ""
    dimensions = (
        [f"{topology.num_groups} pipeline stages"] if topology.num_groups > 1 else []
    )
    dimensions += (
        [f"{topology.tp} tensor-parallel ranks, each for its heads"]
        if topology.tp > 1
        else []
    )
    text = f"{groups} of {topology.group_size} ranks balance attention: {stages}data parallel {topology.dp} x "
    text += f"context parallel {topology.cp}" + (
        f", for each of {' and '.join(dimensions)}" if dimensions else ""
    )
    if job.names_module:
        return text
    module = 'job.custom_config_module = "torchtitan_cad.job_config"'
    return "note", f"{text}; {module} is needed for `-m torchtitan.train`"


def _check_model(job: Job) -> Answer:
    model = job.config.model
    spec = job.spec
    if model.flavor not in spec.model_args:
        return "skip", "needs a flavor that is known"
    if job.config.training.seq_len < 1:
        return "skip", "needs rows that have tokens"
    if job.has_cad and job.is_valid:
        job.kinds(spec.model_args[model.flavor])
    if job.has_cad_attention:
        args = model_args(job.config)
    else:
        args = copy.deepcopy(spec.model_args[model.flavor])
        args.update_from_config(job.config)
    built = build_on_meta(job.config, args)
    job.model = args
    job.num_parameters = sum(parameter.numel() for parameter in built.parameters())
    heads = f"{args.n_heads} query and {getattr(args, 'n_kv_heads', None) or args.n_heads} key heads"
    mask = spec.model_args[model.flavor].attn_mask_type
    inside_in_stock = mask != "causal"
    inside = inside_in_stock
    if job.has_cad_attention:
        inside = job.config.cad.documents != "row"
    changed = (
        ", which without cad it would not" if inside and not inside_in_stock else ""
    )
    return (
        f"{job.num_parameters:,} parameters, {args.n_layers} layers, {heads}; attention stays inside "
        f"{'documents' if inside else 'rows'}{changed}"
    )


def _check_stock(job: Job) -> Answer:
    if job.has_cad_attention:
        return "cad makes up for the known defects of torchtitan 0.2.2"
    assert job.dims is not None
    args = job.spec.model_args[job.config.model.flavor]
    defects = defects_met(job.config, args, job.dims)
    if not defects:
        return "this job meets no known defect of torchtitan 0.2.2"
    symptoms = "; ".join(
        f"{defect.symptom} (patches/{defect.patch}.patch)" for defect in defects
    )
    ends = any(defect.level == "FAIL" for defect in defects)
    remedy = "apply the patch, or set parallelism.cad = true" + (
        " without cad.shadow" if job.has_cad else ""
    )
    return "FAIL" if ends else "note", f"{symptoms}: {remedy}"


def _check_tokenizer(job: Job) -> Answer:
    if job.spec.build_tokenizer_fn is None:
        return "skip", "the model has none"
    vocab_size = job.model.vocab_size
    tokenizer = load_tokenizer(job.spec.build_tokenizer_fn, job.config, vocab_size)
    rule = job.documents(tokenizer)
    job.tokenizer = tokenizer
    tokens = f"{tokenizer.get_vocab_size()} tokens of the model's {vocab_size}"
    return f"{job.config.model.hf_assets_path}: {tokens}, {rule.described}"


def _check_dataset(job: Job) -> Answer:
    build = job.spec.build_dataloader_fn
    return (
        ("skip", "the model has none")
        if build is None
        else _look_into("training", job, build)
    )


def _check_validation(job: Job) -> Answer:
    if not job.config.validation.enable:
        return "skip", "validation.enable is false"
    if job.spec.build_validator_fn is None:
        return "skip", "the model has none"
    if job.spec.build_validator_fn is not build_validator:
        return "skip", "the model's TrainSpec builds a validator of its own"
    return _look_into("validation", job, build_text_validation_dataloader)


def _look_into(section: str, job: Job, build: Callable[..., Any]) -> Answer:
    """Draw tokens as the first data-parallel rank would; without a tokenizer only open the data."""
    name = getattr(job.config, section).dataset
    tokenizer = job.tokenizer
    if name == SYNTHETIC and tokenizer is None:
        return "skip", "needs a tokenizer without errors"
    sample = _small_batches(section, job.config)
    dp_world_size = job.topology.dp if job.is_valid else 1
    answers: list[Any] = []

    def draw() -> None:
        try:
            # the last one has the fewest documents
            for rank in sorted({dp_world_size - 1, 0}, reverse=True):
                loader = open_dataset(
                    section,
                    build,
                    job_config=sample,
                    tokenizer=tokenizer,
                    dp_world_size=dp_world_size,
                    dp_rank=rank,
                )
            answers.append(next(iter(loader))[0] if tokenizer else None)
        except StopIteration:
            text = f"{section}.dataset = {name!r}: rank 0 gets less than one batch; set a larger one"
            answers.append(ValueError(text))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=draw, name=DRAWING, daemon=True)
    thread.start()
    thread.join(SILENCE_S)
    if thread.is_alive():
        print(
            f"doctor: waiting for {section}.dataset = {name!r} ...",
            file=sys.stderr,
            flush=True,
        )
        thread.join(PATIENCE_S - SILENCE_S)
    if not answers:
        return (
            "note",
            f"{name}: no answer in {PATIENCE_S:.0f} s, for which a job would wait as well",
        )
    (inputs,) = answers
    if isinstance(inputs, Exception):
        raise inputs
    if inputs is None:
        return f"{name}: can be opened; what it holds needs a tokenizer without errors"
    starts = job.documents(tokenizer).starts(inputs)
    table = getattr(job.config, section)
    drawn = inputs["input"].numel()
    of_batch = table.local_batch_size * table.seq_len
    rest = f"; a batch of its has {of_batch}" if of_batch > drawn else ""
    return (
        f"{name}: documents in the first {drawn} tokens of rank 0: {len(starts)}{rest}"
    )


def is_drawing() -> bool:
    """Tell whether a dataset that gave no answer is still being read, by a thread that no one waits for."""
    return any(thread.name == DRAWING for thread in threading.enumerate())


def _small_batches(section: str, config: Any) -> Any:
    """Return a config with batches of at most ``SAMPLE_TOKENS`` tokens, loaded by this process."""
    small = copy.deepcopy(config)
    table = getattr(small, section)
    table.seq_len = min(max(table.seq_len, 1), SAMPLE_TOKENS)
    table.local_batch_size = min(
        max(table.local_batch_size, 1), SAMPLE_TOKENS // table.seq_len
    )
    table.dataloader.num_workers = 0
    return small


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


def _check_kernel(job: Job) -> Answer:
    name = job.config.cad.kernel
    shape = kernel_shape(job.kinds(job.model))
    dtype = attention_dtype(job.config, job.topology)
    debug = job.config.debug
    with _deterministic_as(debug):
        kernel, reason = choose_kernel(
            name, job.device, shape, timed=not debug.deterministic
        )
        kernel.check(dtype, shape.head_dim, shape.out_dim, shape.window)
    job.kernel = kernel
    heads = f"{shape.num_heads} query and {shape.num_kv_heads} key heads of {shape.head_dim} a rank"
    text = f"{kernel} (cad.kernel = {name!r}: {reason}), {dtype}, {heads}"
    remark = slower_than_possible(kernel, job.device)
    return ("note", f"{text}; {remark}") if remark else text


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
    text = f"expected: {text}; a rank has {buffers} (cad.receive_buffer_gb)"
    lacks = lacks_between_hosts() if chosen == "nvshmem" else []
    if lacks:
        return "note", f"{text}; this machine lacks {', '.join(lacks)}"
    return text


def _check_environment(job: Job) -> Answer:
    """Look at variables of this process that CUDA reads in a job that is started from the same shell."""
    if job.device.type != "cuda":
        return "skip", "CUDA alone reads the variables in question"
    remarks = []
    connections = os.environ.get(CONNECTIONS, "")
    if connections.isdecimal() and int(connections) < DEFAULT_CONNECTIONS:
        remarks.append(
            f"{CONNECTIONS} = {connections}: streams share a hardware queue, in which a put that waits for a peer may "
            "hold back compute; leave it out, or set it to 32"
        )
    degree = job.config.parallelism.pipeline_parallel_degree
    loading = os.environ.get(MODULE_LOADING)
    if degree > 1 and (loading or "").upper() != "EAGER":
        remarks.append(
            f"{MODULE_LOADING} = {loading or 'LAZY, the default'}, with pipeline_parallel_degree = {degree}: a kernel "
            "that is loaded while a receive of NCCL is waiting may wait for it; set it to EAGER"
        )
    return (
        ("note", "; ".join(remarks))
        if remarks
        else "no variable that is known to hold back a job"
    )


def _check_planner(job: Job) -> Answer:
    cad = cad_table(job.config)
    streams = (
        "traced"
        if choose_streams(job.config, job.device, has_experts(job.model))[0]
        else "opaque"
    )
    parts = (
        "no overlap"
        if cad.nano_batches == 1
        else f"halves of every microbatch overlap, streams {streams}"
    )
    measured = (
        " (not measured, as debug.deterministic is true)"
        if cad.tolerance != job.config.cad.tolerance
        else ""
    )
    text = f"{cad.planner}, tolerance {cad.tolerance}{measured}, shards of {cad.min_shard} tokens; nano_batches = "
    text += f"{cad.nano_batches}: {parts}"
    if is_plain_python():
        return (
            "note",
            f"{text}; planning is slow: install a numba that can be imported, and unset NUMBA_DISABLE_JIT",
        )
    if is_compiled():
        return f"{text}; compiled code is cached"
    remark = "is yet to be compiled on this machine: its first job does that, or `torchtitan-cad prepare` before"
    return "note", f"{text}; the planner {remark}"


def _check_profile(job: Job) -> Answer:
    cad = job.config.cad
    profile = cad.read_profile()
    if profile is None:
        return "none: plans balance tiles of the causal triangle"
    if job.kernel is None:
        return "skip", "needs a kernel without errors"
    cad.plan_cost(job.kinds(job.model)[0].shape, job.kernel.name)
    if remark := other_device(cad, profile, job.device):
        return "note", remark
    return f"{cad.profile}: plans balance times measured on {profile.device!r} with kernel {profile.kernel!r}"


def _check_checkpoint(job: Job) -> Answer:
    config = job.config
    checkpoint = job.config.checkpoint
    check_folders(config, job.world_size if job.is_valid else None)
    if not checkpoint.enable:
        return "note", "checkpoint.enable is false: nothing is saved, nothing resumed"
    folder = checkpoint_folder(config)
    start = resumed_from(config)
    begins = f"{folder}: resumes from {start}" if start else f"{folder}: begins anew"
    if job.model is None:
        return f"{begins}; what a checkpoint takes is not known without a model"
    free = shutil.disk_usage(nearest_folder(folder)).free
    tensors = (
        1
        if checkpoint.last_save_model_only
        and checkpoint.interval >= config.training.steps
        else 1 + ADAM_STATES
    )
    size = (
        job.num_parameters * TORCH_DTYPE_MAP[config.training.dtype].itemsize * tensors
    )
    if size > free:
        raise ValueError(
            f"job.dump_folder = {config.job.dump_folder!r}: a checkpoint takes {_size(size)}, {_size(free)} are free; "
            "make room, or set it to another disk"
        )
    return f"{begins}; a checkpoint takes about {_size(size)}, {_size(free)} are free"


def _size(num_bytes: float) -> str:
    return (
        f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
    )


CAD = ("has_cad_attention", "cad is off, or cad.shadow is on")
VALID = ("is_valid", "needs a config without errors")
MODEL = ("model", "needs a model without errors")
SPEC = ("spec", "needs a model that is known")
CHECKS: dict[str, tuple[Any, ...]] = {
    "config": (_check_config,),
    "device": (_check_device,),
    "cad": (_check_cad,),
    "model": (_check_model, SPEC),
    "stock": (_check_stock, VALID, SPEC, MODEL),
    "tokenizer": (_check_tokenizer, SPEC, MODEL),
    "dataset": (_check_dataset, SPEC),
    "validation": (_check_validation, SPEC),
    "kernel": (_check_kernel, CAD, VALID, MODEL),
    "transport": (_check_transport, CAD, VALID),
    "environment": (_check_environment, CAD, VALID),
    "planner": (_check_planner, CAD, VALID),
    "profile": (_check_profile, CAD, VALID, MODEL),
    "checkpoint": (_check_checkpoint,),
}
"""Checks in the order of the report, each with the attributes of ``Job`` that it needs and why it is else left out."""
