# SPDX-License-Identifier: BSD-3-Clause
"""Tests of whole jobs and their parts, on CPU ranks."""

from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()  # before anything imports torchtitan
