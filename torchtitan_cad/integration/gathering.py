# SPDX-License-Identifier: BSD-3-Clause
"""Groups of ranks on the host, and gathering what they know: in set-up, and in the planning thread beside training."""

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from torchtitan_cad.runtime.errors import PeerError

T = TypeVar("T")


def new_host_group(ranks: list[int], seconds: float) -> dist.ProcessGroup | None:
    """Return a gloo group of these ranks, this one among them; None if there are no others to talk to.

    Every wait in it is bounded by these ``seconds``. All of the ranks must call it together.
    """
    if len(ranks) == 1:
        return None
    return dist.new_group(
        ranks, timedelta(seconds=seconds), "gloo", use_local_synchronization=True
    )


def gather_objects(value: T, group: dist.ProcessGroup | None, doing: str) -> list[T]:
    """Return the ``value`` of every rank in the order of the group, all of which must call it together.

    Args:
        value: that pickle can copy.
        group: None for this rank alone.
        doing: what a rank that is gone has made fail, as "planning".

    Raises:
        PeerError: a peer is gone.
    """
    if group is None:
        return [value]
    values = [value] * group.size()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise PeerError(f"{doing} failed: {error}") from error
    return values
