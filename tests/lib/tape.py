# SPDX-License-Identifier: BSD-3-Clause
"""Work of a device, recorded on the CPU to be counted."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
READ = "_local_scalar_dense"


class Tape(TorchDispatchMode):
    """Records what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[str, Any, tuple, dict, Any]] = []
        self._inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self.run("", func, *args, **(kwargs or {}))

    def run(
        self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs an operation and records it as one, whatever it consists of; torch's own operators have no ``name``."""
        if self._inside:
            return operation(*args, **kwargs)
        self._inside = True
        with _disable_current_modes():
            result = operation(*args, **kwargs)
        self._inside = False
        self._entries.append((name, operation, args, kwargs, result))
        return result

    def launches(self) -> Counter[str]:
        """Operations that start work on a device, by name.

        Not counted are those whose results are views of their arguments, those that only allocate, and those that touch
        no element. Reading a number to the host is not, either.
        """
        return Counter(
            name or op.overloadpacket.__name__
            for name, op, *rest in self._entries
            if name or _works(op, *rest)
        )

    def numbers_read(self) -> list[Tensor]:
        """Tensors of which the host has read a number, which waits for the device unless they lie in host memory."""
        return [
            args[0]
            for name, op, args, *_ in self._entries
            if not name and op.overloadpacket.__name__ == READ
        ]


def _works(op: Any, args: tuple, kwargs: dict, result: Any) -> bool:
    if op.overloadpacket.__name__ in (*ALLOCATIONS, READ) or op.is_view:
        return False
    written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    if op._schema.is_mutable or not written:
        written = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return any(x.numel() for x in written)


def record_kernels(get_tape: Callable[[], Tape | None]) -> None:
    """Makes launches of interpreted Triton kernels operations of the tape in use, if there is one."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def launch_or_record(self: Any, *args: Any, **kwargs: Any) -> None:
        tape = get_tape()
        if tape is None:
            launch(self, *args, **kwargs)
        else:
            tape.run(self.fn.__name__.strip("_"), launch, self, *args, **kwargs)

    InterpretedFunction.run = launch_or_record
