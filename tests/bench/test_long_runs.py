# SPDX-License-Identifier: BSD-3-Clause
"""Benches that train jobs for long: what they read from logs."""

import pytest

from bench import by_commit, long_run

LINES = """\
[titan] step:  1  loss:  8.0  memory:  0.00GiB(0.00%)  tps: 1,000  tflops: 0.01
[titan] \x1b[31mstep:  2  \x1b[32mloss:  7.9  \x1b[33mmemory:  0.00GiB  \x1b[34mtps: 2,048  tflops: 0.01
[titan] step:  3  loss:  7.8  memory:  0.00GiB(0.00%)  tps: 512  tflops: 0.01
"""


def test_seconds_of_steps_are_read_from_a_log():
    options = by_commit.Options(("HEAD",), warmup=1, seq_len=1024)
    assert by_commit.step_seconds(LINES, options) == [0.5, 2.0]


def test_distance_from_stock_is_the_largest_of_all_steps():
    stock = {1: 2.0, 2: 2.0, 3: 2.0}
    curve = {1: 2.0, 2: 2.2, 3: 1.0}
    assert long_run.largest_difference(curve, stock, 1, 2) == pytest.approx(0.1)
    assert long_run.largest_difference(curve, stock, 1, 3) == pytest.approx(0.5)
    with pytest.raises(KeyError):
        long_run.largest_difference({1: 2.0}, stock, 1, 2)
