# SPDX-License-Identifier: BSD-3-Clause
"""Collectives of tensor parallelism hidden behind the other nano-batch."""
