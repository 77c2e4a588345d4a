"""Marks in the order of a device's stream, for others to wait for. Nothing on CPU, where the host does the work itself.

Streams and events are those of the device's own module (``torch.cuda``), so that code on streams also runs on a device
that only checks their order (tests/support/ledger).
"""

import weakref
from types import ModuleType
from typing import Any

import torch


def module_of(device: torch.device) -> ModuleType | None:
    """Return the module with the streams of ``device``; None on CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def record_event(device: torch.device) -> "torch.cuda.Event | None":
    """Return the end of what has been enqueued on the current stream of ``device``."""
    module = module_of(device)
    return None if module is None else module.current_stream(device).record_event()


def wait_event(device: torch.device, event: "torch.cuda.Event | None", *, from_outside: bool = False) -> None:
    """Make the current stream of ``device`` wait for ``event``.

    Args:
        from_outside: of a CUDA graph that may be captured, which cannot wait for it: what runs before the capture does.
    """
    module = module_of(device)
    if module is not None and event is not None and not (from_outside and module.is_current_stream_capturing()):
        module.current_stream(device).wait_event(event)


def repair_graphs() -> None:
    """Let backward of several compiled graphs with streams find its own streams and events (torch 2.15.0).

    Graphs know them by index in one list of the process, which a forward sets and its backward restores. There a
    forward makes a new list, and backward restores what the list at import held: objects of another graph. Later
    versions set the list in place, as this does; torch 2.14 has a dictionary that it sets in place.
    """
    from torch._dynamo import graph_bytecode_inputs

    inputs: Any = graph_bytecode_inputs

    def store(*objects: object) -> None:
        inputs.index_to_external_object_weakref[:] = map(weakref.ref, objects)

    if isinstance(inputs.index_to_external_object_weakref, list):
        inputs.store_user_object_weakrefs = store


def forget_objects_of_graphs(device: torch.device) -> None:
    """Free what calls of compiled graphs with streams have left (torch 2.14.1, 2.15.0): events, for good otherwise.

    Between graphs nobody needs that list: autograd keeps what a backward needs.
    """
    if module_of(device) is None:
        return
    from torch._dynamo import graph_bytecode_inputs

    graph_bytecode_inputs.keep_alive.clear()
