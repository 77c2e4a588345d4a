# SPDX-License-Identifier: BSD-3-Clause
"""Batches with their plans, drawn and planned one optimizer step ahead."""
