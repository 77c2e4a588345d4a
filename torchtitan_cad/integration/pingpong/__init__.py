# SPDX-License-Identifier: BSD-3-Clause
"""The loop over a model's blocks with two nano-batches."""
