# SPDX-License-Identifier: BSD-3-Clause
"""Everything that knows names and internals of torchtitan 0.3.0."""
