# SPDX-License-Identifier: BSD-3-Clause
"""Brings CAD into torchtitan 0.2.2.

``install`` runs when torchtitan imports ``torchtitan_cad.job_config``. It wraps the config manager's last step, so that
``on_config`` sees every parsed config before anything is built. Only if ``parallelism.cad`` is on does that function
change anything but the loader of synthetic data: it validates the config on every rank, registers a ``TrainSpec`` under
the model's own name, and repairs what ``upstream`` lists.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, cast
from unittest import mock

import torch
import torchtitan.distributed.context_parallel as titan_cp
import torchtitan.protocols.train_spec as titan_specs
from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.choices import check_values
from torchtitan_cad.integration.compile_caches import separate_compile_caches
from torchtitan_cad.integration.engines import ENGINE, engine_name
from torchtitan_cad.integration.failure import name_dead_peers
from torchtitan_cad.integration.loading.documents import cut_for_nano_batches
from torchtitan_cad.integration.pingpong.fsdp_hooks import adopt_hooks
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.integration.run_state import begin_run
from torchtitan_cad.integration.session import current_session, open_session
from torchtitan_cad.integration.topology import Topology, check_degrees
from torchtitan_cad.integration.torchtitan_v0_2 import rules, upstream
from torchtitan_cad.integration.torchtitan_v0_2.blocks import (
    TitanBlock,
    apply_ac,
    apply_compile,
    checkpointing,
    replace_attention,
    selects_operators,
)
from torchtitan_cad.integration.torchtitan_v0_2.folders import check_folders
from torchtitan_cad.integration.torchtitan_v0_2.inputs import (
    SYNTHETIC,
    add_demo,
    check_inputs,
    check_vocabulary,
    import_custom,
    open_dataset,
    without_document_ids,
)
from torchtitan_cad.integration.torchtitan_v0_2.job import read_job
from torchtitan_cad.integration.torchtitan_v0_2.metrics import CadMetricsProcessor
from torchtitan_cad.integration.torchtitan_v0_2.model import (
    build_engine,
    cad_model_args,
    cad_model_class,
    has_positions,
    positions_of,
)
from torchtitan_cad.integration.torchtitan_v0_2.models import (
    Adapter,
    adapter_of,
    check_forwards,
    has_experts,
)
from torchtitan_cad.integration.torchtitan_v0_2.pipeline import pipeline_in_ticks
from torchtitan_cad.integration.torchtitan_v0_2.rules import has_cad
from torchtitan_cad.integration.torchtitan_v0_2.shadowed import shadow_train_spec
from torchtitan_cad.integration.torchtitan_v0_2.stages import stage_modules
from torchtitan_cad.integration.torchtitan_v0_2.streams import (
    check_streams,
    choose_streams,
)
from torchtitan_cad.integration.torchtitan_v0_2.validation import plan_validation
from torchtitan_cad.planning.model.batch import divides_by_row
from torchtitan_cad.runtime import ops


def install() -> None:
    """Make torchtitan call ``on_config`` on every config it parses. Idempotent."""
    ConfigManager._validate_config = _validate_config


_titans_validate_config = ConfigManager._validate_config


def _validate_config(manager: ConfigManager) -> None:
    _titans_validate_config(manager)
    add_demo(manager.config)
    on_config(manager.config)


def on_config(config: JobConfig) -> None:
    """Prepare the process for a job with this config, whatever it was prepared for before.

    Raises ValueError if the config asks for something CAD cannot do.
    """
    restore()
    begin_run()
    if not has_cad(config):
        import_custom(config)
        _leave_out_document_ids()
        if config.training.dataset == SYNTHETIC:
            _override(config.model.name, registered_spec(config))
        return
    spec = check_start(config)
    name = config.model.name
    flavor = config.model.flavor
    if config.cad.shadow:
        _leave_out_document_ids()
        _override(name, shadow_train_spec(spec, flavor))
        return
    adapter = adapter_of(name)
    assert adapter is not None, "the config has been checked"
    tag = torch.compiler.config.cache_key_tag
    _undo.callback(setattr, torch.compiler.config, "cache_key_tag", tag)
    _override(name, cad_train_spec(spec, adapter, flavor))
    _patch(titan_cp, cp_shard=_contiguous_for_cad(titan_cp.cp_shard))
    for trainer_cls in _trainer_classes():
        _patch(
            trainer_cls,
            forward_backward_step=trainer_cls.forward_backward_step,
            train=trainer_cls.train,
            close=trainer_cls.close,
        )
        upstream.normalize_pipeline_gradients(trainer_cls)
        name_dead_peers(trainer_cls)


def restore() -> None:
    """Take back what ``on_config`` did for the last config."""
    _undo.close()


def registered_spec(config: JobConfig) -> TrainSpec:
    """Return torchtitan's or a user's ``TrainSpec`` of the job's model, with the demo's loader for synthetic data.

    Raises ValueError if there is none.
    """
    name = config.model.name
    try:
        spec = titan_specs.get_train_spec(name)
    except ValueError as error:
        raise ValueError(
            f"model.name = {name!r}: torchtitan knows no such model; set it to one that it knows"
        ) from error
    if config.training.dataset != SYNTHETIC:
        return spec
    from torchtitan_cad.demo.datasets import build_synthetic_dataloader

    return dataclasses.replace(spec, build_dataloader_fn=build_synthetic_dataloader)


def check_start(config: JobConfig) -> TrainSpec:
    """Check a config, with CAD or without, and the files that it names; see ``check``."""
    spec = check(config)
    check_inputs(config, spec)
    check_folders(config)
    return spec


def check(config: JobConfig, world_size: int | None = None) -> TrainSpec:
    """Check a config, with CAD or without, as far as possible before process groups exist.

    ``world_size`` is by default the launcher's WORLD_SIZE; what depends on it is skipped if that is not set.
    Returns the model's TrainSpec, without CAD. Raises ValueError that names the TOML key,
    the value, and what to set instead.
    """
    import_custom(config)
    parallelism = config.parallelism
    ranks = rules.launched_ranks(config) if world_size is None else world_size
    rules.check_bounds(config)
    if ranks is not None:
        check_degrees(parallelism, ranks)
    rules.check(config, rules.of_any_job(config, ranks))
    if has_cad(config):
        rules.check(config, rules.of_cad(config, ranks))
        check_values(config.cad)
        config.cad.check_eos_id()
        check_streams(config)
    if has_cad(config) and ranks is not None:
        config.cad.planner_config(Topology.from_job(parallelism, ranks))
    spec = registered_spec(config)
    rules.check(config, rules.of_model(config, spec, ranks))
    if has_cad(config) and parallelism.pipeline_parallel_degree > 1:
        stage_modules(parallelism, spec.model_args[config.model.flavor].n_layers)
    return spec


_undo = ExitStack()
"""Takes back what ``on_config`` did last."""


def _patch(target: Any, **replaced: Any) -> None:
    """Set attributes until the next config is parsed, which gives them back their values of now."""
    _undo.enter_context(mock.patch.multiple(target, **replaced))


def _override(name: str, spec: TrainSpec) -> None:
    """Register ``spec`` under ``name``, before torchtitan's built-in one and in place of a user's."""
    specs = titan_specs._extra_train_specs
    _undo.enter_context(mock.patch.dict(specs, {name: spec}))


def _leave_out_document_ids() -> None:
    for cls in (*_trainer_classes(), Validator):
        processed = without_document_ids(cls.post_dataloading_process)
        _patch(cls, post_dataloading_process=processed)


def _trainer_classes() -> set[Any]:
    """torchtitan's Trainer: twice under `-m torchtitan.train`, where the running module is ``__main__``."""
    modules = (sys.modules.get(name) for name in ("torchtitan.train", "__main__"))
    return {getattr(module, "Trainer", None) for module in modules} - {None}


def _build_dataloader(
    spec: TrainSpec,
    args: Any,
    *,
    tokenizer: Any,
    job_config: JobConfig,
    **options: Any,
) -> BaseDataLoader:
    """Open the session of a job whose model has these args, and build the loader that plans its batches."""
    check_vocabulary(tokenizer, job_config, args.vocab_size)
    eos_id = tokenizer.eos_id if tokenizer else None
    session = open_session(read_job(job_config, args, eos_id))
    loader = open_dataset(
        "training",
        spec.build_dataloader_fn,
        tokenizer=tokenizer,
        job_config=job_config,
        **options,
    )
    return session.wrap_loader(loader)


def _parallelize(
    spec: TrainSpec,
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
) -> nn.Module:
    """Parallelize a model by the spec's function, but for what CAD does in its place."""
    separate_compile_caches(parallel_dims.get_all_one_dimensional_meshes())
    apply_cad(model, parallel_dims, job_config)
    with (
        _left_to_cad(spec, model, job_config),
        upstream.sharding_ties_together(model),
    ):
        parallelized = spec.parallelize_fn(model, parallel_dims, job_config)
    # Else checkpointing by operator (torch 2.13) stops at what FSDP2 records inside of a block.
    by_operator = selects_operators(checkpointing(job_config))
    if parallelized.pingpong is not None or by_operator:
        for block in parallelized.layers.values():
            adopt_hooks(block)
    if not parallel_dims.pp_enabled:
        build_engine([parallelized], parallel_dims, job_config)
    return parallelized


def cad_train_spec(spec: TrainSpec, adapter: Adapter, flavor: str) -> TrainSpec:
    """Make a spec with core attention disaggregated; the model's name, flavors and parameters stay as they are."""
    model_args = {name: cad_model_args(args) for name, args in spec.model_args.items()}
    args = model_args[flavor]

    def pipeline(
        model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, *args: Any
    ) -> Any:
        if current_session().topology.across_stages:
            return pipeline_in_ticks(model, parallel_dims, job_config, *args)
        schedule, parts, *ends = spec.pipelining_fn(
            model, parallel_dims, job_config, *args
        )
        build_engine(parts, parallel_dims, job_config)
        return schedule, parts, *ends

    def build_loss(
        job_config: JobConfig, *, parallel_dims: ParallelDims, **kwargs: Any
    ) -> Any:
        loss_fn = spec.build_loss_fn(job_config, parallel_dims=parallel_dims, **kwargs)
        scale = upstream.ddp_gradient_scale(parallel_dims)
        return upstream.GradientScaledLoss(loss_fn, scale)

    def build_validator(*, job_config: JobConfig, **options: Any) -> Any:
        built = upstream.build_validator(
            spec.build_validator_fn, job_config=job_config, **options
        )
        plan_validation(built, job_config)
        return built

    return dataclasses.replace(
        spec,
        model_cls=cad_model_class(spec.model_cls, adapter),
        model_args=model_args,
        parallelize_fn=partial(_parallelize, spec),
        pipelining_fn=spec.pipelining_fn and pipeline,
        build_dataloader_fn=partial(_build_dataloader, spec, args),
        build_loss_fn=build_loss,
        build_validator_fn=spec.build_validator_fn and build_validator,
        build_metrics_processor_fn=CadMetricsProcessor,
    )


def apply_cad(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Replace the attention of every block by core attention on the CAD mesh."""
    session = current_session()
    halves = session.cad.nano_batches == 2
    check_forwards(model, halves=halves)
    layers = cast(nn.ModuleDict, model.layers)
    adapter = cast(Adapter, model.adapter)
    views = []
    for layer, block in layers.items():
        kind = adapter.kind_of(
            model.model_args, int(layer), job_config.training.seq_len
        )
        engine = engine_name(session.job.kinds, kind)
        if halves:
            views.append(TitanBlock(block, adapter, engine))
        else:
            replace_attention(block.attention, adapter, engine)
    if halves:
        device = session.job.device
        traced, why = choose_streams(job_config, device, has_experts(model.model_args))
        logger.info(
            f"Streams of nano-batches: {'traced' if traced else 'opaque'} ({why})"
        )
        traced_on = device if traced else None
        model.pingpong = PingPong(views, ENGINE, traced_on=traced_on)  # type: ignore[assignment]
    logger.info(
        f"Applied Core Attention Disaggregation to the model over {len(session.ranks)} ranks, "
        f"nano-batches: {session.cad.nano_batches}"
    )


@contextmanager
def _left_to_cad(
    spec: TrainSpec, model: nn.Module, job_config: JobConfig
) -> Iterator[None]:
    """Make the model's own parallelize function leave out, or do differently, what CAD does.

    It applies no ring or all-gather attention. As it refuses varlen attention under CP, the model meanwhile claims to
    use sdpa. With two nano-batches it checkpoints and compiles what the ping-pong loop runs, not the blocks.
    Checkpointing by operator keeps the attention output, as it does torchtitan's own, and takes the place of that of
    whole blocks where ``checkpointing`` says so. Where tokens are redistributed, tensor parallelism expects their
    positions, as it does those that CP cuts.
    """
    module = sys.modules[spec.parallelize_fn.__module__]
    section = checkpointing(job_config)
    pingpong: Any = model.pingpong
    original_ac = module.apply_ac

    def checkpoint(blocks: nn.Module, config: Any, **options: Any) -> None:
        saved = options.get("op_sac_save_list", set()) if section is config else set()
        options["op_sac_save_list"] = {*saved, ops._core_attention._opoverload}
        if pingpong is None:
            original_ac(blocks, section, **options)
        else:
            apply_ac(pingpong, original_ac, section, **options)

    def with_positions(apply: Callable[..., Any]) -> Callable[..., Any]:
        def apply_to(*args: Any, **options: Any) -> Any:
            if "cp_enabled" in options:
                options["cp_enabled"] = True
            return apply(*args, **options)

        return apply_to

    replaced: dict[str, Any] = {"apply_ac": checkpoint}
    if hasattr(module, "apply_cp_to_attention_module"):
        replaced["apply_cp_to_attention_module"] = lambda *_: None
    if pingpong is not None and hasattr(module, "apply_compile"):
        replaced["apply_compile"] = partial(
            apply_compile, pingpong, module.apply_compile
        )
    if has_positions():
        for name in {"apply_tp", "apply_non_moe_tp"} & vars(module).keys():
            replaced[name] = with_positions(getattr(module, name))
    with (
        mock.patch.multiple(module, **replaced),
        mock.patch.object(model.model_args, "attn_type", "sdpa"),
    ):
        yield


def _contiguous_for_cad(cp_shard: Any) -> Any:
    """torchtitan's ``cp_shard`` reorders the sequence to balance ring attention.

    CAD wants contiguous slices, or those of both halves of the sequence if rows are halved for two nano-batches. Of
    tokens that were redistributed it cuts the positions that came with them.
    """

    @wraps(cp_shard)
    def shard(
        cp_mesh: Any, inputs: Any, attention_masks: Any, *load_balancer: Any
    ) -> Any:
        if not isinstance(attention_masks, VarlenMetadata):
            return cp_shard(cp_mesh, inputs, attention_masks, *load_balancer)
        session = current_session()
        positions = positions_of(attention_masks)
        if positions is not None:
            inputs = (*inputs[:2], positions)
        if session.cad.nano_batches == 2 and not divides_by_row(
            session.rows_per_microbatch(len(inputs[0]))
        ):
            inputs = tuple(
                cut_for_nano_batches(rows, cp_mesh.size()) for rows in inputs
            )
        inputs, _ = cp_shard(cp_mesh, inputs, None, None)
        return inputs, attention_masks

    return shard
