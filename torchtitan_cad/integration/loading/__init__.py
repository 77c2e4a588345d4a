# SPDX-License-Identifier: BSD-3-Clause
"""Batches with their plans, drawn and planned ahead of training: a step waits while the one after it is planned."""
