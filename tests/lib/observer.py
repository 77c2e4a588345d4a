# SPDX-License-Identifier: BSD-3-Clause
"""Tells tests of the steps of core attention, of linear work and of TP's exchanges as they begin.

The package knows nothing of it: what takes the steps is wrapped, once in a process.
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torchtitan_cad.integration.pingpong.loop import _NanoBatch
from torchtitan_cad.runtime.attend import TaskRunner
from torchtitan_cad.runtime.call import AttentionCall
from torchtitan_cad.runtime.engine import CoreAttentionEngine, get_engine
from torchtitan_cad.runtime.tp_overlap.sequence_parallel import Boundary

Notice = Callable[[str, int], None]
"""Called with the name of a step and the key of its plan."""

_under_way: ContextVar[AttentionCall] = ContextVar("under way")


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
    for name in ("attend_first", "compute", "finish"):
        _replace(AttentionCall, name, _take_step)
    _replace(TaskRunner, "advance", _advance)
    _replace(_NanoBatch, "run", _run)
    _replace(_NanoBatch, "exchange", _exchange)
    _replace(Boundary, "launch", _launch_or_collect)
    _replace(Boundary, "collect", _launch_or_collect)


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


def _take_step(original: Callable, call: AttentionCall) -> Any:
    if original.__name__ != "compute":
        note(call.engine, f"{original.__name__}_{call.direction.name}", call.key)
    with _set(_under_way, call):
        return original(call)


def _advance(original: Callable, tasks: TaskRunner) -> None:
    call = _under_way.get(None)
    if tasks._rounds[0] and call is not None:  # None: a bench's tasks, of no engine
        note(call.engine, f"compute_{call.direction.name}", call.key)
    original(tasks)


def _run(original: Callable, nano_batch: _NanoBatch, name: str, *work: Any) -> Any:
    engine = get_engine(nano_batch.engine)
    key = nano_batch.key
    note(engine, f"{name} forward", key)
    results = original(nano_batch, name, *work)
    last = [
        x
        for x in (results if isinstance(results, tuple) else (results,))
        if x is not None
    ][-1]
    if last.requires_grad:
        last.register_hook(lambda _: note(engine, f"{name} backward", key))
    return results


_exchanging: ContextVar[tuple[CoreAttentionEngine, int]] = ContextVar("exchanging")


def _exchange(original: Callable, nano_batch: _NanoBatch, *args: Any) -> Any:
    with _set(_exchanging, (get_engine(nano_batch.engine), nano_batch.key)):
        return original(nano_batch, *args)


def _launch_or_collect(
    original: Callable, boundary: Boundary, direction: str, *args: Any
) -> Any:
    if not hasattr(boundary, "observed"):
        boundary.observed = _exchanging.get()
    step = "tp_start" if original.__name__ == "launch" else "tp_wait"
    note(boundary.observed[0], f"{step} {direction}", boundary.observed[1])
    return original(boundary, direction, *args)


@contextmanager
def _set(variable: ContextVar, value: Any):
    token = variable.set(value)
    yield
    variable.reset(token)
