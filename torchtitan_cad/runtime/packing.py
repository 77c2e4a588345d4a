# SPDX-License-Identifier: BSD-3-Clause
"""Several per-token tensors as one message, with a row of bytes per token.

Messages hold Q, K with V, O with its log-sum-exp, or dO with the softmax statistics. ``hide_storage`` passes a message
of any size through code that needs static shapes, such as a compiled graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cad.planning.model.shape import ROW_ALIGNMENT
from torchtitan_cad.runtime import triton


class _Field(NamedTuple):
    """Bytes of a message row that hold a row of one tensor, contiguous."""

    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype


class RowFormat:
    """Byte layout of a message row, which holds one row of each tensor.

    Args:
        tensors: [N, ...] each; their trailing shapes and dtypes define the row, N does not matter.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.fields: list[_Field] = []
        offset = 0
        for tensor in tensors:
            shape = tensor.shape[1:]
            num_bytes = shape.numel() * tensor.itemsize
            self.fields.append(_Field(offset, num_bytes, shape, tensor.dtype))
            offset += -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self.row_bytes = offset

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowFormat":
        """Return the format of tensors, made once for all like them."""
        key = tuple((x.shape[1:], x.dtype) for x in tensors)
        return _formats.get(key) or _formats.setdefault(key, cls(tensors))

    def pack(
        self,
        tensors: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Gather ``rows`` (int64 [R], None for all) of every tensor into a uint8 message [R, row_bytes]."""
        num_rows = len(tensors[0] if rows is None else rows)
        message = torch.empty(
            num_rows, self.row_bytes, dtype=torch.uint8, device=tensors[0].device
        )
        views = self.unpack(message)
        if triton.runs_on(message.device):
            from torchtitan_cad.runtime.triton.gather import GatheredRows

            nothing = [tensor[:0] for tensor in tensors]
            GatheredRows(tensors, nothing).gather(rows, outs=views)
            return message
        for tensor, view in zip(tensors, views, strict=True):
            view.copy_(tensor if rows is None else tensor.index_select(0, rows))
        return message

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message [R, row_bytes], as strided views [R, ...] of it."""
        tensors = []
        for offset, num_bytes, shape, dtype in self.fields:
            elements = message[:, offset : offset + num_bytes].view(dtype)
            tensors.append(elements.view(message.shape[0], *shape))
        return tensors

    def reveal(self, hidden: Tensor, num_rows: int) -> list[Tensor]:
        """Return the tensors of a message [num_rows, row_bytes] whose storage was hidden (``hide_storage``).

        Raises:
            RuntimeError: the storage was lost because the view was copied by its shape, as by activation offloading.
        """
        if hidden.untyped_storage().nbytes() < num_rows * self.row_bytes:
            raise RuntimeError(
                "servers cannot keep rows where hooks copy saved tensors, such as activation offloading: what one kept "
                "was lost; set cad.backward = 'resend'"
            )
        whole = torch.empty(0, dtype=torch.uint8, device=hidden.device)
        whole.set_(hidden.untyped_storage())
        return self.unpack(
            whole[: num_rows * self.row_bytes].view(num_rows, self.row_bytes)
        )


_formats: dict[object, RowFormat] = {}
"""by trailing shapes and dtypes"""
Message = tuple[Sequence[Tensor], RowFormat]
"""tensors that travel together, and their row format"""


def hide_storage(message: Tensor) -> Tensor:
    """Return an empty view, uint8 [0], whose storage is the whole of a message [R, row_bytes], or of a copy of it.

    A message that lies in a larger storage, such as a receive buffer, is copied.

    The number of received rows differs from plan to plan. Autograd keeps the storage alive as long as the view, and a
    compiled graph sees a tensor of constant shape.
    """
    if message.untyped_storage().nbytes() != message.nbytes:
        message = message.clone()
    return message.view(-1)[:0]
