# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's models and model args, with document-masked attention and the plan's key handed to every block."""

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.attention import VarlenMetadata
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.engines import Ticks
from torchtitan_cad.integration.host_tensor import HostTensor
from torchtitan_cad.integration.loading.documents import DOCUMENT_IDS, OWN_POSITIONS
from torchtitan_cad.integration.loading.loader import PLAN_KEYS
from torchtitan_cad.integration.loading.redistribution import POSITIONS
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.integration.session import current_session
from torchtitan_cad.integration.torchtitan_v0_2 import upstream
from torchtitan_cad.integration.torchtitan_v0_2.blocks import rows_of_table
from torchtitan_cad.integration.torchtitan_v0_2.models import Adapter
from torchtitan_cad.integration.torchtitan_v0_2.room import read_parts
from torchtitan_cad.runtime.engine import CoreAttentionEngine


def cad_model_class(model_cls: type[nn.Module], adapter: Adapter) -> type[nn.Module]:
    """Make a subclass of ``model_cls`` whose attention masks are plan keys. Parameters keep their names."""

    class CadModel(model_cls):  # type: ignore[misc, valid-type]
        adapter: Adapter
        pingpong: PingPong | None = None
        """Runs the blocks when there are two nano-batches."""

        def __init__(self, model_args: Any) -> None:
            # To the trainer attention is varlen; modules, not all of which know that, are built as for sdpa.
            with mock.patch.object(model_args, "attn_type", "sdpa"):
                super().__init__(model_args)

        def init_weights(self, *args: Any, **options: Any) -> None:
            super().init_weights(*args, **options)
            upstream.initialise_router_biases(self)

        def get_attention_masks(
            self,
            input_batch: Tensor,
            tokenizer: Any,
            extra_inputs: dict[str, Tensor] | None = None,
        ) -> VarlenMetadata:
            """One plan key per row of the batch, which pipeline schedules chunk along with the rows.

            Where ``has_positions`` is true it has every token's position as well; see ``positions_of``.
            """
            extra_inputs = extra_inputs or {}
            if (keys := extra_inputs.pop(PLAN_KEYS, None)) is None:
                keys = current_session().plan_now(
                    {**extra_inputs, "input": input_batch}
                )
            extra_inputs.pop(DOCUMENT_IDS, None)
            positions = _take_positions(extra_inputs, input_batch)
            # Tensors in every field: zero-bubble schedules of torch 2.11 ask every leaf for requires_grad.
            return VarlenMetadata(
                keys, keys if positions is None else positions, keys, keys
            )

        def forward(
            self,
            tokens: Tensor,
            attention_masks: VarlenMetadata,
            positions: Tensor | None = None,
        ) -> Tensor:
            keys = attention_masks.cu_seq_q
            if positions is None:  # context parallelism has cut them
                positions = positions_of(attention_masks)
            if isinstance(keys, HostTensor):
                keys = keys.unwrap()
            masks = VarlenMetadata(keys, keys, keys, keys)
            if self.pingpong is None and adapter.takes_positions:
                return super().forward(tokens, masks, positions)
            return _run(self, tokens, masks, positions)

    CadModel.adapter = adapter
    return CadModel


def _run(
    model: Any,
    tokens: Tensor,
    masks: VarlenMetadata,
    positions: Tensor | None,
) -> Tensor:
    """Run a model, or its part of a pipeline, whose blocks the ping-pong loop runs, or that gives them no positions."""
    h = tokens if model.tok_embeddings is None else model.tok_embeddings(tokens)
    # qwen3, gpt_oss
    rope = model.freqs_cis if hasattr(model, "freqs_cis") else model.rope_cache
    if model.pingpong is None:
        by_name = dict.fromkeys(("basic_mask", "sliding_window_mask"), masks)
        for block in model.layers.values():
            h = block(h, rows_of_table(rope, positions), by_name)
    else:
        key = int(masks.cu_seq_q.reshape(-1)[0])
        h = model.pingpong(h, rope, positions, key)
    h = h if model.norm is None else model.norm(h)
    return h if model.output is None else model.output(h)


def build_engine(
    parts: Sequence[nn.Module],
    parallel_dims: ParallelDims,
    job_config: Any,
    ticks: Ticks | None = None,
) -> CoreAttentionEngine:
    """Build the session's engine, once all ``parts`` of the model that this rank runs are parallelized."""
    session = current_session()
    of_rank = read_parts(parts, parallel_dims, job_config, session.job)
    return session.build(of_rank, ticks)


def has_positions() -> bool:
    """Tell whether every batch has positions of tokens, as they may differ from columns."""
    session = current_session()
    return session.redistributes or session.job.documents.by_positions


def _take_positions(extra_inputs: dict[str, Tensor], tokens: Tensor) -> Tensor | None:
    """Take int32 [B, S] positions out of a batch's inputs; columns where it has none and needs some."""
    own = extra_inputs.pop(OWN_POSITIONS, None)
    redistributed = extra_inputs.pop(POSITIONS, None)
    if redistributed is not None:
        return redistributed
    if own is not None:
        return own.to(torch.int32)
    if not has_positions():
        return None
    columns = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    return columns.repeat(len(tokens), 1)


def positions_of(masks: VarlenMetadata) -> Tensor | None:
    """Return [B, S] column of every token in the row that it was loaded in; None where none has moved."""
    return masks.cu_seq_k if masks.cu_seq_k.ndim == 2 else None


def update_without_cp(
    update_from_config: Callable[..., None], job_config: Any, **kwargs: Any
) -> None:
    """Update model args as torchtitan does, which refuses context parallelism with all of its attention but sdpa."""
    with mock.patch.object(job_config.parallelism, "context_parallel_degree", 1):
        update_from_config(job_config, **kwargs)


def cad_model_args(args: Any) -> Any:
    """Return a copy of a flavor's model args whose modules are built as for sdpa; CAD replaces their attention."""

    class CadModelArgs(type(args)):  # type: ignore[misc]
        def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
            update_without_cp(super().update_from_config, job_config, **kwargs)
            if args.attn_mask_type == "causal" and job_config.cad.documents != "row":
                logger.info(
                    f"CAD: attention stays within documents. Without cad, flavor {job_config.model.flavor} attends "
                    "across them; set cad.documents to 'row' to keep that mask."
                )
            self.attn_type = "varlen"
            self.attn_mask_type = "block_causal"

    cad_args: Any = copy.copy(args)
    cad_args.__class__ = CadModelArgs
    return cad_args
