# SPDX-License-Identifier: BSD-3-Clause
"""Running a block's forward hooks without calling the block, for FSDP2 (torch 2.11 to 2.15).

``fully_shard(block)`` gathers the block's parameters in a forward pre-hook and frees them in a forward hook. With two
nano-batches a block is never called: its first and last operation lie in different segments, and both nano-batches
share one gathering. ``open_block`` and ``close_block`` run whatever hooks the block has, as ``nn.Module.__call__``
would, with tensors of our choice. Of FSDP2 only ``fully_shard.state`` is used besides the hook tables of ``nn.Module``.
What its hooks do with the tensors they are given decides which ones to give:

- pre-hook: reduces the gradients once those of all given tensors that need one are known. Give what the block's last
  operation in backward takes, that is the first nano-batch's input only: waiting for both nano-batches' would order
  them.
- forward hook: gathers the parameters again when the gradient of a given tensor is known. Give what the block's first
  operation in backward precedes: the result of the second nano-batch.

FSDP2 also casts the given floating-point tensors to the parameters' dtype.

Modules inside of a block that have FSDP2's hooks of their own, such as experts, would be called once per nano-batch:
``adopt_hooks`` lets the block run those hooks along with its own.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


def open_block(block: Any, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Run the forward pre-hooks of ``block``; returns the tensors that take the place of the given ones."""
    args: tuple[Any, ...] = tensors
    for number, hook in block._forward_pre_hooks.items():
        if number in block._forward_pre_hooks_with_kwargs:
            args, _ = hook(block, args, {})
        else:
            result = hook(block, args)
            if result is not None:
                args = result if isinstance(result, tuple) else (result,)
    return args


def close_block(block: Any, output: Tensor) -> Tensor:
    """Run the forward hooks of ``block`` on ``output``; returns the tensor that takes its place."""
    for number, hook in block._forward_hooks.items():
        inputs: tuple[Any, ...] = (
            ((), {}) if number in block._forward_hooks_with_kwargs else ((),)
        )
        result = hook(block, *inputs, output)
        output = output if result is None else result
    return output


def adopt_hooks(block: nn.Module) -> None:
    """Make what ``fully_shard`` has hooked on modules inside of ``block`` hooks of the block, around its own work."""
    for module in list(block.modules())[1:]:
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        if state is None:
            continue
        for number, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "__self__", None) is state:
                del (
                    module._forward_pre_hooks[number],
                    module._forward_pre_hooks_with_kwargs[number],
                )
                block.register_forward_pre_hook(hook, with_kwargs=True)
        for number, after in list(module._forward_hooks.items()):
            if getattr(after, "__self__", None) is state:
                del module._forward_hooks[number]
                block.register_forward_hook(after, prepend=True)
