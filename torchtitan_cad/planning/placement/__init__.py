# SPDX-License-Identifier: BSD-3-Clause
"""Placement: which rank should hold which tokens of a batch."""
