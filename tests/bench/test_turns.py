# SPDX-License-Identifier: BSD-3-Clause
"""Turns of jobs that share a machine."""

import threading
import time

from bench.turns import TURN, take_turns


def test_a_step_waits_for_its_turn_and_its_clock_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", clock := time.perf_counter)
    (turn := tmp_path / TURN).write_text("1")
    wait = take_turns(turn)
    threading.Timer(0.2, turn.write_text, ["2"]).start()
    begin = time.perf_counter()
    real = clock()
    wait(1)
    wait(2)
    assert time.perf_counter() - begin < 0.1 < clock() - real
