"""When training fails, say which peer died."""

import functools
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.session import close_session, current_session
from torchtitan_cad.runtime.errors import PeerError


def name_dead_peers(trainer_cls: Any) -> None:
    """Makes ``trainer_cls.train`` raise a ``PeerError`` that names silent peers, from whatever error they caused.

    The first collective to notice a dead peer is often not one of CAD's, and its error names at best an address.
    """
    original_train, original_close = trainer_cls.train, trainer_cls.close

    @functools.wraps(original_train)
    def train(self: Any) -> None:
        try:
            original_train(self)
        except Exception as error:
            logger.exception(f"rank {dist.get_rank()} stopped at step {self.step}; looking for dead peers")
            if silent := current_session().monitor.silent_peers():
                raise PeerError(
                    f"rank {dist.get_rank()} stopped at step {self.step} because {', '.join(silent)} "
                    f"died or hangs; first noticed as: {type(error).__name__}: {error}"
                ) from error
            raise

    @functools.wraps(original_close)
    def close(self: Any) -> None:
        close_session()
        original_close(self)

    trainer_cls.train, trainer_cls.close = train, close
