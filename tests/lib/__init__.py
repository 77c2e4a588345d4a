# SPDX-License-Identifier: BSD-3-Clause
"""Helpers of tests and benches; it imports neither."""
