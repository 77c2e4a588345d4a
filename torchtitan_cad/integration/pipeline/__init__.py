# SPDX-License-Identifier: BSD-3-Clause
"""Pipeline schedules in ticks."""
