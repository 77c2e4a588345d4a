# SPDX-License-Identifier: BSD-3-Clause
"""Tells tests of the steps of core attention, and of linear work as they begin.

The package knows nothing of it: what takes the steps is wrapped, once in a process.
"""

import functools
from collections.abc import Callable
from typing import Any

from torchtitan_cad.integration.pingpong.loop import _NanoBatch
from torchtitan_cad.runtime.attend import TaskRunner
from torchtitan_cad.runtime.call import AttentionCall
from torchtitan_cad.runtime.engine import CoreAttentionEngine, get_engine

Notice = Callable[[str, int], None]
"""Called with the name of a step and the key of its plan."""


def observe(engine: CoreAttentionEngine, notice: Notice | None) -> None:
    """Tell ``notice`` of an engine's steps, in place of an earlier one."""
    _wrap()
    engine.observer = notice


def note(engine: CoreAttentionEngine, step: str, key: int) -> None:
    if (notice := getattr(engine, "observer", None)) is not None:
        notice(step, key)


@functools.cache
def _wrap() -> None:
    _replace(CoreAttentionEngine, "enter", _enter)
    _replace(AttentionCall, "finish", _finish)
    _replace(AttentionCall, "combine_results", _combine_results)
    _replace(_NanoBatch, "run", _run)


def _replace(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(
        owner,
        name,
        functools.wraps(original)(
            lambda *args, **kwargs: replacement(original, *args, **kwargs)
        ),
    )


def _enter(
    original: Callable,
    engine: CoreAttentionEngine,
    step: str,
    direction: Any,
    key: int,
    *rows: Any,
) -> int:
    note(engine, f"{step}_{direction.name}", key)
    return original(engine, step, direction, key, *rows)


def _finish(original: Callable, call: AttentionCall) -> Any:
    note(call.engine, f"finish_{call.direction.name}", call.key)
    return original(call)


def _combine_results(
    original: Callable, call: AttentionCall, tasks: TaskRunner
) -> None:
    if call._plan.calls:
        note(call.engine, f"compute_{call.direction.name}", call.key)
    original(call, tasks)


def _run(original: Callable, nano_batch: _NanoBatch, name: str, *work: Any) -> Any:
    engine = get_engine(nano_batch.engine)
    key = nano_batch.key
    note(engine, f"{name} forward", key)
    results = original(nano_batch, name, *work)
    last = [x for x in results if x is not None][-1]
    if last.requires_grad:
        last.register_hook(lambda _: note(engine, f"{name} backward", key))
    return results
