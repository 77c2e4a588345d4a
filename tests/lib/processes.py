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
    num_ranks: int, body: Callable[..., Any], *args, timeout_s: float = 60
) -> list[Any]:
    """``body(group, *args)`` in every rank: what each returns, or the exception it raises, or its exit code.

    Args:
        body: a function of a module, so that it can be named to another process.
        timeout_s: after which ranks still at work are killed.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + timeout_s
    processes = {}
    for rank in range(num_ranks):
        pipe, sender = _CONTEXT.Pipe(duplex=False)
        args_of_rank = (rank, num_ranks, store.port, sender, body, args)
        processes[pipe] = _CONTEXT.Process(target=_run, args=args_of_rank, daemon=True)
        processes[pipe].start()
        sender.close()
    results = dict.fromkeys(processes, Failed("still at work"))
    at_work = list(processes)
    try:
        while at_work and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(at_work, left):
                at_work.remove(pipe)
                try:
                    results[pipe] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[pipe].join()
                    results[pipe] = processes[pipe].exitcode
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return list(results.values())


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
