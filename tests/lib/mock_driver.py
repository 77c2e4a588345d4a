# SPDX-License-Identifier: BSD-3-Clause
"""A Triton driver without a GPU: compiles for a CUDA device at every launch's own types, and launches nothing.

Importing it makes it the driver of the process, so only processes of their own may.
"""

from collections import Counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CAPABILITY = 90
compiled: list[tuple[str, Any]] = []
"""Name and code of every variant, in the order in which they were compiled."""
launches: Counter[str] = Counter()


class _Utils:
    def load_binary(self, name, kernel, shared, device):
        return object(), object(), 0, 0, 1024

    def unload_module(self, module): ...

    def get_device_properties(self, device):
        return {
            "max_shared_mem": 227 * 1024,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }


class _Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, x, y, z, *arguments):
        assert all(
            0 < size < most for size, most in ((x, 2**31), (y, 2**16), (z, 2**16))
        ), (self.name, x, y, z)
        launches[self.name] += 1


class _Driver:
    utils = _Utils()
    launcher_cls = _Launcher

    def get_current_device(self):
        return 0

    def set_current_device(self, device): ...

    def get_current_stream(self, device):
        return 0

    def get_device_capability(self, device=0):
        return divmod(CAPABILITY, 10)

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cuda


_compile = JITFunction._do_compile


def _record(self: JITFunction, *args, **kwargs):
    kernel = _compile(self, *args, **kwargs)
    compiled.append((self.fn.__name__, kernel))
    return kernel


driver.set_active(_Driver())
JITFunction._do_compile = _record
