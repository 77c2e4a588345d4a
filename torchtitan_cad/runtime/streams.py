# SPDX-License-Identifier: BSD-3-Clause
"""Marks in the order of a device's stream, for others to wait for. Nothing on CPU, where the host does the work itself.

Streams and events are those of the device's own module (``torch.cuda``), so that code on streams also runs on a device
that only checks their order (tests/lib/ledger).
"""

import weakref
from types import ModuleType
from typing import Any

import torch


def module_of(device: torch.device) -> ModuleType | None:
    """Return the module with the streams of ``device``; None on CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def record_event(device: torch.device) -> "torch.cuda.Event | None":
    """Return an event at the end of the current stream of ``device``; None on CPU."""
    module = module_of(device)
    return None if module is None else module.current_stream(device).record_event()


def wait_event(device: torch.device, event: "torch.cuda.Event | None") -> None:
    """Make the current stream of ``device`` wait for ``event``."""
    module = module_of(device)
    if module is not None and event is not None:
        module.current_stream(device).wait_event(event)


def repair_graphs() -> None:
    """Work around torch 2.15.0: backward of compiled graphs with streams finds streams and events of another graph.

    Graphs refer to streams and events by index in a list of the process, which a forward sets and its backward
    restores. In 2.15.0 a forward makes a new list, while backward restores the list that was there at import. This sets
    the list in place, as later versions do; torch 2.14 sets a dictionary in place.
    """
    from torch._dynamo import graph_bytecode_inputs

    inputs: Any = graph_bytecode_inputs

    def store(*objects: object) -> None:
        inputs.index_to_external_object_weakref[:] = map(weakref.ref, objects)

    if isinstance(inputs.index_to_external_object_weakref, list):
        inputs.store_user_object_weakrefs = store


def forget_objects_of_graphs(device: torch.device) -> None:
    """Work around a leak of torch 2.14.1 and 2.15.0: free the events that compiled graphs with streams keep alive.

    Between graphs nobody reads this list, as autograd keeps the events that a backward needs.
    """
    if module_of(device) is None:
        return
    from torch._dynamo import graph_bytecode_inputs

    graph_bytecode_inputs.keep_alive.clear()
