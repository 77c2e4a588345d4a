"""Bad configurations and dead peers: one clear error on every rank, in time, and nothing lost."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.integration.compositions import CAD, COMMON, PLACED
from tests.integration.harness import parse_job, run
from tests.runtime.threaded import needs_linux
from tests.sets import params
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH
from torchtitan_cad.integration.titan022.cpu import enable_cpu
from torchtitan_cad.runtime.errors import PeerError

BAD_CONFIGS = {
    "unknown kernel": (["--cad.kernel=warp"], r"cad\.kernel = 'warp'.*set cad\.kernel"),
    "unknown transport": (["--cad.transport=rdma"], r"cad\.transport = 'rdma'.*set cad\.transport"),
    "unaligned shard": (["--cad.min_shard=0"], r"cad\.min_shard = 0.*set"),
    "too few speeds": (["--cad.rank_speeds", "1.0"], r"cad\.rank_speeds has 1 entries for CAD groups of 2 ranks.*set"),
    "no speed": (["--cad.rank_speeds", "1.0", "0.0"], r"cad\.rank_speeds\[1\] = 0\.0: set"),
    "no buffers": (["--cad.receive_buffer_gb=0"], r"cad\.receive_buffer_gb = 0\.0: set"),
    "uneven nodes": (["--cad.ranks_per_node=3"], r"cad\.ranks_per_node = 3: set .* divides the 2 ranks"),
    "unknown backward": (["--cad.backward=never"], r"cad\.backward = 'never'.*set cad\.backward"),
    "ping-pong of one row under TP": (
        ["--cad.nano_batches=2", "--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=1"],
        r"cad\.nano_batches = 2 .* training\.local_batch_size makes them 1 rows; set training\.local_batch_size",
    ),
    "ping-pong of experts": (
        ["--cad.nano_batches=2", "--model.name=qwen3", "--model.flavor=debugmodel_moe"],
        r"cad\.nano_batches = 2 .* model\.flavor = 'debugmodel_moe'; set cad\.nano_batches to 1",
    ),
    "no microbatch": (["--parallelism.pipeline_parallel_microbatch_size=0"], r"microbatch_size = 0: set"),
    "no context": (["--parallelism.context_parallel_degree=0"], r"context_parallel_degree = 0: set"),
    "uneven accumulation": (["--training.global_batch_size=5"], r"global_batch_size = 5 is not a multiple"),
    "indivisible heads": (
        ["--parallelism.tensor_parallel_degree=2", "--model.flavor=tiny_sdpa_3_heads"],
        r"tensor_parallel_degree = 2 does not divide the 3 query heads",
    ),
    "degrees do not multiply": (
        ["--parallelism.data_parallel_shard_degree=3"],
        r"data_parallel_shard_degree = 3 do not multiply to the 2 ranks",
    ),
}

IN_TICKS = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=CAD1F1B"]
BAD_CONFIGS |= {
    "overlapping DualPipeV": (
        [IN_TICKS[0], "--parallelism.pipeline_parallel_schedule=DualPipeV"],
        r"expert_parallel_overlap = true .*'DualPipeV' .*set pipeline_parallel_expert_parallel_overlap to false",
    ),
    "validating in DualPipeV": (
        [
            IN_TICKS[0],
            "--parallelism.pipeline_parallel_schedule=DualPipeV",
            "--parallelism.no-pipeline-parallel-expert-parallel-overlap",
            "--validation.enable",
        ],
        r"validation\.enable = true: .*'DualPipeV' .*set validation\.enable to false",
    ),
    "validating in ZBVZeroBubble": (
        [IN_TICKS[0], "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--validation.enable"],
        r"validation\.enable = true: .*'ZBVZeroBubble' .*set validation\.enable to false",
    ),
    "synthetic validation": (
        ["--validation.enable", "--validation.dataset=synthetic"],
        r"validation\.dataset = 'synthetic' is not a dataset; set validation\.dataset to one of c4",
    ),
    "ticks without CAD": ([*IN_TICKS, "--parallelism.no-cad"], r"'CAD1F1B' needs parallelism\.cad = true; set that"),
    "ticks and keep": ([*IN_TICKS, "--cad.backward=keep"], r"cad\.backward = 'keep' .*set cad\.backward to 'resend'"),
    "ticks from a file": (
        [*IN_TICKS, "--parallelism.pipeline_parallel_schedule_csv=order.csv"],
        r"pipeline_parallel_schedule_csv = 'order\.csv' .*leave it out",
    ),
    "ticks and memory budget": (
        [*IN_TICKS, "--activation_checkpoint.mode=memory_budget", "--compile.enable"],
        r"activation_checkpoint\.mode = 'memory_budget' .*set activation_checkpoint\.mode to 'full'",
    ),
    "ticks of several stages, microbatches left over": (
        [IN_TICKS[0], "--parallelism.pipeline_parallel_schedule=CADInterleaved1F1B", "--training.local_batch_size=3"],
        r"local_batch_size = 3 makes 3 microbatches.*set it to a multiple of 2",
    ),
    "ticks and other validation rows": (
        [*IN_TICKS, "--validation.enable", "--validation.local_batch_size=4"],
        r"validation\.local_batch_size = 4 differs .*set validation\.local_batch_size to 2",
    ),
    "ticks and shorter validation rows": (
        [*IN_TICKS, "--validation.enable", "--validation.seq_len=128"],
        r"validation\.seq_len = 128 differs .*set validation\.seq_len to 256",
    ),
    "ticks and experts": (
        [*IN_TICKS, "--model.name=qwen3", "--model.flavor=debugmodel_moe"],
        r"'CAD1F1B' .*experts of model\.flavor = 'debugmodel_moe'; set the schedule",
    ),
    "ticks and too many stages": (
        [*IN_TICKS, "--parallelism.pipeline_parallel_layers_per_stage=1"],
        r"layers_per_stage = 1 makes 4 stages, .*needs exactly 2 stages; leave",
    ),
    "unknown schedule": (
        [IN_TICKS[0], "--parallelism.pipeline_parallel_schedule=CAD1f1b"],
        r"pipeline_parallel_schedule = 'CAD1f1b': set it to 'CAD1F1B' or 'CADInterleaved1F1B', or",
    ),
    "more stages than layers": (
        [
            IN_TICKS[0],
            "--parallelism.pipeline_parallel_schedule=CADInterleaved1F1B",
            "--parallelism.pipeline_parallel_first_stage_less_layers=0",
            "--parallelism.pipeline_parallel_last_stage_less_layers=0",
        ],
        r"makes 4 stages of a model with 2 layers .*; set the degree so that there are at most 2 stages",
    ),
    "ticks and a speed too few": (
        [*IN_TICKS, "--cad.rank_speeds", "1.0"],
        r"cad\.rank_speeds has 1 entries for CAD groups of 2 ranks \(pipeline parallel 2 x .*set",
    ),
}

ZERO_BUBBLE = [IN_TICKS[0], "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
TP2, SHARD1 = "--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1"
BAD_CONFIGS |= {
    "compiled with backward in two parts": (
        [*ZERO_BUBBLE, "--compile.enable"],
        r"schedule = 'ZBVZeroBubble' computes .* with compile\.enable = true; set compile\.enable to false",
    ),
    "compiled halves with backward in two parts": (
        [*ZERO_BUBBLE, "--compile.enable", "--cad.nano_batches=2"],
        r"schedule = 'ZBVZeroBubble' computes .* with compile\.enable = true; set compile\.enable to false",
    ),
    "operators kept with backward in two parts": (
        [*ZERO_BUBBLE, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
        r"schedule = 'ZBVZeroBubble' computes .* with .*selective_ac_option = 'op'; set activation_checkpoint\.mode to",
    ),
    "attention kept with backward in two parts": (
        [*ZERO_BUBBLE, "--activation_checkpoint.mode=full", "--cad.no-recompute-attention"],
        r"'ZBVZeroBubble' computes .* with cad\.recompute_attention = false; set activation_checkpoint\.mode to",
    ),
    "compiled TP without shards": (
        [TP2, "--compile.enable"],
        r"compile\.enable = true with parallelism\.tensor_parallel_degree = 2 .*; set compile\.enable to false",
    ),
    "longer validation rows": (
        ["--validation.enable", "--validation.seq_len=512"],
        r"validation\.seq_len = 512 is more than training\.seq_len = 256, .*; set validation\.seq_len to 256",
    ),
    "DDP with TP": (
        [REPLICAS, SHARD1, TP2],
        r"replicate_degree = 2 .* DDP, .*tensor_parallel_degree = 2; set .*replicate_degree to 1",
    ),
    "DDP with PP": (
        [REPLICAS, SHARD1, IN_TICKS[0]],
        r"replicate_degree = 2 .* DDP, .*pipeline_parallel_degree = 2; set .*replicate_degree to 1",
    ),
}

HALVES, COMPILE, TRACED = "--cad.nano_batches=2", "--compile.enable", "--cad.streams=traced"
KEPT = "--cad.no-recompute-attention"
BAD_CONFIGS |= {
    "unknown streams": (["--cad.streams=lanes"], r"cad\.streams = 'lanes': set cad\.streams to one of: 'auto'"),
    "traced without halves": (
        [TRACED, COMPILE],
        r"cad\.streams = 'traced' needs cad\.nano_batches = 2, not 1; set that, or cad\.streams to 'auto'",
    ),
    "traced without compile": (
        [TRACED, HALVES],
        r"cad\.streams = 'traced' needs compile\.enable = true, not false; set that, or cad\.streams to 'auto'",
    ),
    "traced with the loss alone compiled": (
        [TRACED, HALVES, COMPILE, "--compile.components=loss"],
        r"cad\.streams = 'traced' needs 'model' in compile\.components = \['loss'\]; add that",
    ),
    "traced by another compiler": (
        [TRACED, HALVES, COMPILE, "--compile.backend=aot_eager"],
        r"cad\.streams = 'traced' needs compile\.backend = 'inductor', not 'aot_eager'; set that",
    ),
    "traced under TP": (
        [TRACED, HALVES, COMPILE, "--parallelism.tensor_parallel_degree=2"],
        r"cad\.streams = 'traced' needs parallelism\.tensor_parallel_degree = 1, not 2, .*; set that, or cad\.streams",
    ),
    "traced with whole blocks recomputed": (
        [TRACED, HALVES, COMPILE, "--activation_checkpoint.mode=full"],
        r"cad\.streams = 'traced' cannot recompute .* activation_checkpoint\.mode = 'full' .*; set the mode to 'none'",
    ),
    "attention kept in some blocks": (
        ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2", KEPT],
        r"cad\.recompute_attention = false .* 'selective' and selective_ac_option = '2'; set the mode to 'full'",
    ),
    "attention kept within a budget": (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", KEPT],
        r"cad\.recompute_attention = false .*mode = 'memory_budget' .*; set the mode to 'full'",
    ),
    "traced with an order of its own": (
        [TRACED, HALVES, COMPILE, IN_TICKS[0], "--parallelism.pipeline_parallel_schedule_csv=order.csv"],
        r"cad\.streams = 'traced' cannot .*pipeline_parallel_schedule_csv = 'order\.csv' may; leave that out, or cad\.",
    ),
}
if TorchVersion(torch.__version__) < FIRST_TORCH:
    BAD_CONFIGS["traced by an old torch"] = (
        [TRACED, HALVES, COMPILE],
        rf"cad\.streams = 'traced' needs torch {FIRST_TORCH} or newer, not .*; install that, or cad\.streams to 'auto'",
    )


KNOWN_TO_THE_MODEL = (
    "indivisible heads",
    "ping-pong of experts",
    "ticks and experts",
    "ticks and too many stages",
    "more stages than layers",
)
"""Found when the model is built. What is wrong with a configuration alone is found when it is read."""
ON_RANKS = ("unknown kernel", "degrees do not multiply", *KNOWN_TO_THE_MODEL)
ON_FOUR_RANKS = ("DDP with TP", "DDP with PP")
READ = {name: case for name, case in BAD_CONFIGS.items() if name not in KNOWN_TO_THE_MODEL}


@pytest.mark.parametrize("name", READ)
def test_bad_configuration_is_a_value_error_where_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4" if name in ON_FOUR_RANKS else "2")
    args, message = READ[name]
    with pytest.raises(ValueError, match=message):
        parse_job(tmp_path, *args)


@pytest.mark.parametrize("name", params(ON_RANKS, ["unknown kernel", "indivisible heads"]))
def test_bad_configuration_is_one_value_error_on_every_rank(name: str) -> None:
    args, message = BAD_CONFIGS[name]
    run([*CAD, *args], nranks=2, timeout_s=120).assert_refused(message)


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["collective", pytest.param("symm_mem", marks=needs_linux)])
def test_every_other_rank_names_one_that_was_killed(transport: str) -> None:
    """No launcher ends them here, and the harness gives them 10 s (rank_server.GRACE_S)."""
    args = ["--comm.train_timeout_seconds=20", "--cad.heartbeat_seconds=0.5", f"--cad.transport={transport}"]
    killed = run([*COMMON, *PLACED, *args], nranks=4, kill=(2, 2))
    assert killed.returncodes == [1, 1, -9, 1], killed.report()
    for rank in (0, 1, 3):
        message = r"PeerError: rank \d stopped at step 2 because rank 2 \([^)]*\) is gone\. Noticed as"
        assert re.search(message, killed.logs[rank]), killed.report()


class Checkpointer:
    """Saves every third step."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return last_step or curr_step % 3 == 0

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if self._should_save(curr_step, last_step):
            self.saved.append(curr_step)


def test_no_checkpoint_is_made_after_an_exchange_that_failed_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    enable_cpu()
    from torchtitan_cad.integration.titan022 import failure

    looked_at: list[int] = []

    def confirm() -> None:
        looked_at.append(step)
        if step > 5:
            raise PeerError("rank 1 has not sent its rows")

    monkeypatch.setattr(failure, "current_session", lambda: SimpleNamespace(confirm_exchanges=confirm))
    checkpointer = Checkpointer()
    failure.check_before_saving(checkpointer)
    for step in range(1, 6):
        checkpointer.save(step)
    step = 6
    with pytest.raises(PeerError):
        checkpointer.save(step)
    step = 7
    with pytest.raises(PeerError):
        checkpointer.save(step, last_step=True)
    assert looked_at == [3, 6, 7]
    assert checkpointer.saved == [3]
