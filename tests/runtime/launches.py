"""What a device would be given to do: operations of torch and launches of Triton kernels, counted by name on the CPU.

Counted are operations that start work on a device. Not counted are those whose results are views of their arguments,
those that only allocate, and those that touch no element. Reading a number to the host is kept apart: it waits for the
device unless the tensor lies in host memory.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Launches(TorchDispatchMode):
    """Counts what runs inside it. Interpreted Triton kernels count once, whatever their interpreter does."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.read: list[Tensor] = []
        """What the host has read."""
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with _disable_current_modes():
            result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.read.append(args[0])
        elif name not in _ALLOCATIONS and not func.is_view and _touches_elements(func, args, kwargs, result):
            self.counts[name] += 1
        return result

    def run(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an operation and counts it as one, whatever it consists of."""
        if self._inside:
            return operation(*args, **kwargs)
        self.counts[name] += 1
        self._inside = True
        with _disable_current_modes():
            result = operation(*args, **kwargs)
        self._inside = False
        return result


def _touches_elements(func: Any, args: tuple, kwargs: dict, result: Any) -> bool:
    written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    if not func._schema.is_mutable and written:
        return any(x.numel() for x in written)
    return any(x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))


def count_triton(get_launches: Callable[[], Launches | None]) -> None:
    """From here on, launches of interpreted Triton kernels are counted where ``get_launches`` returns a counter."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        launches = get_launches()
        if launches is None:
            launch(self, *args, **kwargs)
        else:
            launches.run(self.fn.__name__.strip("_"), launch, self, *args, **kwargs)

    InterpretedFunction.run = count
