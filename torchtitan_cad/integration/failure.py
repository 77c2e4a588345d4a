"""When training fails, say which peer is at fault."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.session import close_session, current_session
from torchtitan_cad.runtime.errors import PeerError


def name_dead_peers(trainer_cls: Any) -> None:
    """Makes ``trainer_cls.train`` raise a ``PeerError`` that names peers at fault, from whatever error they caused.

    A peer is at fault if it is gone, stopped by itself, or is alive but behind. The first collective to notice is often
    not one of CAD's, and its error names at best an address.
    """
    original_train, original_close = trainer_cls.train, trainer_cls.close

    @functools.wraps(original_train)
    def train(self: Any) -> None:
        monitor = current_session().monitor
        if monitor is None:
            return original_train(self)
        monitor.track_step(lambda: self.step)
        check_before_saving(self.checkpointer)
        try:
            original_train(self)
        except Exception as error:
            self.cad_failed = True
            by_itself = not _may_be_caused_by_a_peer(error)
            monitor.announce_stop(error, by_itself=by_itself)
            if by_itself:
                raise
            logger.exception(
                f"rank {dist.get_rank()} stopped at step {self.step}; looking for the cause among its peers"
            )
            if findings := monitor.diagnose():
                raise PeerError(
                    f"rank {dist.get_rank()} stopped at step {self.step} because {'; '.join(findings)}. "
                    f"Noticed as {type(error).__name__}: {error}"
                ) from error
            raise

    @functools.wraps(original_close)
    def close(self: Any) -> None:
        close_session(failed=getattr(self, "cad_failed", False))
        original_close(self)

    trainer_cls.train, trainer_cls.close = train, close


def check_before_saving(checkpointer: Any) -> None:
    """No checkpoint may hold what was computed after an exchange that failed unnoticed on the device.

    Peers that come to the same checkpoint cannot complete it without this rank.
    """
    original_save, should_save = checkpointer.save, checkpointer._should_save

    @functools.wraps(original_save)
    def save(curr_step: int, last_step: bool = False) -> None:
        if should_save(curr_step, last_step):
            current_session().confirm_exchanges()
        original_save(curr_step, last_step)

    checkpointer.save = save


def _may_be_caused_by_a_peer(error: Exception) -> bool:
    """Communication fails with a RuntimeError or an OSError; other errors are this rank's own."""
    return isinstance(error, RuntimeError | OSError) and not isinstance(error, torch.OutOfMemoryError)
