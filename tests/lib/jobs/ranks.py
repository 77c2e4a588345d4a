# SPDX-License-Identifier: BSD-3-Clause
"""Forks the ranks of a job from this process, which has imported what they need."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

GRACE_S = 10.0
"""seconds: the time that peers of a failed rank still have, to report why they stop"""


def run_job(
    argv: list[str],
    env: dict[str, str],
    logs: list[str],
    timeout_s: float,
    main: Callable[[list[str]], None],
) -> list[int | None]:
    """Run ``main`` on one rank per log file; return their exit codes, None for those killed at the deadline."""
    pids = []
    try:
        for rank, log in enumerate(logs):
            rank_env = {
                **env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(logs)),
            }
            pid = os.fork()
            if pid == 0:
                _become_rank(main, argv, rank_env, log)
            pids.append(pid)
            # so that a rank dies together with the processes it starts
            os.setpgid(pid, pid)
        return _wait(pids, timeout_s)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _become_rank(
    main: Callable[[list[str]], None], argv: list[str], env: dict[str, str], log: str
) -> NoReturn:
    """Run ``main`` in this forked process and exit with its status."""
    code = 1
    try:
        os.setpgid(0, 0)
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(env)
        main(argv)
        code = 0
    except SystemExit as error:
        code = (
            error.code if isinstance(error.code, int) else int(error.code is not None)
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: Sequence[int], timeout_s: float) -> list[int | None]:
    """Wait for all ranks; the first failure shortens the deadline, since its peers can only run into timeouts."""
    deadline = time.monotonic() + timeout_s
    codes = {}
    failed = False
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid in codes:
                continue
            exited, status = os.waitpid(pid, os.WNOHANG)
            if exited:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if not failed and any(codes.values()):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    return [codes.get(pid) for pid in pids]
