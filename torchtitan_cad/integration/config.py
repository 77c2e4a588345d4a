"""The ``[cad]`` table and the checks that must pass before a job with CAD starts."""

import math
import os
from dataclasses import dataclass
from typing import Literal

from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble, get_schedule_class
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.loading.documents import halves_by_row
from torchtitan_cad.integration.topology import TICK_SCHEDULES, Topology
from torchtitan_cad.planning import AttentionShape, PlanCosts, PlannerConfig, Profile, get_planner
from torchtitan_cad.planning.plan_pair import BACKWARD_MARGIN

SUPPORTED_MODELS = ("llama3", "qwen3")


@dataclass
class Cad:
    tolerance: float | Literal["auto"] = 0.02
    """
    Allowed imbalance: every rank's attention work is at most (1 + tolerance) times the mean. "auto": of every batch the
    one by which a layer takes the least time, by rates that are measured when the job starts: 0 where the exchange is
    hidden, up to 0.5 where it is not. Validation takes 0.02.
    """

    link_bytes_per_second: float | None = None
    """
    What a rank receives from the others per second, for tolerance = "auto". By default measured when the job starts.
    """

    min_shard: int = 128
    """
    Tokens; documents are cut at multiples of it. Multiples of 128, the kernel's tile, keep results bit-identical.
    """

    planner: str = PlannerConfig.planner
    """
    Which planner assigns tasks to ranks: "tiling", "greedy" (the paper's, full key prefixes only), or "home" (nothing
    moves; for measurements).
    """

    profile: str | None = None
    """
    File written by `torchtitan-cad profile` on this kind of device: balance measured kernel times. By default tiles are
    balanced, all of which count the same.
    """

    backward_plan_margin: float = BACKWARD_MARGIN
    """
    With a profile and backward = "resend": plan backward apart from forward where that lowers the predicted max/mean of
    its attention time by more than this; inf never does.
    """

    rank_speeds: list[float] | None = None
    """
    Relative speed of each rank of a CAD group, data-parallel ranks x context-parallel ranks, the latter fastest: a rank
    of speed 0.5 gets half the attention work of one of speed 1. By default all are equal.
    """

    max_recv_queries: int | None = None
    """
    Query tokens that a rank receives from others per plan (one per nano-batch), at most. A batch that cannot be planned
    within it ends the job. By default any number. With max_recv_keys it is also the size at which the buffers of
    transport = "symm_mem" begin, and between nodes end.
    """

    max_recv_keys: int | None = None
    """
    The same for key tokens, which bounds what received keys and values take in memory.
    """

    ranks_per_node: int | None = None
    """
    GPUs of a node (torchrun's --nproc_per_node): plans then avoid traffic between nodes. By default all traffic costs
    the same.
    """

    inter_node_weight: float = PlannerConfig.inter_node_weight
    """
    What a byte between nodes costs over one inside a node, where ranks_per_node is set.
    """

    nano_batches: int = 1
    """
    2: the two halves of every microbatch take turns, and the exchange of one hides behind the other's compute. An even
    number of rows per microbatch is halved by rows, an odd one in the middle of every row. 1: no overlap, needed with
    experts, and with an odd number of rows under tensor parallelism.
    """

    split_kv: bool = True
    """
    Allow tasks with partial key ranges, merged by log-sum-exp. False: every task sees its full key prefix.
    """

    transport: str = "auto"
    """
    How rows travel: "collective" is all_to_all_single over gloo or NCCL; "symm_mem" writes into the peers' memory, on
    CUDA by Triton kernels (NVSHMEM between nodes), on CPU for tests. "auto": symm_mem on CUDA where a trial succeeds.
    """

    kernel: str = "auto"
    """
    Attention kernel: "varlen" is PyTorch's built-in FlashAttention-2 (CUDA), "flash_attn" FlashAttention-3, 4 or 2 as
    installed and made for the GPU, "cpu" an exact kernel for CPU ranks. "auto": on CUDA FlashAttention-3 or 4 if it is
    installed and a trial gives what varlen gives, otherwise varlen.
    """

    backward: str = "resend"
    """
    "resend": Q, K and V travel again for backward. "keep": servers keep what they received (faster, more memory).
    """

    documents: str = "eos"
    """
    What attends to itself: "eos" ends a document after every EOS token (batches may carry "document_ids" instead);
    "row" makes every row of the batch one document, the plain causal mask.
    """

    heartbeat_seconds: float = 1.0
    """
    Interval of the sign of life by which a failed run names the peer at fault; five without one mean it is gone.
    """

    traceback: bool = False
    """
    Show the stacks of errors that end the job, which `-m torchtitan_cad.train` otherwise reports in one line. Given on
    the command line it also holds for errors in the configuration itself.
    """

    def planner_config(self, topology: Topology | None = None) -> PlannerConfig:
        """The planner's view of this table, for the CAD groups of ``topology``; by default for one group, without TP.

        Raises:
            ValueError: a value the planner cannot work with; names key, value and remedy.
        """
        ranks_per_node = self.ranks_per_node
        if ranks_per_node is not None and topology is not None:
            ranks_per_node = topology.group_ranks_per_node(ranks_per_node)
        try:
            get_planner(self.planner)
            return PlannerConfig(
                tolerance=PlannerConfig.tolerance if self.tolerance == "auto" else self.tolerance,
                min_shard=self.min_shard,
                split_kv=self.split_kv,
                planner=self.planner,
                rank_speeds=None if self.rank_speeds is None else tuple(self.rank_speeds),
                max_recv_queries=self.max_recv_queries,
                max_recv_keys=self.max_recv_keys,
                ranks_per_node=ranks_per_node,
                inter_node_weight=self.inter_node_weight,
            )
        except ValueError as error:
            raise ValueError(f"cad.{error}") from None

    def read_profile(self) -> Profile | None:
        """The measured profile, None without one.

        Raises:
            ValueError: a file that cannot be read or planned with; names key, value and remedy.
        """
        if self.profile is None:
            return None
        try:
            profile = Profile.read(self.profile)
        except ValueError as error:
            raise ValueError(f"cad.profile = {self.profile!r}: {error}; or leave cad.profile out") from None
        if self.min_shard % profile.tile:
            raise ValueError(
                f"cad.min_shard = {self.min_shard} is not a multiple of {profile.tile}, the tile of cad.profile = "
                f"{self.profile!r}; set cad.min_shard to {-(-self.min_shard // profile.tile) * profile.tile}"
            )
        return profile

    def check_profiled_kernel(self, kernel: str) -> None:
        """Raises ValueError if the profile was measured with another kernel; names key, value and remedy."""
        profile = self.read_profile()
        if profile is not None and profile.kernel != kernel:
            raise ValueError(
                f"cad.profile = {self.profile!r} was measured with kernel {profile.kernel!r}, but the job runs "
                f"{kernel!r}; measure again with `torchtitan-cad profile --kernel {kernel}`"
            )

    def plan_costs(self, shape: AttentionShape, kernel: str) -> PlanCosts | None:
        """What the planners count: times of the profile, None without one. For ``shape``, computed by ``kernel``.

        Raises:
            ValueError: the profile was measured for something else; names key, value and remedy.
        """
        profile = self.read_profile()
        if profile is None:
            return None
        self.check_profiled_kernel(kernel)
        try:
            forward, backward = (profile.cost_model(direction, shape) for direction in ("forward", "backward"))
        except ValueError as error:
            raise ValueError(f"cad.profile = {self.profile!r}: {error}") from None
        # What servers keep is what the forward plan brought them, so backward follows that plan.
        return PlanCosts(forward, backward if self.backward == "resend" else None, self.backward_plan_margin)


def validate(config: JobConfig, world_size: int | None = None) -> None:
    """Checks everything that can be known before process groups exist.

    Args:
        config: the parsed job config, with ``parallelism.cad`` on.
        world_size: number of ranks; by default read from the launcher's WORLD_SIZE, or the NGPU of torchtitan's dry
            runs, skipped if that is not set.

    Raises:
        ValueError: names the TOML key, the value, and what to set instead.
    """
    cad: Cad = config.cad
    parallelism, training = config.parallelism, config.training
    if config.model.name not in SUPPORTED_MODELS:
        raise ValueError(
            f"parallelism.cad = true is not supported with model.name = {config.model.name!r}: "
            f"set model.name to one of {', '.join(SUPPORTED_MODELS)}, or parallelism.cad to false"
        )
    cad.planner_config()
    cad.read_profile()
    if not cad.backward_plan_margin >= 0:
        raise ValueError(f"cad.backward_plan_margin = {cad.backward_plan_margin}: set a number from 0, such as 0.02")
    _one_of("cad.transport", cad.transport, ("auto", "symm_mem", "collective"))
    _one_of("cad.kernel", cad.kernel, ("auto", "varlen", "flash_attn", "cpu"))
    _one_of("cad.backward", cad.backward, ("resend", "keep"))
    _one_of("cad.documents", cad.documents, ("eos", "row"))
    _one_of("cad.nano_batches", cad.nano_batches, (1, 2))
    if cad.link_bytes_per_second is not None and not 0 < cad.link_bytes_per_second < math.inf:
        raise ValueError(
            f"cad.link_bytes_per_second = {cad.link_bytes_per_second}: set a positive number, such as 50e9"
        )
    if not 0 < cad.heartbeat_seconds < math.inf:
        raise ValueError(f"cad.heartbeat_seconds = {cad.heartbeat_seconds}: set a positive number, such as 1.0")
    if world_size is None:
        world_size = _launched_ranks(config)
    _check_degrees(config)
    if world_size is not None:
        _check_world_size(config, world_size)
        _check_groups(cad, Topology.from_job(parallelism, world_size))
    _check_batch(config)
    divisor = parallelism.tensor_parallel_degree * 2 * parallelism.context_parallel_degree
    if training.seq_len % divisor:
        raise ValueError(
            f"training.seq_len = {training.seq_len} is not divisible by tensor_parallel_degree x 2 x "
            f"context_parallel_degree = {divisor}; set training.seq_len to {-(-training.seq_len // divisor) * divisor}"
        )
    if config.validation.enable and config.validation.seq_len % divisor:
        raise ValueError(
            f"validation.seq_len = {config.validation.seq_len} is not divisible by {divisor}; "
            f"set validation.seq_len to {-(-config.validation.seq_len // divisor) * divisor}"
        )
    _check_dry_run(config)
    _check_pipeline(config)
    _check_ticks(config)
    _check_nano_batches(config)


def _launched_ranks(config: JobConfig) -> int | None:
    if config.comm.mode == "default":
        ranks = os.environ.get("WORLD_SIZE", "")
        return int(ranks) if ranks else None
    ranks = os.environ.get("NGPU", "")
    if not ranks.isdecimal():
        raise ValueError(
            f"comm.mode = {config.comm.mode!r} plays one rank of a larger job: set the environment variable NGPU "
            f"(it is {ranks!r}) to its number of ranks, or comm.mode to 'default'"
        )
    return int(ranks)


def _one_of(key: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{key} = {value!r}: set {key} to one of: {choices}")


def _check_batch(config: JobConfig) -> None:
    training = config.training
    if training.local_batch_size < 1:
        raise ValueError(f"training.local_batch_size = {training.local_batch_size}: set a positive integer")
    if training.global_batch_size > 0 and training.global_batch_size % training.local_batch_size:
        raise ValueError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of "
            f"training.local_batch_size = {training.local_batch_size}; "
            "set it to a multiple of that times the data-parallel degree, or to -1"
        )


def _check_pipeline(config: JobConfig) -> None:
    parallelism, batch = config.parallelism, config.training.local_batch_size
    if parallelism.pipeline_parallel_microbatch_size < 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size = {parallelism.pipeline_parallel_microbatch_size}: "
            "set a positive integer"
        )
    if parallelism.pipeline_parallel_degree > 1 and not parallelism.pipeline_parallel_schedule_csv:
        _check_schedule(config)
    if parallelism.pipeline_parallel_degree > 1 and batch % parallelism.pipeline_parallel_microbatch_size:
        raise ValueError(
            f"training.local_batch_size = {batch} is not divisible by parallelism.pipeline_parallel_microbatch_size = "
            f"{parallelism.pipeline_parallel_microbatch_size}; set the latter to a divisor of {batch}"
        )
    if config.validation.enable and parallelism.pipeline_parallel_degree > 1:
        rows, microbatches = config.validation.local_batch_size, batch // parallelism.pipeline_parallel_microbatch_size
        if rows % microbatches:
            raise ValueError(
                f"validation.local_batch_size = {rows} does not split into the pipeline's {microbatches} microbatches; "
                f"set it to a multiple of {microbatches}"
            )


def _check_dry_run(config: JobConfig) -> None:
    """torchtitan's own dry runs end with an error inside torch where there are stages."""
    mode, pp = config.comm.mode, config.parallelism.pipeline_parallel_degree
    if mode != "default" and pp > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {pp}: comm.mode = {mode!r} cannot play a pipeline, whose stages "
            "ask each other for shapes; set parallelism.pipeline_parallel_degree to 1"
        )


def _check_schedule(config: JobConfig) -> None:
    parallelism = config.parallelism
    schedule = parallelism.pipeline_parallel_schedule
    if schedule in TICK_SCHEDULES:
        return
    try:
        schedule_class = get_schedule_class(schedule)
    except ValueError as error:
        ours = " or ".join(map(repr, TICK_SCHEDULES))
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r}: set it to {ours}, or to one of torch's ({error})"
        ) from None
    if schedule_class is ScheduleDualPipeV and parallelism.pipeline_parallel_expert_parallel_overlap:
        raise ValueError(
            "parallelism.pipeline_parallel_expert_parallel_overlap = true runs forward and backward of "
            f"parallelism.pipeline_parallel_schedule = {schedule!r} in two threads, whose exchanges would mix; "
            "set pipeline_parallel_expert_parallel_overlap to false, or the schedule to another"
        )
    # In both, two consecutive stages share a rank, and torch's eval() asks the later one for gradients.
    if config.validation.enable and schedule_class in (ScheduleDualPipeV, ScheduleZBVZeroBubble):
        raise ValueError(
            f"validation.enable = true: parallelism.pipeline_parallel_schedule = {schedule!r} of torch cannot run "
            "forward alone; set validation.enable to false, or the schedule to another"
        )


def _check_ticks(config: JobConfig) -> None:
    """What schedules in ticks cannot do. As in torchtitan, the schedule has no meaning without a pipeline."""
    parallelism, training, validation = config.parallelism, config.training, config.validation
    schedule, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    if schedule not in TICK_SCHEDULES or pp == 1:
        return
    selected = f"with parallelism.pipeline_parallel_schedule = {schedule!r}"
    if config.cad.backward == "keep":
        raise ValueError(
            f"cad.backward = 'keep' is not possible {selected}: backward meets other microbatches than forward did; "
            "set cad.backward to 'resend'"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule_csv = {parallelism.pipeline_parallel_schedule_csv!r} has no "
            f"meaning {selected}; leave it out"
        )
    if config.activation_checkpoint.mode == "memory_budget":
        raise ValueError(
            f"activation_checkpoint.mode = 'memory_budget' is not available {selected}: ranks that serve must know "
            "which attention is recomputed; set activation_checkpoint.mode to 'full', 'selective' or 'none'"
        )
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if microbatches == 1:
        logger.warning(
            f"training.local_batch_size = {training.local_batch_size} is one microbatch, so the {pp} stages take turns "
            f"{selected}; set it to {2 * pp * parallelism.pipeline_parallel_microbatch_size} or more, or "
            "parallelism.pipeline_parallel_microbatch_size lower"
        )
    if schedule == "CADInterleaved1F1B" and microbatches % pp:
        raise ValueError(
            f"training.local_batch_size = {training.local_batch_size} makes {microbatches} microbatches, not a "
            f"multiple of parallelism.pipeline_parallel_degree = {pp}, {selected}; set it to a multiple of "
            f"{pp * parallelism.pipeline_parallel_microbatch_size}, or the schedule to 'CAD1F1B'"
        )
    if validation.enable:
        for key in ("local_batch_size", "seq_len"):
            if getattr(validation, key) != getattr(training, key):
                raise ValueError(
                    f"validation.{key} = {getattr(validation, key)} differs from training.{key} = "
                    f"{getattr(training, key)} {selected}; set validation.{key} to {getattr(training, key)}"
                )


def _check_nano_batches(config: JobConfig) -> None:
    """Under TP, ranks hold contiguous parts of every row, which cannot be halved in the middle without moving them."""
    parallelism, batch = config.parallelism, config.training.local_batch_size
    if config.cad.nano_batches == 1 or parallelism.tensor_parallel_degree == 1:
        return
    rows = {"training.local_batch_size": batch}
    if parallelism.pipeline_parallel_degree > 1:
        rows = {"parallelism.pipeline_parallel_microbatch_size": parallelism.pipeline_parallel_microbatch_size}
    if config.validation.enable:
        microbatches = batch // parallelism.pipeline_parallel_microbatch_size
        parts = microbatches if parallelism.pipeline_parallel_degree > 1 else 1
        rows["validation.local_batch_size"] = config.validation.local_batch_size // parts
    for key, count in rows.items():
        if not halves_by_row(count):
            raise ValueError(
                f"cad.nano_batches = 2 with parallelism.tensor_parallel_degree = {parallelism.tensor_parallel_degree} "
                f"halves microbatches by rows, but {key} makes them {count} rows; "
                f"set {key} such that they are even, or cad.nano_batches to 1"
            )


def _degrees(config: JobConfig) -> dict[str, int]:
    parallelism = config.parallelism
    return {
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }


def _check_degrees(config: JobConfig) -> None:
    for key, degree in _degrees(config).items():
        if degree < 1:
            raise ValueError(f"parallelism.{key} = {degree}: set a positive integer")


def _check_world_size(config: JobConfig, world_size: int) -> None:
    degrees, shard = _degrees(config), config.parallelism.data_parallel_shard_degree
    product = math.prod(degrees.values())
    if world_size % product or (shard > 0 and product * shard != world_size):
        listed = ", ".join(f"parallelism.{key} = {degree}" for key, degree in degrees.items())
        raise ValueError(
            f"{listed}, parallelism.data_parallel_shard_degree = {shard} do not multiply to the {world_size} ranks of "
            "this job; set parallelism.data_parallel_shard_degree to -1 and the others to divisors of the rank count"
        )


def _check_groups(cad: Cad, topology: Topology) -> None:
    cad.planner_config(topology)
    stages = f"pipeline parallel {topology.pp} x " if topology.across_stages else ""
    if cad.rank_speeds is not None and len(cad.rank_speeds) != topology.group_size:
        raise ValueError(
            f"cad.rank_speeds has {len(cad.rank_speeds)} entries for CAD groups of {topology.group_size} ranks "
            f"({stages}data parallel {topology.dp} x context parallel {topology.cp}): set one per rank, or leave it out"
        )
