# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.3.0's trainer with CAD.

Its config is what the recipe and the command line say. Before anything is built, ``_with_cad`` replaces the inner
attention, the data loader, metrics, the validator and activation checkpointing by those of CAD.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from torchtitan_cad.integration.compile_caches import separate_compile_caches
from torchtitan_cad.integration.engines import engine_name
from torchtitan_cad.integration.failure import close_job, train_and_name_peers
from torchtitan_cad.integration.loading.documents import DOCUMENT_IDS
from torchtitan_cad.integration.loading.loader import PLAN_KEYS
from torchtitan_cad.integration.loading.redistribution import POSITIONS
from torchtitan_cad.integration.report.metrics import ShadowMetrics
from torchtitan_cad.integration.room import RankParts
from torchtitan_cad.integration.run_state import begin_run
from torchtitan_cad.integration.session import current_session, open_session
from torchtitan_cad.integration.shadow import open_shadow
from torchtitan_cad.integration.torchtitan_v0_3.attention import CadAttention
from torchtitan_cad.integration.torchtitan_v0_3.checks import (
    check_overridden,
    check_recipe,
    relied_on,
)
from torchtitan_cad.integration.torchtitan_v0_3.derived import derived
from torchtitan_cad.integration.torchtitan_v0_3.job import (
    layer_kind,
    microbatches_of,
    read_job,
    recipe_kinds,
)
from torchtitan_cad.integration.torchtitan_v0_3.parts import (
    KeptAttention,
    KeptAttentionAlone,
    PlannedMetrics,
    PlannedValidator,
    WrappedLoader,
    add_demo_texts,
)
from torchtitan_cad.planning.keeping import Checkpointing


class CadTrainer(Trainer):
    """torchtitan's trainer with core attention disaggregated; with ``cad.shadow`` it records documents and no more."""

    def __init__(self, config: Any) -> None:
        self.shadow = config.cad.shadow
        self._recorded_step = 0
        check_recipe(config)
        add_demo_texts(config)
        begin_run()
        config = self._recorded(config) if self.shadow else _with_cad(config)
        super().__init__(config)
        check_overridden(config, self.relied_on, self.device)
        if self.shadow:
            self.metrics_processor.shadow = self.dataloader
            return
        separate_compile_caches(self.parallel_dims.get_all_one_dimensional_meshes())
        for part in self.model_parts:
            part.register_forward_pre_hook(_unwrap_key, with_kwargs=True)
        self._build_engine()

    def init_distributed(self) -> ParallelDims:
        """Open CAD's session as soon as there are process groups."""
        parallel_dims = super().init_distributed()
        config = self.config
        debug = config.debug
        self.job = read_job(config, self.device)
        self.relied_on = relied_on(config, self.device)
        if debug.deterministic:  # torchtitan does so later, and kernels are chosen now
            torch.use_deterministic_algorithms(
                True, warn_only=debug.deterministic_warn_only
            )
        if not self.shadow:
            open_session(self.job)
        return parallel_dims

    def _recorded(self, config: Any) -> Any:
        """Return a config that trains as ``config`` does, while a ``Shadow`` sees the batches."""
        loader = WrappedLoader(
            inner=config.dataloader,
            wrap=lambda inner: open_shadow(inner, self.job, config.dump_folder),
        )
        return dataclasses.replace(
            config, dataloader=loader, metrics=derived(config.metrics, ShadowMetrics)
        )

    def _build_engine(self) -> None:
        session = current_session()
        config = self.config
        microbatches = microbatches_of(config)
        in_turns = config.parallelism.pipeline_parallel_schedule == "1F1B"
        of_rank = RankParts(
            modules=self.model_parts,
            hidden=self.model_config.dim,
            vocabulary=self.model_config.vocab_size,
            shards=self.parallel_dims.dp_shard * self.parallel_dims.cp,
            row_tokens=config.training.seq_len,
            checkpointing=[_checkpointing_kind(config)],
            compiles_loss=isinstance(self.loss_fn, ChunkedLossWrapper)
            or (config.compile.enable and "loss" in config.compile.components),
            microbatches_in_flight=min(microbatches, session.topology.pp)
            if in_turns
            else microbatches,
        )
        session.build(of_rank)
        logger.info(
            f"Applied Core Attention Disaggregation to the model over {len(session.ranks)} ranks"
        )

    def post_dataloading_process(
        self, input_dict: Any, labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return tokens, labels and the model's arguments, the plan's key in place of a mask."""
        inputs = dict(input_dict)
        key = inputs.pop(PLAN_KEYS, None)  # a shadow's batches have none
        redistributed = inputs.pop(POSITIONS, None)
        if redistributed is not None:
            inputs["positions"] = redistributed.long()
        tokens, labels, others = super().post_dataloading_process(inputs, labels)
        others.pop(DOCUMENT_IDS, None)
        if key is not None:
            others["attention_masks"] = key
        return tokens, labels, others

    def forward_backward_step(self, **batch: Any) -> Tensor:
        """Compute the gradients of a batch, before the first of which a shadow has seen all of the step's."""
        if self.shadow and self._recorded_step != self.step:
            self._recorded_step = self.step
            self.dataloader.end_step(self.step)
        return super().forward_backward_step(**batch)

    def train(self) -> None:
        """Train; errors that peers cause name them."""
        if self.shadow:
            super().train()
        else:
            train_and_name_peers(self, super().train)

    def close(self) -> None:
        """End the session, too."""
        close_job(super().close)


def _unwrap_key(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Make the key a plain host tensor, once FSDP2's root has moved the other arguments to the device."""
    return args, {**kwargs, "attention_masks": kwargs["attention_masks"].unwrap()}


def _with_cad(config: Any) -> Any:
    """Return a config of the same job with CAD's components."""
    if not config.training.disable_cuda_graphs:
        logger.info(
            "CUDA graphs of the whole step are off with CAD, whose exchanges differ from batch to batch"
        )
    model = _with_cad_attention(config)
    loader = WrappedLoader(
        inner=config.dataloader,
        wrap=lambda inner: current_session().wrap_loader(inner),
    )
    return dataclasses.replace(
        config,
        model_spec=dataclasses.replace(config.model_spec, model=model),
        dataloader=loader,
        metrics=derived(config.metrics, PlannedMetrics),
        validator=derived(config.validator, PlannedValidator),
        activation_checkpoint=_keeping_attention(config),
        # Rows go where documents are: plans balance, so nothing has to be reordered for that.
        parallelism=dataclasses.replace(
            config.parallelism, context_parallel_load_balancer=None
        ),
        training=dataclasses.replace(config.training, disable_cuda_graphs=True),
    )


def _with_cad_attention(config: Any) -> Any:
    """Return the model's config with CAD's inner attention in every layer."""
    model = copy.deepcopy(config.model_spec.model)
    kinds = recipe_kinds(config, tp=1)
    for layer in model.layers:
        name = layer_kind(layer.attention, config.training.seq_len)
        kind = next(kind for kind in kinds if kind.name == name)
        layer.attention.inner_attention = CadAttention.Config(
            engine=engine_name(kinds, name),
            scale=kind.score_scale,
            shared=kind.shape.shared_dim,
        )
    return model


def _keeping_attention(config: Any) -> Any:
    """Return the config of activation checkpointing that does not repeat core attention where it need not."""
    own = config.activation_checkpoint
    if isinstance(own, FullAC.Config) and not config.cad.recompute_attention:
        common = {one.name: getattr(own, one.name) for one in dataclasses.fields(own)}
        return derived(SelectiveAC.Config(**common), KeptAttentionAlone)
    return derived(own, KeptAttention) if isinstance(own, SelectiveAC.Config) else own


def _checkpointing_kind(config: Any) -> Checkpointing:
    """Return what activation checkpointing computes again; what is neither all nor nothing counts as "selective"."""
    own = config.activation_checkpoint
    if own is None:
        return "none"
    return "full" if isinstance(own, FullAC.Config) else "selective"
