# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run's steps: sums over plans, and the file that ``report`` reads."""
