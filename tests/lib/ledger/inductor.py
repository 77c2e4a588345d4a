# SPDX-License-Identifier: BSD-3-Clause
"""Lets Inductor compile for the device "ledger": C++ kernels on its memory, with its own schedule and streams.

Import it in a process that has the device and compiles nothing else. What generated kernels use is reported as well.
"""

import torch
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as scheduler
from torch._dynamo.device_interface import (
    DeviceInterface,
    register_interface_for_device,
)
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V


class Overrides(DeviceOpOverrides):
    def import_get_raw_stream_as(self, name):
        return f"def {name}(_): return 0"

    def set_device(self, index):
        return "pass"

    def synchronize(self):
        return "torch.accelerator.synchronize()"

    def device_guard(self, index):
        return "torch._ops.contextlib.nullcontext()"

    def current_stream(self):
        return "torch.accelerator.current_stream()"


class Interface(DeviceInterface):
    Event = torch.Event
    Stream = torch.Stream

    class Worker:
        get_device_properties = staticmethod(lambda device=None: None)
        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    current_stream = staticmethod(
        lambda device=None: torch.accelerator.current_stream()
    )
    set_stream = staticmethod(torch.accelerator.set_stream)
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize())
    get_compute_capability = staticmethod(lambda device=None: 0)
    is_triton_capable = staticmethod(lambda device=None: False)


register_device_op_overrides("ledger", Overrides())
register_backend_for_device("ledger", CppScheduling, PythonWrapperCodegen)
register_interface_for_device("ledger", Interface)
scheduler.device_need_guard = lambda device: device == "ledger"
inductor_config.cuda_backend = "cpp"
inductor_config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False

_call = PythonWrapperCodegen._generate_kernel_call_helper


def call(self, kernel_name, call_args, **options):
    device = options.get("device") or V.graph.get_current_device_or_throw()
    if options.get("triton", True) or device.type != "ledger":
        return _call(self, kernel_name, call_args, **options)
    arg_types = options.get("arg_types")
    if arg_types is not None:
        pairs = [
            (a, t) for a, t in zip(call_args, arg_types, strict=True) if "*" in str(t)
        ]
        reads = ", ".join(a for a, t in pairs if "const" in str(t))
        writes = ", ".join(a for a, t in pairs if "const" not in str(t))
        self.writeline(f"torch.ops.ledger.use([{reads}], [{writes}], '{kernel_name}')")
    self.writeline(self.wrap_kernel_call(kernel_name, call_args))


PythonWrapperCodegen._generate_kernel_call_helper = call
