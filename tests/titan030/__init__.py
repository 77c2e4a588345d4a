# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the adapter for torchtitan 0.3.0, which run only where that version is installed (`make test-titan030`)."""
