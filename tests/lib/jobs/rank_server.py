# SPDX-License-Identifier: BSD-3-Clause
"""Forks the ranks of test jobs from one process that has imported torch and torchtitan already.

Importing them takes several times longer than the training of a typical test. Protocol, over stdin and stdout, one JSON
line each way:

    {"argv": [...], "env": {...}, "logs": [path per rank], "timeout_s": 60}  ->  [exit code or null per rank]

Ranks have their own process group, log and environment. Nothing runs in the server before the fork, so no threads or
process groups are inherited.
"""

import gc
import json
import os
import sys

from tests.lib.jobs import runner
from tests.lib.jobs.ranks import run_job
from torchtitan_cad.integration.torchtitan_v0_2 import plugin  # noqa: F401  # what every rank would import for itself
from torchtitan_cad.planning import warm_up
from torchtitan_cad.planning.placement.place import warm_up_placement


def serve() -> None:
    warm_up()  # or every rank would compile the planners for itself
    warm_up_placement()
    runner.titan_train.ConfigManager().parse_args([])  # imports the rest of tyro
    gc.freeze()  # what is imported stays as it is: a collection in a rank would copy its pages
    # Only answers may reach the pipe: whatever libraries print goes to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            codes = run_job(**json.loads(line), main=runner.main)
            print(json.dumps(codes), file=answers, flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    serve()
