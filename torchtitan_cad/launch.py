# SPDX-License-Identifier: BSD-3-Clause
"""torchrun, ending in one line: `python -m torchtitan_cad.launch` in place of `torchrun`, with the same arguments.

    python -m torchtitan_cad.launch --nproc_per_node=2 -m torchtitan_cad.train --job.config_file train.toml

When a rank fails, torchrun prints some 35 lines below what the rank has said: the launcher's own traceback, and every
rank's exit. Here they are one line, and the exit code is that of the first rank to fail.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
)

_SIGNAL_EXIT = 128
_MISTAKE_EXIT = 2
"""of argparse, for an option that cannot be"""
_POLL_S = 1.0
_SHUTDOWN_S = 30.0
"""seconds: of torchrun, for which it waits for ranks to end"""
_STUCK_S = 15.0
"""seconds beyond that: torchrun asks ten times a second whether ranks have ended, unless it waits for the rendezvous"""
_ENDED_BY_TORCHRUN = (-signal.SIGTERM, _SIGNAL_EXIT + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun on `arguments`, by default the command line's; return the exit code."""
    # report each rank that is ended because another failed
    for module in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(
            logging.CRITICAL
        )
    options = run.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        ranks_per_node = run.determine_local_world_size(options.nproc_per_node)
    except ValueError:
        # torchrun's own says neither which option it is nor what else to give
        _say(
            f"--nproc_per_node={options.nproc_per_node}: torch finds no such devices on this machine; set it "
            "to the number of ranks that this machine is to run"
        )
        return _MISTAKE_EXIT
    if options.max_restarts > 0:
        # ranks that start again would find in a store that they share with those before what these left (torch 2.11 to
        # 2.15), and might not connect
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if ranks_per_node > 1:
        # torchrun does it, too, with a warning of four lines
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as logs:
            # torchrun would make a folder, write nothing and leave it
            if options.redirects == options.tee == "0":
                options.log_dir = options.log_dir or logs
            threading.Thread(
                target=_end_if_stuck, args=(options, logs), daemon=True
            ).start()
            run.run(options)
    except ChildFailedError as error:
        # torchrun knows times to the second, and a signal comes before the errors that follow from it.
        rank, failure = min(
            error.failures.items(),
            key=lambda item: (
                item[1].exitcode in _ENDED_BY_TORCHRUN,
                item[1].exitcode > 0,
                item[1].timestamp,
            ),
        )
        code = failure.exitcode
        end = f"exit code {code}"
        if code < 0:
            code = _SIGNAL_EXIT - code
            end = failure.signal_name()
        _say(f"rank {rank} (pid {failure.pid}) was the first to end, with {end}")
        return code
    except RendezvousConnectionError:
        _say(f"{_no_answer(options)}; this has ended all ranks of this node")
        return 1
    except RendezvousError as error:
        _say(
            f"the rendezvous at {_endpoint(options)} has failed with {type(error).__name__} {error}; start "
            f"torchtitan_cad.launch on all of --nnodes={options.nnodes} again, within --rdzv-conf join_timeout seconds"
        )
        return 1
    except SignalException as error:
        _say(f"{signal.Signals(error.sigval).name} has ended all ranks")
        return _SIGNAL_EXIT + int(error.sigval)
    return 0


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _no_answer(options: Namespace) -> str:
    return f"the rendezvous at {_endpoint(options)} does not answer: its host or the link to it is gone"


def _endpoint(options: Namespace) -> str:
    return options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"


def stuck_seconds(options: Namespace) -> float:
    """Return the seconds after which torchrun cannot still be waiting for ranks to end."""
    shutdown = (
        getattr(options, "shutdown_timeout", None)  # new in torch 2.13
        or os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        or _SHUTDOWN_S
    )
    return float(shutdown) + _STUCK_S


def _end_if_stuck(options: Namespace, logs: str) -> None:
    """End this launcher, and so its ranks, if a rank has ended and torchrun, which may wait for its store, is blind."""
    limit = stuck_seconds(options)
    pid = 0
    since = 0.0
    while True:
        time.sleep(_POLL_S)
        ended = None
        with contextlib.suppress(ChildProcessError):  # no rank has been started
            # torchrun has not asked for it yet
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid != pid:
            pid = 0 if ended is None else ended.si_pid
            since = time.monotonic()
        elif time.monotonic() - since > limit:
            _say(f"pid {pid} has ended, and {_no_answer(options)}")
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
