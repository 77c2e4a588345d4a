"""Bytes that attention rows take on the wire."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torchtitan_cad.planning.text import brief

LSE_BYTES = 4

MAX_ROW_BYTES = 2**20
"""Bytes of one token's queries, all heads, at most: eight times those of 128 heads of 256 elements in float32. With it
the bytes of the longest layouts fit in int64."""


@dataclass(frozen=True)
class AttentionShape:
    """Heads and element size of one attention layer, as one member of the CAD group sees them (after TP).

    Raises:
        ValueError: a value is not a positive integer, num_heads is not a multiple of num_kv_heads, or num_heads x
            head_dim x dtype_bytes exceeds ``MAX_ROW_BYTES``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"attention.{key} = {brief(value)}: set a positive integer")
            if value > MAX_ROW_BYTES:
                raise ValueError(f"attention.{key} = {brief(value)}: set at most {MAX_ROW_BYTES}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_kv_heads = {self.num_kv_heads}: set a divisor of num_heads = {self.num_heads}"
            )
        row_bytes = self.num_heads * self.head_dim * self.dtype_bytes
        if row_bytes > MAX_ROW_BYTES:
            raise ValueError(
                f"attention.num_heads x head_dim x dtype_bytes = {row_bytes}: set values of which a token's queries "
                f"have at most {MAX_ROW_BYTES} bytes"
            )

    @property
    def query_bytes(self) -> int:
        """Bytes per query token served elsewhere, forward: Q there, O and the fp32 log-sum-exp back."""
        return 2 * self.num_heads * self.head_dim * self.dtype_bytes + LSE_BYTES * self.num_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes per key token needed elsewhere, forward: K and V there."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def for_backward(self) -> BackwardShape:
        """Give the same layer the prices of its backward."""
        return BackwardShape(**asdict(self))


@dataclass(frozen=True)
class BackwardShape(AttentionShape):
    """Bytes of an attention layer's backward when servers receive Q, K and V again (``backward = "resend"``)."""

    @property
    def query_bytes(self) -> int:
        """Bytes per query token: dO, Q and the fp32 log-sum-exp and delta there, dQ back."""
        return 3 * self.num_heads * self.head_dim * self.dtype_bytes + 2 * LSE_BYTES * self.num_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes per key token: K and V there, dK and dV back."""
        return 4 * self.num_kv_heads * self.head_dim * self.dtype_bytes
