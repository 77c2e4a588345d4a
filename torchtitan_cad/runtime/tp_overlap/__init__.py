"""Collectives of tensor parallelism hidden behind the other nano-batch."""
