"""Marks in the order of a device's stream, for others to wait for. Nothing on CPU, where the host does the work itself.

Streams and events are those of the device's own module (``torch.cuda``), so that code on streams also runs on a device
that only checks their order (tests/support/ledger).
"""

from types import ModuleType

import torch


def module_of(device: torch.device) -> ModuleType | None:
    """The module with the streams of ``device``; None on CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def mark(device: torch.device) -> "torch.cuda.Event | None":
    """The end of what has been enqueued on the current stream of ``device``."""
    module = module_of(device)
    return None if module is None else module.current_stream(device).record_event()


def join(device: torch.device, event: "torch.cuda.Event | None") -> None:
    """Makes the current stream of ``device`` wait for ``event``.

    Not while it captures a CUDA graph, which cannot wait for what is outside: what runs before the capture waits.
    """
    module = module_of(device)
    if module is not None and event is not None and not module.is_current_stream_capturing():
        module.current_stream(device).wait_event(event)
