# SPDX-License-Identifier: BSD-3-Clause
"""Metrics, summary and pictures of a run."""
