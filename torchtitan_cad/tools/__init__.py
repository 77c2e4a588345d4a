# SPDX-License-Identifier: BSD-3-Clause
"""What no training job imports: the ``torchtitan-cad`` command, its commands, and the simulation behind them.

A command is one module or folder with a function ``run``, whose signature is its command line. All may import the
other rooms; none of those imports this one.
"""
