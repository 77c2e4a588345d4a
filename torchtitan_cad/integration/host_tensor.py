# SPDX-License-Identifier: BSD-3-Clause
"""A tensor that stays on the host.

The plan's key reaches attention as a tensor so that pipeline schedules split it per microbatch by themselves. FSDP2's
root module, however, moves every tensor argument to the device, and reading it there would synchronise. This subclass
answers ``.to`` with itself; the model unwraps it before its blocks, so compiled code sees a plain CPU tensor.
"""

import torch
from torch import Tensor


class HostTensor(Tensor):
    """See the module's docstring. Build with ``HostTensor.wrap``."""

    @classmethod
    def wrap(cls, tensor: Tensor) -> "HostTensor":
        return tensor.cpu().as_subclass(cls)

    def to(self, *args, **kwargs) -> "HostTensor":
        return self

    def cuda(self, *args, **kwargs) -> "HostTensor":
        return self

    def unwrap(self) -> Tensor:
        return self.as_subclass(torch.Tensor)
