# SPDX-License-Identifier: BSD-3-Clause
"""Bytes per attention row of every message, from which the prices of plans follow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from torchtitan_cad.planning.model.layout import MAX_TOKENS
from torchtitan_cad.planning.text import brief

LSE_BYTES = 4

ROW_ALIGNMENT = 16
"""bytes: every part of a row starts at a multiple, for any dtype and the widest loads of a GPU."""

MAX_ROW_BYTES = 2**20
"""bytes: maximum of one token's queries, eight times 128 heads of 256 elements in float32. The bytes of the longest
layouts then fit in int64."""


@dataclass(frozen=True)
class AttentionShape:
    """Heads and element size of one attention layer, as one member of the CAD group sees them (after TP).

    Attributes:
        head_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values and outputs; None: as many, see ``out_dim``.
        shared_dim: the last elements of a head of keys, if they are equal in all heads of a token, as the rotary part
            of multi-head latent attention. They travel once per token. 0: there are none.
        window: keys that a query attends to at most, itself included; None: all that come before it.

    Raises:
        ValueError: a value is not a positive integer, num_heads is not a multiple of num_kv_heads, all elements of keys
            are shared, or num_heads x head_dim (or value_dim) x dtype_bytes exceeds ``MAX_ROW_BYTES``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    value_dim: int | None = None
    shared_dim: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is field.default:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"attention.{field.name} = {brief(value)}: set a positive integer"
                )
            most = MAX_TOKENS if field.name == "window" else MAX_ROW_BYTES
            if value > most:
                raise ValueError(
                    f"attention.{field.name} = {brief(value)}: set at most {most}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_kv_heads = {self.num_kv_heads}: set a divisor of num_heads = {self.num_heads}"
            )
        if self.shared_dim >= self.head_dim:
            raise ValueError(
                f"attention.shared_dim = {self.shared_dim}: set less than head_dim = {self.head_dim}"
            )
        for key, dim in (("head_dim", self.head_dim), ("value_dim", self.out_dim)):
            row_bytes = self.num_heads * dim * self.dtype_bytes
            if row_bytes > MAX_ROW_BYTES:
                raise ValueError(
                    f"attention.num_heads x {key} x dtype_bytes = {row_bytes}: set values with a product of at most "
                    f"{MAX_ROW_BYTES}"
                )

    @property
    def out_dim(self) -> int:
        """Elements of a head of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_dim(self) -> int:
        """Elements of a head of keys without those that all heads share."""
        return self.head_dim - self.shared_dim

    @property
    def query_bytes(self) -> int:
        """Bytes per query token served elsewhere, forward: Q there, O and the fp32 log-sum-exp back."""
        rows = RowBytes.of(self)
        return rows.forward_queries + rows.outputs

    @property
    def kv_bytes(self) -> int:
        """Bytes per key token needed elsewhere, forward: K, V and the shared part of K there."""
        return RowBytes.of(self).keys


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row of every message that the engine exchanges for a layer (see docs/how_it_works.md).

    Attributes:
        forward_queries: Q.
        outputs: O and log-sum-exp.
        backward_queries: dO, log-sum-exp, delta and, unless servers keep it, Q.
        query_gradients: dQ.
        keys: K, V and the shared part of K.
        key_gradients: their gradients.
    """

    forward_queries: int
    outputs: int
    backward_queries: int
    query_gradients: int
    keys: int
    key_gradients: int

    @classmethod
    @cache
    def of(cls, shape: AttentionShape, *, keep: bool = False) -> RowBytes:
        """Return the bytes of a row of every message; with ``keep`` servers keep received Q, K and V for backward."""
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads
        element = shape.dtype_bytes
        query = _aligned(heads * shape.head_dim * element)
        output = _aligned(heads * shape.out_dim * element)
        statistic = _aligned(heads * max(LSE_BYTES, element))
        parts = kv_heads * shape.key_dim, kv_heads * shape.out_dim, shape.shared_dim
        keys = sum(_aligned(elements * element) for elements in parts)
        backward = output + (0 if keep else query) + 2 * statistic
        return cls(query, output + statistic, backward, query, keys, keys)

    @property
    def queries_out(self) -> int:
        """Bytes of a row of the widest message that takes queries to servers."""
        return max(self.forward_queries, self.backward_queries)

    @property
    def queries_home(self) -> int:
        """Bytes of a row of the widest message that returns to the homes of queries."""
        return max(self.outputs, self.query_gradients)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
