"""Executing a plan: transports, kernels, the core-attention operator."""
