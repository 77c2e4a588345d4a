# SPDX-License-Identifier: BSD-3-Clause
"""The device "ledger": streams and events that only keep account, so that missing waits are found on any machine.

    races = on_ledger(scenario, argument)  # in a process of its own: in pytest's all tests would see an accelerator

    def scenario(argument):                # a function of a module
        x = torch.ones(8).to("ledger")
        ...                                # torch.ledger has Stream, stream and current_stream as torch.cuda
        return torch.ops.ledger.races()    # what no event orders, one line each

ledger.cpp says what counts as a race. Kernels that do not go through torch say what they use with
``torch.ops.ledger.use(reads, writes, name)`` and work on ``torch.ops.ledger.on_host(tensor)``, the same memory.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.cpp import build, find_compiler
from tests.lib.processes import run_processes, values

SOURCE = Path(__file__).with_name("ledger.cpp")

needs_ledger = pytest.mark.skipif(
    sys.platform != "linux" or find_compiler() is None,
    reason="the device that checks streams needs a C++ compiler",
)


def load() -> None:
    """Makes the device known to torch in this process, for good."""
    torch.utils.rename_privateuse1_backend("ledger")
    torch.ops.load_library(str(build(SOURCE)))
    torch.ops.ledger.install()
    module = types.ModuleType("torch.ledger")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: torch.accelerator.device_count()
    module.current_device = lambda: torch.accelerator.current_device_index()
    module.manual_seed_all = lambda seed: None
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.stream = lambda stream: stream  # is a context of its own
    module.is_current_stream_capturing = lambda: False
    torch._register_device_module("ledger", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.set_num_threads(1)


def on_ledger(scenario: Callable[..., Any], *arguments):
    """Call ``scenario``, a function that can be imported, where the device is; what it returns or raises comes here."""
    build(SOURCE)  # here, where a compiler's message is seen
    (found,) = values(run_processes(1, _run, scenario, arguments, timeout_s=300))
    return found


def _run(group, scenario: Callable[..., Any], arguments: tuple):
    load()
    return scenario(*arguments)
