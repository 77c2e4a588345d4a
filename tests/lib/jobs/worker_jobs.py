# SPDX-License-Identifier: BSD-3-Clause
"""Chooses how workers start; jobs of test_signals.py import it (`custom_import`)."""

import multiprocessing
import os

# torchtitan 0.2.2 has no option for it
if multiprocessing.get_start_method(allow_none=True) is None:
    multiprocessing.set_start_method(os.environ["WORKER_START_METHOD"])
