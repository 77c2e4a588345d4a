"""torchrun, ending in one line: `python -m torchtitan_cad.launch` in place of `torchrun`, with the same arguments.

    python -m torchtitan_cad.launch --nproc_per_node=2 -m torchtitan_cad.train --job.config_file train.toml

When a rank fails, torchrun prints some 35 lines below what the rank has said: the launcher's own traceback, and every
rank's exit. Here they are one line, and the exit code is that of the first rank to fail.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_SIGNAL_EXIT = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun on `arguments`, by default the command line's; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # They report each rank that is stopped because another one failed.
    for logger in (agent.logger, logging.getLogger("torch.distributed.elastic.multiprocessing.api")):
        logger.setLevel(logging.CRITICAL)
    options = run.parse_args(arguments)
    if (
        run.determine_local_world_size(options.nproc_per_node) > 1
    ):  # torchrun does this, too, with a warning of four lines
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = _culprit(error)
        how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
        print(f"launch: rank {rank} (pid {failure.pid}) was the first to end, with {how}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else _SIGNAL_EXIT - failure.exitcode
    except SignalException as error:
        print(f"launch: {signal.Signals(error.sigval).name} has ended all ranks", file=sys.stderr)
        return _SIGNAL_EXIT + int(error.sigval)
    return 0


def _culprit(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the first rank to fail, as far as can be told: torchrun knows times to the second, and ends the others
    itself.
    """

    def is_later(failure: ProcessFailure) -> tuple[bool, bool, int]:
        by_torchrun = failure.exitcode in (-signal.SIGTERM, _SIGNAL_EXIT + signal.SIGTERM)
        return by_torchrun, failure.exitcode > 0, failure.timestamp

    return min(error.failures.items(), key=lambda item: is_later(item[1]))


if __name__ == "__main__":
    sys.exit(main())
