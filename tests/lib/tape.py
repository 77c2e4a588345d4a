# SPDX-License-Identifier: BSD-3-Clause
"""Work of a device, recorded on the CPU to be counted."""

from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Tape(TorchDispatchMode):
    """Records what torch's own operators do inside it.

    Attributes:
        launches: operations that start work on a device, by name. Not counted are those whose results are views of
            their arguments, those that only allocate, and those that touch no element.
        read: tensors of which the host has read a number, which waits for the device unless they lie in host memory.
    """

    def __init__(self):
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.read: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.read.append(args[0])
        elif name not in ALLOCATIONS and not func.is_view:
            touched = (args, kwargs) if func._schema.is_mutable else result
            tensors = [x for x in tree_leaves(touched) if isinstance(x, Tensor)]
            self.launches[name] += any(x.numel() for x in tensors)
        return result
