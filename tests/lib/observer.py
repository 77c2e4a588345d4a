# SPDX-License-Identifier: BSD-3-Clause
"""Tells tests of the steps of core attention, and of linear work as they begin.

The package knows nothing of it: what takes the steps is wrapped, once in a process.
"""

import functools
from collections.abc import Callable

from torchtitan_cad.integration.pingpong.loop import _NanoBatch
from torchtitan_cad.runtime.call import AttentionCall
from torchtitan_cad.runtime.engine import CoreAttentionEngine, get_engine

Notice = Callable[[str, int], None]
"""Called with the name of a step and the key of its plan."""


def observe(engine, notice: Notice | None):
    """Tell ``notice`` of an engine's steps, in place of an earlier one."""
    _wrap()
    engine.observer = notice


def note(engine, step: str, key):
    if (notice := getattr(engine, "observer", None)) is not None:
        notice(step, key)


@functools.cache
def _wrap():
    for owner, name, noting in (
        (CoreAttentionEngine, "enter", _enter),
        (AttentionCall, "finish", _finish),
        (AttentionCall, "combine_results", _combine_results),
        (_NanoBatch, "run", _run),
    ):
        method = functools.partialmethod(noting, getattr(owner, name))
        setattr(owner, name, method)


def _enter(engine, original, step, direction, key, *rows):
    note(engine, f"{step}_{direction.name}", key)
    return original(engine, step, direction, key, *rows)


def _finish(call, original):
    note(call.engine, f"finish_{call.direction.name}", call.key)
    return original(call)


def _combine_results(call, original, tasks):
    if call._plan.calls:
        note(call.engine, f"compute_{call.direction.name}", call.key)
    original(call, tasks)


def _run(nano_batch, original, name, *work):
    engine = get_engine(nano_batch.engine)
    key = nano_batch.key
    note(engine, f"{name} forward", key)
    results = original(nano_batch, name, *work)
    last = [x for x in results if x is not None][-1]
    if last.requires_grad:
        last.register_hook(lambda _: note(engine, f"{name} backward", key))
    return results
