# SPDX-License-Identifier: BSD-3-Clause
"""Schedules of a pipeline in ticks, and the core attentions that share a tick."""
