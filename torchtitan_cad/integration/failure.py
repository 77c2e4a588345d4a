# SPDX-License-Identifier: BSD-3-Clause
"""When training fails, say which peer is at fault."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_cad.integration.errors import CheckpointError, report, tell_launcher
from torchtitan_cad.integration.run_state import run_state
from torchtitan_cad.integration.session import close_session, current_session
from torchtitan_cad.runtime.errors import PeerError, first_sentence
from torchtitan_cad.runtime.signals import ending_on_signals

_BEFORE_END_S = 10.0
_DIVERGED = "Loss is not finite"
"""how torchtitan 0.3.0's error begins that all ranks raise at once; an exchange that has failed may have caused it"""


def name_dead_peers(trainer_cls: Any) -> None:
    """Make ``train`` and ``close`` of a class of trainers those of jobs with CAD; see ``train_and_name_peers``."""
    train = trainer_cls.train
    close = trainer_cls.close
    trainer_cls.train = lambda self: train_and_name_peers(self, partial(train, self))
    trainer_cls.close = lambda self: close_job(partial(close, self))


def train_and_name_peers(trainer: Any, train: Callable[[], None]) -> None:
    """Call ``train``; raises a ``PeerError`` that names peers at fault, from whatever error they caused.

    A peer is at fault if it is gone, stopped by itself, or is alive but behind. The first collective to notice is often
    not one of CAD's, and its error names at best an address.

    Args:
        trainer: has ``step``, ``checkpointer`` and ``metrics_processor``, as torchtitan's do.
        train: trains with it.
    """
    monitor = current_session().monitor
    clock = current_session().engine.clock
    monitor.progress = lambda: (trainer.step, clock.exchanges, clock.phase)
    check_before_saving(trainer.checkpointer)

    def before_end(signal_name: str) -> None:
        monitor.announce_signal(signal_name)
        tell_launcher(f"ended by {signal_name}")
        trainer.metrics_processor.close()

    # Until the job is closed: the launcher may end this process at any time after another one has failed.
    state = run_state()
    state.signals.enter_context(
        ending_on_signals(before_end, _BEFORE_END_S, monitor.launcher)
    )
    try:
        try:
            train()
            # a checkpoint is still being written when data end before the last step, which waits for its own
            future = getattr(trainer.checkpointer, "save_future", None)
            if future is not None:
                future.result()
        except RuntimeError as error:
            if str(error).startswith(_DIVERGED):
                current_session().confirm_exchanges()
                state.own_error = error
            raise
        except CheckpointException as error:
            # no ``Exception``, so torchtitan would not close the job
            raise CheckpointError(trainer.checkpointer.folder, error) from error
    except Exception as error:
        state.has_failed = True
        if monitor.ended_by_signal:  # peers have got it, too; before_end says so
            raise
        rank = dist.get_rank()
        if isinstance(error, CheckpointError) and rank == 0:
            report(error, str(error))  # closing the job takes seconds
        noticed = f"{type(error).__name__}: {first_sentence(error)}"
        tell_launcher(noticed)
        if findings := monitor.find_cause(
            noticed, by_itself=not _may_be_caused_by_a_peer(error)
        ):
            raise PeerError(
                f"rank {rank} stopped at step {trainer.step} because {'; '.join(findings)}. Noticed as {noticed}"
            ) from error
        raise


def close_job(close: Callable[[], None]) -> None:
    """End the session, and call ``close``, which closes the trainer."""
    state = run_state()
    with state.signals:
        close_session(failed=state.has_failed)
        close()


def check_before_saving(checkpointer: Any) -> None:
    """Keep checkpoints from holding what was computed after an exchange that failed unnoticed on the device.

    Peers that come to the same checkpoint cannot complete it without this rank.
    """
    original_save = checkpointer.save
    should_save = getattr(checkpointer, "_should_save", None)

    def save(curr_step: int, last_step: bool = False) -> Any:
        # a manager of the user's own may save at any step
        if should_save is None or should_save(curr_step, last_step):
            current_session().confirm_exchanges()
        return original_save(curr_step, last_step)

    checkpointer.save = save


def _may_be_caused_by_a_peer(error: Exception) -> bool:
    """Communication fails with a RuntimeError or an OSError; other errors are this rank's own, as are those in loading.

    torch raises the one of a worker that was killed anywhere in the main thread.
    """
    if error is run_state().own_error or str(error).startswith("DataLoader worker "):
        return False
    return isinstance(error, RuntimeError | OSError) and not isinstance(
        error, torch.OutOfMemoryError
    )
