# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan_cad: core attention disaggregation (CAD, arXiv 2510.18121) for torchtitan."""

__version__ = "0.1.0"
