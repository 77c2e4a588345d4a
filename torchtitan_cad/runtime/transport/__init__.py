# SPDX-License-Identifier: BSD-3-Clause
"""Transports: how rows travel between the ranks of a CAD group."""
