# SPDX-License-Identifier: BSD-3-Clause
"""All ranks of a group as processes with a gloo group: for what threads of one process cannot show.

Processes are forked from a server that has imported this module and run nothing, so starting them costs little.
"""

import multiprocessing as mp
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_cad.runtime.transport import build  # noqa: F401  imported by the server, once

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class Failed(Exception):
    """A rank that ended in another way than by returning."""


def run_processes(
    num_ranks: int, body: Callable[..., Any], *args: object, timeout_s: float = 60
) -> list[Any]:
    """``body(group, *args)`` in every rank: what each returns, or the exception it raises, or its exit code.

    Args:
        body: a function of a module, so that it can be named to another process.
        timeout_s: after which ranks still at work are killed.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(num_ranks):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_run,
            args=(rank, num_ranks, store.port, sender, body, args),
            daemon=True,
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    try:
        return _collect(
            [receiver for _, receiver in ranks],
            [process for process, _ in ranks],
            timeout_s,
        )
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def _collect(
    pipes: list[Connection], processes: list[Any], timeout_s: float
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: list[Any] = [Failed("still at work")] * len(pipes)
    open_pipes = list(pipes)
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(open_pipes, left):
            rank = pipes.index(pipe)
            open_pipes.remove(pipe)
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                results[rank] = processes[rank].exitcode
    return results


def values(results: list[Any]) -> list[Any]:
    """The results, if no rank failed."""
    failures = [
        f"rank {rank}: {result}"
        for rank, result in enumerate(results)
        if isinstance(result, Exception)
    ]
    assert not failures, "\n".join(failures)
    return results


def _run(
    rank: int,
    num_ranks: int,
    port: int,
    pipe: Connection,
    body: Callable[..., Any],
    args: tuple,
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("localhost", port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        result = body(dist.group.WORLD, *args)
        dist.barrier()
    except BaseException as error:
        result = (
            type(error)(str(error))
            if isinstance(error, RuntimeError | ValueError)
            else Failed()
        )
        result.args = (f"{error}\n{traceback.format_exc()}",)
    # tensors too: sent as such, they would be read from this process
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    time.sleep(0.5)  # peers may still be saying why they fail
