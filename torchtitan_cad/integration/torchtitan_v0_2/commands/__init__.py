# SPDX-License-Identifier: BSD-3-Clause
"""Reads and runs torchtitan jobs for the commands doctor, compare, simulate and advise."""
