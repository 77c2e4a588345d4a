# SPDX-License-Identifier: BSD-3-Clause
"""An attention server for a job of harness.py, which may have a fault that shows at a request of its own choice.

Faults are kill, stop, slow, raise, shapes, nan, garbage and version.
"""

import logging
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from torchtitan_cad.runtime.servers import wire
from torchtitan_cad.tools import attention_server
from torchtitan_cad.tools.attention_server import AttentionServer

READY = "ready"
STOPPED_S = 3
"""seconds: others continue a server that has stopped itself after so long"""


@dataclass(frozen=True)
class Options:
    """A server of the job that writes ``log``, with ``fault`` at request number ``at`` of a direction."""

    log: Path
    host: str = "localhost"
    fault: str = "none"
    direction: str = "forward"
    at: int = 3
    restless: bool = False


class FaultyServer(AttentionServer):
    options: Options
    num_requests = 0

    def compute(self, kernel, request):
        results = super().compute(kernel, request)
        self.num_requests += request.direction.name == self.options.direction
        fault = self.options.fault
        if fault == "none" or self.num_requests != self.options.at:
            return results
        self.num_requests += 1
        match fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                if not os.fork():
                    time.sleep(STOPPED_S)
                    os.kill(os.getppid(), signal.SIGCONT)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(STOPPED_S)
            case "raise":
                raise ArithmeticError("a fault of the test")
            case "nan":
                return [torch.full_like(x, torch.nan) for x in results]
            case "garbage":
                wire._sum_of = lambda parts: 1  # as if bytes had changed on their way
                return results
        return [x[:1] for x in results]


def job_in(log: Path) -> tuple[int, str]:
    """Wait for the port and the token in the log of the job's first rank."""
    while True:
        text = log.read_text() if log.exists() else ""
        if found := re.search(r"serve --join \S+:(\d+) --token (\S+)", text):
            return int(found[1]), found[2]
        time.sleep(0.05)


def main(options: Options) -> None:
    print(READY, flush=True)
    if options.restless:
        come_and_go(options)
    serve(options)


def come_and_go(options: Options) -> None:
    """Start servers, each of which leaves or is killed after some seconds, until a signal ends this process."""
    rng = random.Random(0)
    child = 0

    def stop(*_):
        os.kill(child, signal.SIGKILL)
        sys.exit(0)

    while True:
        child = os.fork()
        if not child:
            serve(options)
            os._exit(0)
        signal.signal(signal.SIGTERM, stop)
        time.sleep(rng.uniform(2, 6))
        os.kill(child, rng.choice([signal.SIGTERM, signal.SIGKILL]))
        os.waitpid(child, 0)


def serve(options: Options) -> None:
    """Serve until a signal ends this process."""
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    port, token = job_in(options.log)
    if options.fault == "version":
        attention_server.__version__ = "0.0"
    server = FaultyServer(options.host, port, token, torch.device("cpu"))
    server.options = options
    signal.signal(signal.SIGTERM, lambda *_: server.leave())
    server.run()


if __name__ == "__main__":
    main(tyro.cli(Options))
