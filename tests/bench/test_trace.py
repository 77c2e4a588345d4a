# SPDX-License-Identifier: BSD-3-Clause
"""The picture of a run's traces: what it draws, what it is called, what it refuses."""

import itertools
import json

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.trace import Span, read_spans
from torchtitan_cad.runtime import traced  # noqa: F401  # defines the operators

PHASES = """
0 10 cad/pre 0.nano_batch_0
10 2 cad/exchange forward rows
12 10 cad/pre 0.nano_batch_1
22 2 cad/exchange forward rows
24 6 cad/wait forward rows
30 20 cad/attention
50 1 cad/wait forward rows
"""
"""Milliseconds at which phases begin, and that they take."""


def test_rows_are_in_flight_from_their_start_to_the_end_of_the_wait(tmp_path):
    path = tmp_path / "rank0_trace.json"
    events = [{"ph": "M", "name": "process_name"}]
    for line in PHASES.strip().splitlines():
        begin, length, name = line.split(maxsplit=2)
        span = {"ts": 1e3 * float(begin), "dur": 1e3 * float(length), "name": name}
        events.append({"ph": "X", "cat": "user_annotation", "tid": 1, **span})
    path.write_text(json.dumps({"traceEvents": events}))
    spans = read_spans(path)
    assert [span for span in spans if span.kind == "in flight"] == [
        Span(10, 30, "in flight", 0, "forward rows"),
        Span(22, 51, "in flight", 1, "forward rows"),
    ]
    linear = [span.name for span in spans if span.kind == "linear"]
    assert linear == ["pre 0.nano_batch_0", "pre 0.nano_batch_1"]


def test_backward_linear_work_is_named(tmp_path):
    """In a trace of this torch: two segments with other work between them, whose backward comes in reverse order."""
    first = torch.nn.Linear(8, 8)
    second = torch.nn.Linear(8, 8)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        with record_function("cad/pre 0.nano_batch_0"):
            x = first(torch.ones(4, 8)).relu()
        with record_function("cad/attention"):
            x = x.cumsum(0)
        with record_function("cad/post 0.nano_batch_0"):
            x = second(x).sigmoid()
        x.square().sum().backward()
    path = tmp_path / "rank0_trace.json"
    profiler.export_chrome_trace(str(path))
    spans = [span for span in read_spans(path) if span.kind.startswith("linear")]
    spans.sort(key=lambda span: span.start)
    assert [span.name for span in spans] == [
        "pre 0.nano_batch_0",
        "post 0.nano_batch_0",
        "post 0.nano_batch_0 backward",
        "pre 0.nano_batch_0 backward",
    ]
    for span, following in itertools.pairwise(spans):
        assert span.start < span.end <= following.start
