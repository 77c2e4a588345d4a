# SPDX-License-Identifier: BSD-3-Clause
"""Data, tokenizer and model of the examples."""
