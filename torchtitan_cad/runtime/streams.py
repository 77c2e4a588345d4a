"""Marks in the order of a CUDA stream, for others to wait for. Nothing on CPU, where the host does the work itself."""

import torch


def mark(device: torch.device) -> "torch.cuda.Event | None":
    """The end of what has been enqueued on the current stream of ``device``."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def join(device: torch.device, event: "torch.cuda.Event | None") -> None:
    """Makes the current stream of ``device`` wait for ``event``.

    Not while it captures a CUDA graph, which cannot wait for what is outside: what runs before the capture waits.
    """
    if event is not None and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).wait_event(event)
