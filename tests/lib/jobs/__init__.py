# SPDX-License-Identifier: BSD-3-Clause
"""Training jobs of tests, on the ranks of this machine."""
