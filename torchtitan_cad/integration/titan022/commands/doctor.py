"""Would this job run? Asks, one after the other, what a training process asks at its start, without training.

The checks are those of training itself, called by one process that stands for rank 0. What only several ranks or
several hosts can find out is said to be so.
"""

import copy
import dataclasses
import logging
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal

import torch
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools import utils

from torchtitan_cad.integration.loading.documents import DOCUMENT_IDS, document_starts
from torchtitan_cad.integration.session import other_device
from torchtitan_cad.integration.titan022 import plugin
from torchtitan_cad.integration.titan022.checks import SUPPORTED_MODELS
from torchtitan_cad.integration.titan022.folders import (
    check_folders,
    checkpoint_folder,
    nearest_folder,
    resumed_from,
)
from torchtitan_cad.integration.titan022.inputs import SYNTHETIC, load_tokenizer, open_dataset
from torchtitan_cad.integration.titan022.job import attention_shape, document_end
from torchtitan_cad.integration.titan022.manager import CadConfigManager
from torchtitan_cad.integration.titan022.streams import choose_streams
from torchtitan_cad.integration.topology import Topology
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.compile_once import is_compiled
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.runtime.kernels.select import choose_kernel, slower_than_possible
from torchtitan_cad.runtime.transport import expected_transport

PATIENCE_S = 30.0
"""Seconds that a dataset may take to answer: longer than the hub's client takes to find that there is no network."""

ADAM_STATES = 2
"""Tensors that a checkpoint holds beside every parameter."""

_MODULE_KEYS = ("job.custom_config_module", "job.custom-config-module")

_PARSED, _NAMES_MODULE = "a config that can be read", "the config's module"
_CONFIG, _MODEL, _TOKENIZER, _KERNEL = "a config", "a model", "a tokenizer", "a kernel"
"""Names under which checks keep what they found for those that follow."""

Level = Literal["ok", "note", "skip", "FAIL"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: FAIL would end the job, note is worth knowing, skip could not be found out here."""

    level: Level
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5} {self.check:<11} {self.text}"


class _Skip(Exception):
    """Why a check was left out."""


class _Job:
    """The job, and what checks have found of it, for those that come after."""

    def __init__(self, args: Sequence[str], ranks_per_host: int, num_hosts: int) -> None:
        self.args, self.ranks_per_host, self.num_hosts = list(args), ranks_per_host, num_hosts
        self.world_size = ranks_per_host * num_hosts
        self.device = torch.device(utils.device_type, 0)
        self._found: dict[str, Any] = {}

    def keep(self, what: str, value: Any) -> None:
        """Keep ``value`` for the checks that follow, under the name by which they ask for it."""
        self._found[what] = value

    def has(self, what: str) -> bool:
        """Tell whether a check has kept it."""
        return what in self._found

    def needs(self, what: str) -> Any:
        """Return what a check has kept; without it the check that asks is left out."""
        if what not in self._found:
            raise _Skip(f"needs {what} without errors")
        return self._found[what]

    @property
    def config(self) -> JobConfig:
        """As it was read, valid or not."""
        return self._found[_PARSED]

    @property
    def has_cad(self) -> bool:
        return getattr(self.config.parallelism, "cad", False)

    @property
    def cad(self) -> Any:
        """The ``[cad]`` table, if it is of any use."""
        if not self.has_cad:
            raise _Skip("cad is off")
        return self.needs(_CONFIG).cad

    @property
    def spec(self) -> TrainSpec:
        """The model's TrainSpec, if it is one that the job can train."""
        name = self.config.model.name
        if self.has_cad and name not in SUPPORTED_MODELS:
            raise _Skip("needs a model that cad knows")
        return get_train_spec(name)

    @property
    def topology(self) -> Topology:
        return Topology.from_job(self.config.parallelism, self.world_size)

    @property
    def model_args(self) -> Any:
        """Of torchtitan's model, as updated from the config."""
        return self.needs(_MODEL)[0]

    @property
    def shape(self) -> AttentionShape:
        return attention_shape(self.config, self.model_args)


def examine(args: Sequence[str], ranks_per_host: int = 1, num_hosts: int = 1) -> Iterator[Finding]:
    """Examine a job with these arguments of torchtitan on that many ranks.

    Nothing is trained or written, and torchtitan stays as it is.

    Args:
        args: as for `-m torchtitan.train`, `--job.config_file` among them.
    """
    job = _Job(args, ranks_per_host, num_hosts)
    for name, check in _CHECKS.items():
        with _quiet():
            finding = _ask(name, check, job)
        yield finding
        if not job.has(_PARSED):
            return


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines and warnings: a check that fails says the same in a line of its own."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _ask(name: str, check: Callable[[_Job], "Finding | str"], job: _Job) -> Finding:
    try:
        answer = check(job)
    except _Skip as reason:
        answer = Finding("skip", name, str(reason))
    except Exception as error:  # what would end the job is a finding, whatever it is
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        answer = Finding("FAIL", name, text)
    finding = answer if isinstance(answer, Finding) else Finding("ok", name, answer)
    return dataclasses.replace(finding, text=" ".join(finding.text.split()))


def _check_config(job: _Job) -> str:
    _parse(job)
    config, training = job.config, job.config.training
    if job.has_cad:
        plugin.check(config, job.world_size)
    _parallel_dims(config, job.world_size)
    job.keep(_CONFIG, config)
    ranks = f"{job.world_size} ranks" if job.num_hosts == 1 else f"{job.num_hosts} x {job.ranks_per_host} ranks"
    return (
        f"{config.model.name} {config.model.flavor} on {ranks}, {training.steps} steps of "
        f"{training.local_batch_size} x {training.seq_len} tokens a data-parallel rank"
    )


def _parallel_dims(config: JobConfig, world_size: int) -> ParallelDims:
    """As torchtitan's Trainer makes it, with its checks."""
    parallelism = config.parallelism
    return ParallelDims(
        dp_shard=parallelism.data_parallel_shard_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def _parse(job: _Job) -> None:
    """Read the config, whether valid or not. Leaves torchtitan as it is."""
    manager = CadConfigManager()
    toml = manager._maybe_load_toml(job.args) or {}
    on_command_line = any(arg.removeprefix("--").split("=")[0] in _MODULE_KEYS for arg in job.args)
    job.keep(_NAMES_MODULE, on_command_line or bool(toml.get("job", {}).get("custom_config_module")))
    try:
        manager.parse_args(job.args)
    except Exception:
        if manager.config.job.config_file is None:  # not yet replaced by what was read
            raise
    finally:
        plugin.restore()
    job.keep(_PARSED, manager.config)


def _check_cad(job: _Job) -> Finding | str:
    if not job.has_cad:
        text = "off: stock torchtitan; set parallelism.cad = true, or add --parallelism.cad"
        return Finding("note", "cad", text)
    assert job.cad
    topology = job.topology
    if topology.group_size == 1:
        return Finding("note", "cad", "groups of one rank: there is nothing to balance")
    stages = f"pipeline parallel {topology.pp} x " if topology.across_stages else ""
    groups = f"{topology.num_groups * topology.tp} group{'s' if topology.num_groups * topology.tp > 1 else ''}"
    each = [f"{topology.num_groups} pipeline stages"] if topology.num_groups > 1 else []
    each += [f"{topology.tp} tensor-parallel ranks, each for its heads"] if topology.tp > 1 else []
    text = (
        f"{groups} of {topology.group_size} ranks balance attention: {stages}data parallel {topology.dp} x "
        f"context parallel {topology.cp}" + (f", for each of {' and '.join(each)}" if each else "")
    )
    if job.needs(_NAMES_MODULE):
        return text
    module = 'job.custom_config_module = "torchtitan_cad.job_config" is needed for `-m torchtitan.train`'
    return Finding("note", "cad", f"{text}; {module}")


def _check_device(job: _Job) -> Finding | str:
    versions = f"torch {torch.__version__}, torchtitan {version('torchtitan')}"
    if job.device.type == "cpu":
        text = "cpu: no accelerator here, so `-m torchtitan_cad.train` is needed, and nothing is said of GPUs; "
        return Finding("note", "device", text + versions)
    count = utils.device_module.device_count()
    if count < job.ranks_per_host:
        raise ValueError(f"--nproc {job.ranks_per_host}: this machine has {count} devices; set it to {count} or less")
    return f"{count} x {utils.device_module.get_device_name(0)}; {versions}"


def _check_model(job: _Job) -> str:
    model, spec = job.config.model, job.spec
    if model.flavor not in spec.model_args:
        raise _Skip("needs a flavor that is known")
    args = copy.deepcopy(spec.model_args[model.flavor])
    if job.has_cad:
        if job.has(_CONFIG):
            attention_shape(job.config, args)
        args.attn_type = "sdpa"  # as in training, where CAD replaces what torchtitan may refuse
    args.update_from_config(job.config)
    with torch.device("meta"):
        built = spec.model_cls(args)
    num_parameters = sum(parameter.numel() for parameter in built.parameters())
    job.keep(_MODEL, (args, num_parameters))
    heads = f"{args.n_heads} query and {getattr(args, 'n_kv_heads', None) or args.n_heads} key heads"
    mask = spec.model_args[model.flavor].attn_mask_type
    inside = job.config.cad.documents == "eos" if job.has_cad else mask != "causal"
    changed = ", which without cad it would not" if job.has_cad and inside and mask == "causal" else ""
    return (
        f"{num_parameters:,} parameters, {args.n_layers} layers, {heads}; attention stays inside "
        f"{'documents' if inside else 'rows'}{changed}"
    )


def _check_tokenizer(job: _Job) -> str:
    build = job.spec.build_tokenizer_fn
    vocab_size = job.model_args.vocab_size
    if build is None:
        raise _Skip("the model has none")
    tokenizer = load_tokenizer(build, job.config, vocab_size)
    eos_id = document_end(job.config.cad, tokenizer.eos_id) if job.has_cad else tokenizer.eos_id
    job.keep(_TOKENIZER, tokenizer)
    tokens = f"{tokenizer.get_vocab_size()} tokens of the model's {vocab_size}"
    ends = "every row is one document" if eos_id is None else f"a document ends after EOS = {eos_id}"
    return f"{job.config.model.hf_assets_path}: {tokens}, {ends}"


def _check_dataset(job: _Job) -> Finding | str:
    build = job.spec.build_dataloader_fn
    if build is None:
        raise _Skip("the model has none")
    return _look_into("training", job, build)


def _check_validation(job: _Job) -> Finding | str:
    if not job.config.validation.enable:
        raise _Skip("validation.enable is false")
    return _look_into("validation", job, build_text_validation_dataloader)


def _look_into(section: str, job: _Job, build: Callable[..., Any]) -> Finding | str:
    """Draw a batch as the first data-parallel rank would; without a tokenizer only open the data."""
    config, name = job.config, getattr(job.config, section).dataset
    tokenizer: Any = job.needs(_TOKENIZER) if name == SYNTHETIC or job.has(_TOKENIZER) else None
    options = {"dp_world_size": job.topology.dp if job.has(_CONFIG) else 1, "dp_rank": 0, "tokenizer": tokenizer}
    answers: list[Any] = []

    def draw() -> None:
        try:
            loader = open_dataset(section, build, job_config=config, **options)
            answers.append(next(iter(loader))[0] if tokenizer else None)
        except StopIteration:
            answers.append(
                ValueError(f"{section}.dataset = {name!r}: rank 0 gets less than one batch; set a larger one")
            )
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not answers:
        check = "dataset" if section == "training" else section
        return Finding("note", check, f"{name}: no answer in {PATIENCE_S:.0f} s, for which a job would wait as well")
    (inputs,) = answers
    if isinstance(inputs, Exception):
        raise inputs
    if inputs is None:
        return f"{name}: can be opened; what it holds needs a tokenizer without errors"
    eos_id = document_end(config.cad, tokenizer.eos_id) if job.has_cad else tokenizer.eos_id
    starts = document_starts(inputs["input"], eos_id, inputs.get(DOCUMENT_IDS))
    return f"{name}: documents in the first {inputs['input'].numel()} tokens of rank 0: {len(starts)}"


def _check_kernel(job: _Job) -> Finding | str:
    name, shape = job.cad.kernel, job.shape
    kernel, reason = choose_kernel(name, job.device, shape)
    dtype = TORCH_DTYPE_MAP[job.config.training.mixed_precision_param]
    kernel.check(dtype, shape.head_dim)
    job.keep(_KERNEL, kernel)
    heads = f"{shape.num_heads} query and {shape.num_kv_heads} key heads of {shape.head_dim} a rank"
    text = f"{kernel} (cad.kernel = {name!r}: {reason}), {dtype}, {heads}"
    remark = slower_than_possible(kernel, job.device)
    return Finding("note", "kernel", f"{text}; {remark}") if remark else text


def _check_transport(job: _Job) -> str:
    cad, ranks = job.cad, job.topology.group_ranks(0)
    if len(ranks) == 1:
        raise _Skip("groups of one rank exchange nothing")
    hosts = len({rank // job.ranks_per_host for rank in ranks})
    sole_user = not job.config.parallelism.enable_async_tensor_parallel
    chosen, reason = expected_transport(cad.transport, job.device, hosts, sole_user=sole_user)
    expected = "expected: " if chosen == "symm_mem" else ""
    return f"{expected}{chosen} (cad.transport = {cad.transport!r}: {reason})"


def _check_planner(job: _Job) -> Finding | str:
    cad = job.cad
    streams = "traced" if choose_streams(job.config, job.device)[0] else "opaque"
    parts = "no overlap" if cad.nano_batches == 1 else f"halves of every microbatch overlap, streams {streams}"
    text = f"{cad.planner}, tolerance {cad.tolerance}, shards of {cad.min_shard} tokens; nano_batches = "
    text += f"{cad.nano_batches}: {parts}"
    if job.num_hosts > 1 and cad.ranks_per_node is None:
        text += f"; set cad.ranks_per_node = {job.ranks_per_host} to keep traffic inside nodes"
    if is_plain_python():
        return Finding(
            "note", "planner", f"{text}; planning is slow, as numba cannot be imported: install one that can"
        )
    if not is_compiled():
        remark = "is yet to be compiled on this machine: its first job does that, or `torchtitan-cad prepare` before"
        return Finding("note", "planner", f"{text}; the planner {remark}")
    return f"{text}; compiled code is cached"


def _check_profile(job: _Job) -> Finding | str:
    cad = job.cad
    profile = cad.read_profile()
    if profile is None:
        return "none: plans balance tiles of the causal triangle"
    cad.plan_cost(job.shape, job.needs(_KERNEL).name)
    if remark := other_device(cad, profile, job.device):
        return Finding("note", "profile", remark)
    return f"{cad.profile}: plans balance times measured on {profile.device!r} with kernel {profile.kernel!r}"


def _check_memory(job: _Job) -> str:
    cad = job.cad
    each, count = cad.buffer_bytes, BUFFERS_PER_CALL * cad.nano_batches
    return (
        f"with symm_mem a rank has {count} receive buffers of {_size(each)} (cad.receive_buffer_gb); what does not fit "
        "into one travels in several trips"
    )


def _check_checkpoint(job: _Job) -> Finding | str:
    config, checkpoint = job.config, job.config.checkpoint
    check_folders(config)
    if not checkpoint.enable:
        return Finding("note", "checkpoint", "checkpoint.enable is false: nothing is saved, nothing resumed")
    folder, start = checkpoint_folder(config), resumed_from(config)
    begins = f"{folder}: resumes from {start}" if start else f"{folder}: begins anew"
    if not job.has(_MODEL):
        return f"{begins}; what a checkpoint takes is not known without a model"
    _, num_parameters = job.needs(_MODEL)
    free = shutil.disk_usage(nearest_folder(folder)).free
    tensors = 1 if checkpoint.last_save_model_only and checkpoint.interval >= config.training.steps else 1 + ADAM_STATES
    each = num_parameters * TORCH_DTYPE_MAP[config.training.dtype].itemsize * tensors
    if each > free:
        raise ValueError(
            f"job.dump_folder = {config.job.dump_folder!r}: a checkpoint takes {_size(each)}, {_size(free)} are free; "
            "make room, or set it to another disk"
        )
    return f"{begins}; a checkpoint takes about {_size(each)}, {_size(free)} are free"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


_CHECKS: dict[str, Callable[[_Job], Finding | str]] = {
    "config": _check_config,
    "device": _check_device,
    "cad": _check_cad,
    "model": _check_model,
    "tokenizer": _check_tokenizer,
    "dataset": _check_dataset,
    "validation": _check_validation,
    "kernel": _check_kernel,
    "transport": _check_transport,
    "planner": _check_planner,
    "profile": _check_profile,
    "memory": _check_memory,
    "checkpoint": _check_checkpoint,
}
"""In the order of the report."""
