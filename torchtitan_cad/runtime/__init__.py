"""Executing a plan: transports, kernels, the core-attention operator. Imports torch and planning, never torchtitan."""
