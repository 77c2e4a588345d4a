"""Triton kernels, one concept a file. Only modules that run on a device import this package: it needs triton."""
