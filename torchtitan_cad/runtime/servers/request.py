# SPDX-License-Identifier: BSD-3-Clause
"""A kernel call that a joined server, or the rank that asks for it, can compute: rows, tasks, and a direction."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from torchtitan_cad.runtime.directions import BACKWARD, FORWARD, Direction
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    VarlenArgs,
    compute_dtype,
)
from torchtitan_cad.runtime.servers.wire import ServerMessage


@dataclass(frozen=True)
class Request:
    """One kernel call.

    Attributes:
        direction: forward or backward.
        rows: of queries and keys, as in ``directions``.
        args: tasks of the call.
    """

    direction: Direction
    rows: Sequence[Tensor]
    args: VarlenArgs

    def compute(self, kernel: AttentionKernel) -> tuple[Tensor, ...]:
        """Return the results of the call."""
        return self.direction.compute(kernel, self.rows, self.args)

    def accepts(self, results: Sequence[Tensor]) -> bool:
        """Tell whether ``results`` have the shapes of this call's results, and a dtype in which kernels return them."""
        only_shapes = [x.to("meta") for x in self.rows]
        expected = chain(*self.direction.results_like(only_shapes).values())
        dtype = self.rows[0].dtype
        dtypes = {dtype, compute_dtype(dtype)}
        has_shapes = [x.shape for x in results] == [x.shape for x in expected]
        return has_shapes and all(x.dtype in dtypes for x in results)

    def message(self, rows_on_host: Sequence[Tensor]) -> ServerMessage:
        """Return the request as a message."""
        args = self.args
        description = {
            "direction": self.direction.name,
            "cu_q": args.cu_q_host.tolist(),
            "cu_k": args.cu_k_host.tolist(),
            "q_start": args.q_start.tolist(),
            "causal": args.causal,
            "scale": args.scale,
        }
        return ServerMessage("request", description, rows_on_host)

    @classmethod
    def of(cls, message: ServerMessage, device: torch.device) -> "Request":
        """Return the request in a message, with its rows on ``device``.

        Raises ValueError for rows that do not fit its tasks.
        """
        description = dict(message.description)
        directions = {"forward": FORWARD, "backward": BACKWARD}
        direction = directions[description.pop("direction")]
        args = VarlenArgs.from_numpy(device=device, **description)
        rows = [x.to(device, non_blocking=True) for x in message.tensors]
        num_rows = {x.shape[0] for x in rows}
        if not num_rows <= {int(args.cu_q_host[-1]), int(args.cu_k_host[-1])}:
            raise ValueError(f"tasks that do not fit {num_rows} rows")
        return cls(direction, rows, args)
