# SPDX-License-Identifier: BSD-3-Clause
"""The exchange of a plan: rows that servers need, tables of one rank, bytes, messages, kernel calls."""
