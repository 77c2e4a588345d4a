# SPDX-License-Identifier: BSD-3-Clause
"""Opens the dataset and tokenizer that a job reads, with errors that name key and remedy."""

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from datasets import Dataset
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import build_validator
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import utils

from torchtitan_cad.integration.choices import DEMO_TEXTS
from torchtitan_cad.integration.loading.documents import DOCUMENT_IDS
from torchtitan_cad.integration.torchtitan_v0_2.rules import has_cad
from torchtitan_cad.runtime.kernels.select import get_kernel

SYNTHETIC = "synthetic"
"""Name of the demo's dataset for training that yields tokens, not text."""
_DEMO_FLAVOR = "debugmodel_cpu"
_DEMO_VOCAB_SIZE = 2048


def add_demo(config: JobConfig) -> None:
    """Make the demo's datasets and model known to torchtitan if the job names any; no other job imports the demo."""
    named = {
        config.training.dataset.lower(),
        config.validation.dataset.lower(),
        config.model.flavor,
    }
    if named & {*DEMO_TEXTS, _DEMO_FLAVOR}:
        from torchtitan_cad.demo import datasets, flavors

        datasets.register_datasets()
        flavors.register_flavors()


def import_custom(config: JobConfig) -> None:
    """Import `experimental.custom_import`, as torchtitan's Trainer does later: it may register what the job names."""
    name = config.experimental.custom_import
    try:
        if name:
            import_module(name)
    except ImportError as error:
        raise ValueError(
            f"experimental.custom_import = {name!r}: {error}; set it to a module that can be imported (PYTHONPATH), or "
            "leave it out"
        ) from error


def check_inputs(config: JobConfig, spec: TrainSpec) -> None:
    """Check before process groups exist: names of datasets, with CAD the tokenizer, on CPU the kernel.

    What loads data or tokenizers may be a user's own, and know others.
    Raises ValueError that names the TOML key, the value, and what to set instead.
    """
    # on CUDA the session looks, once the rank has its device
    attends = has_cad(config) and not config.cad.shadow
    if attends and utils.device_type == "cpu":
        get_kernel(config.cad.kernel, "cpu")
    if spec.build_dataloader_fn is build_text_dataloader:
        _check_name("training", config.training.dataset)
    if config.validation.enable and spec.build_validator_fn is build_validator:
        _check_name("validation", config.validation.dataset)
    if has_cad(config) and spec.build_tokenizer_fn is build_hf_tokenizer:
        vocab_size = spec.model_args[config.model.flavor].vocab_size
        load_tokenizer(spec.build_tokenizer_fn, config, vocab_size)


def _check_name(section: str, name: str) -> None:
    known = sorted(
        {*DATASETS, *DEMO_TEXTS, *([SYNTHETIC] if section == "training" else [])}
    )
    if name.lower() not in known:
        raise ValueError(
            f"{section}.dataset = {name!r} is not a dataset; set {section}.dataset to one of {', '.join(known)}"
        )


def open_dataset(
    section: str, build: Callable[..., Any], *, job_config: JobConfig, **options: Any
) -> Any:
    """Return the data loader that ``build``, of torchtitan's TrainSpec, makes for "training" or "validation".

    ``options`` are other arguments of ``build``. Raises ValueError for data that is unknown or cannot be read.
    """
    name = getattr(job_config, section).dataset
    path = getattr(job_config, section).dataset_path
    try:
        loader = build(job_config=job_config, **options)
        # torchtitan's text datasets would look for the first document for ever
        documents = getattr(getattr(loader, "dataset", None), "_data", None)
        if isinstance(documents, Dataset) and len(documents) == 0:
            raise ValueError("it has fewer documents than data-parallel ranks")
    except Exception as error:  # whatever a dataset's loader raises
        if f"{section}.dataset" in str(error):
            raise
        _check_name(section, name)
        place = path or DATASETS[name.lower()].path
        reason = " ".join(str(error).split()).rstrip(".")
        demo = DEMO_TEXTS[section == "validation"]
        raise ValueError(
            f"{section}.dataset = {name!r} at {place}: {reason}; set {section}.dataset_path to where enough "
            f"documents are, or {section}.dataset to {demo!r}, which needs no download"
        ) from error
    return loader


def load_tokenizer(
    build: Callable[[Any], Any], job_config: JobConfig, vocab_size: int
) -> Any:
    """Return the tokenizer that ``build``, of torchtitan's TrainSpec, makes of `model.hf_assets_path`.

    Raises ValueError if there is none that can be read, or it has more tokens than the model.
    """
    folder = job_config.model.hf_assets_path
    try:
        tokenizer = build(job_config)
    except Exception as error:  # a broken file is a bare Exception
        reason = "no such folder"
        if Path(folder).is_dir():
            text, *_ = str(error).split("Available files")
            reason = " ".join(text.split()).rstrip(".")
        raise ValueError(
            f"model.hf_assets_path = {folder!r}: {reason}; {_prepare(vocab_size)}"
        ) from error
    check_vocabulary(tokenizer, job_config, vocab_size)
    return tokenizer


def check_vocabulary(tokenizer: Any, job_config: JobConfig, vocab_size: int) -> None:
    """Raise ValueError if there is a tokenizer and it has more tokens than the model."""
    model = job_config.model
    if tokenizer is not None and tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"model.hf_assets_path = {model.hf_assets_path!r}: the tokenizer has {tokenizer.get_vocab_size()} tokens, "
            f"model.flavor = {model.flavor!r} only {vocab_size}: use another of the two; {_prepare(vocab_size)}"
        )


def without_document_ids(process: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``post_dataloading_process`` of torchtitan's Trainer or Validator: its models take no ``document_ids``.

    Their masks are torchtitan's own.
    """

    @functools.wraps(process)
    def process_others(self: Any, input_dict: dict[str, Any], *rest: Any) -> Any:
        input_dict.pop(DOCUMENT_IDS, None)
        return process(self, input_dict, *rest)

    return process_others


def _prepare(vocab_size: int) -> str:
    """Say how to get a tokenizer for a model of that vocabulary."""
    return (
        "set it to a folder with a tokenizer.json, or make one with `torchtitan-cad prepare --output outputs/assets "
        f"--vocab-size {min(vocab_size, _DEMO_VOCAB_SIZE)}`"
    )
