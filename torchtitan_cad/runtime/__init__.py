# SPDX-License-Identifier: BSD-3-Clause
"""Executing a plan: transports, kernels, the core-attention operator."""
