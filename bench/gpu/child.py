# SPDX-License-Identifier: BSD-3-Clause
"""The process of one part: `python -m bench.gpu.child PART DEVICE LINES [PACKAGES]`.

PART is a ``Part`` as JSON. A line of JSON goes to the file LINES for every figure as soon as it is known, so that none
is lost if the process hangs or dies. PACKAGES is a folder of packages for what is not installed.
"""

import faulthandler
import importlib
import json
import os
import signal
import site
import sys
from pathlib import Path

from bench.gpu.parts import Part, Skip

TOO_NEW = "only 0-dimensional arrays can be converted"
"""answer of numpy 2.4 and newer to the interpreter of Triton 3.6, which only stand-ins use"""


def main(part: Part, device: str, lines: str, packages: str = "") -> None:
    faulthandler.enable()
    # by which the parent asks where this process hangs
    faulthandler.register(signal.SIGUSR1)
    if packages:
        # last: what is installed comes first; with the paths that packages add
        site.addsitedir(packages)
    with Path(lines).open("a") as file:

        def write(**line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            for module in part.needs:
                _require(module)
            module, function = part.function.split(":")
            getattr(importlib.import_module(module), function)(
                device,
                lambda name, value: write(name=name, value=value),
                *part.arguments,
            )
        except Skip as reason:
            write(skip=str(reason))
        except Exception as error:
            if type(error).__name__ != "InterpreterError" or TOO_NEW not in str(error):
                raise
            write(skip=f"Triton's interpreter does not work with this numpy: {error}")


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise Skip(f"{module} cannot be imported: {error}") from error


if __name__ == "__main__":
    main(Part(**json.loads(sys.argv[1])), *sys.argv[2:])
    sys.stdout.flush()
    # what goes wrong while libraries are taken down is not the part's failure
    os._exit(0)
