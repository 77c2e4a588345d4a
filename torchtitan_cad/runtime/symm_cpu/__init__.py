"""Symmetric memory of CPU ranks on one Linux host, for tests of the one-sided transport without a GPU."""

from torchtitan_cad.runtime.symm_cpu.extension import load

__all__ = ["load"]
