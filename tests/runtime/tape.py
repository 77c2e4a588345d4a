"""What a CUDA graph does, on CPU: operations on tensors are recorded once, and run again on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records what runs inside it. Python, and numbers that it passes to operations, are not run again by ``replay``.

    Memory that operations allocate stays theirs; replayed, it holds garbage until it is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Callable[..., Any], tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.run(func, *args, **(kwargs or {}))

    def run(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an operation and records it as one, whatever it consists of."""
        with _disable_current_modes():
            result = operation(*args, **kwargs)
        self._entries.append((operation, args, kwargs, result))
        return result

    def replay(self) -> None:
        for operation, args, kwargs, recorded in self._entries:
            result = operation(*args, **kwargs)
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(new, Tensor) and _memory(new) not in given and new.numel():
                    is_garbage = "empty" in str(operation)
                    old.copy_(torch.full_like(new, 1 if new.dtype == torch.uint8 else -7777) if is_garbage else new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def record_kernels(get_tape: Callable[[], Tape | None]) -> None:
    """From here on, launches of interpreted Triton kernels are operations of the tape in use, if there is one."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def launch_or_record(self: Any, *args: Any, **kwargs: Any) -> None:
        tape = get_tape()
        launch(self, *args, **kwargs) if tape is None else tape.run(launch, self, *args, **kwargs)

    InterpretedFunction.run = launch_or_record
