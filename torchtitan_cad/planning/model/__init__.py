# SPDX-License-Identifier: BSD-3-Clause
"""Inputs and results of planning: layouts, tasks, bytes, costs, limits and options."""
