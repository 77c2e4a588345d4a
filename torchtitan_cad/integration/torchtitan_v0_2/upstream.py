# SPDX-License-Identifier: BSD-3-Clause
"""Run-time repairs of torchtitan 0.2.2 for jobs with CAD. ``patches/`` holds the same fixes for the source.

1. Under pipeline parallelism gradients are not divided by the global token count (train.py divides only the reported
   loss).
2. Under DDP they are divided by the data-parallel degree after they were already divided by the global token count.
3. Under context parallelism the validation loss is divided by the tokens of one rank's part of the sequence, and then
   summed over all parts (validate.py counts labels after they were cut). For models without ``freqs_cis``, such as
   qwen3, validation stops with an error, for a context manager that is made and not used.
4. Biases of routers (gpt_oss) are never initialised: they begin as what memory held, which may be NaN.
5. FSDP2 is given the embedding and the output apart, also where they share their weight (qwen3's smaller flavors);
   torch 2.13 refuses that.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torchtitan
import torchtitan.models.llama4.infra.parallelize as titan_sharding
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import TokenChoiceTopKRouter


def _has(file: str, code: str) -> bool:
    """Whether a source file of torchtitan has some code: then it is patched."""
    return code in Path(torchtitan.__path__[0], file).read_text()


@dataclass(eq=False)
class GradientScaledLoss:
    """A loss whose value is unchanged and whose gradient is multiplied by ``scale`` (a number or tensor; None: 1).

    (For repair 2, a communication hook that sums instead of averaging would be wrong with gradient accumulation, where
    every backward reduces the gradients accumulated so far once more.)
    """

    loss_fn: Callable[..., Tensor]
    scale: float | Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.loss_fn(*args, **kwargs)
        scale = self.scale
        if scale is not None and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * scale)
        return loss


def ddp_gradient_scale(parallel_dims: ParallelDims) -> float | None:
    """Find the factor by which the loss's gradient is too small (repair 2); None without DDP or if patched."""
    is_ddp = parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled
    is_patched = _has("train.py", "(loss * ddp_degree).backward()")
    return float(parallel_dims.dp_replicate) if is_ddp and not is_patched else None


def normalize_pipeline_gradients(trainer_cls: Any) -> None:
    """Divide pipeline gradients by the global token count, as every other parallelism does (repair 1).

    Needs the job's loss to be a ``GradientScaledLoss``. Does nothing to a torchtitan that is patched already.
    """
    if _has("train.py", "param.grad.div_("):
        return
    original = trainer_cls.forward_backward_step

    @functools.wraps(original)
    def forward_backward_step(
        self: Any, *, global_valid_tokens: Any, **kwargs: Any
    ) -> Tensor:
        if not (
            self.parallel_dims.pp_enabled
            and isinstance(self.loss_fn, GradientScaledLoss)
        ):
            return original(self, global_valid_tokens=global_valid_tokens, **kwargs)
        self.loss_fn.scale = 1.0 / global_valid_tokens
        try:
            return original(self, global_valid_tokens=global_valid_tokens, **kwargs)
        finally:
            self.loss_fn.scale = None

    trainer_cls.forward_backward_step = forward_backward_step


class _ContextAsData:
    """``ParallelDims`` as a validation loop should see them: whoever has labels of its own is a data-parallel rank."""

    cp_enabled = False

    def __init__(self, parallel_dims: ParallelDims) -> None:
        self._parallel_dims = parallel_dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel_dims, name)

    @property
    def dp_enabled(self) -> bool:
        return self._parallel_dims.dp_cp_enabled

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        return self._parallel_dims.get_mesh("loss" if dims == "batch" else dims)


def build_validator(build: Callable[..., Any], **options: Any) -> Any:
    """Build a validator that divides by the labels of whole sequences (repair 3).

    Leaves it as it is without context parallelism, if torchtitan is patched already, and with a loop of its own.
    """
    validator = build(**options)
    is_patched = _has("components/validate.py", 'parallel_dims.get_mesh("loss")')
    is_stock = getattr(type(validator), "validate", None) is Validator.validate
    if is_stock and not is_patched and validator.parallel_dims.cp_enabled:
        # Batches are cut by a copy, which keeps the degrees as they are.
        validator.post_dataloading_process = copy.copy(
            validator
        ).post_dataloading_process
        validator.parallel_dims = _ContextAsData(validator.parallel_dims)
    return validator


def initialise_router_biases(model: nn.Module) -> None:
    """Set biases of the model's routers to zero (repair 4). Draws no random numbers."""
    for module in model.modules():
        if isinstance(module, TokenChoiceTopKRouter) and module.gate.bias is not None:
            nn.init.zeros_(module.gate.bias)


@contextmanager
def sharding_ties_together(model: Any) -> Iterator[None]:
    """Make qwen3's ``parallelize_fn`` shard the embedding along with the output if both have one weight (repair 5).

    Under tensor parallelism each has a weight of its own while it is sharded, and nothing changes.
    """
    embedding = model.tok_embeddings
    output = model.output
    original = titan_sharding.fully_shard

    def fully_shard(modules: Any, **options: Any) -> Any:
        has_both = embedding is not None and output is not None
        if not has_both or embedding.weight is not output.weight:
            return original(modules, **options)
        if modules is embedding:
            return embedding
        has_output = isinstance(modules, list) and output in modules
        if has_output and embedding not in modules:
            modules = [embedding, *modules]
        return original(modules, **options)

    with mock.patch.object(titan_sharding, "fully_shard", fully_shard):
        yield
