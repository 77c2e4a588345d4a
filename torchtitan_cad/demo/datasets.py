# SPDX-License-Identifier: BSD-3-Clause
"""Training data that needs no download: Python sources that are installed here, and synthetic documents.

    python_stdlib    a document is a file of the standard library
    python_packages  a document is a folder of installed packages: its .py files, one after another, as code models
                     train on whole repositories; subfolders are documents of their own
    synthetic        random tokens with given document lengths, see synthetic.py

The first two take `dataset_path` for other sources, and hold out every 20th document as python_stdlib_validation and
python_packages_validation. torchtitan is imported inside functions: `torchtitan-cad prepare` does without it.
"""

import contextlib
import os
import random
import sysconfig
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from torchtitan_cad.demo.synthetic import SyntheticDataset

Split = Literal["train", "validation"]
Unit = Literal["file", "folder"]

UNITS: dict[str, Unit] = {"python_stdlib": "file", "python_packages": "folder"}
"""What is one document, by dataset."""
STDLIB_FOLDER = Path(sysconfig.get_path("stdlib"))
PACKAGES = ("numpy", "torch", "torchtitan")
"""Every installation has them; those of the same versions give the same documents."""
GENERATED = frozenset({"numpy/__config__.py", "torch/version.py"})
"""Files of them that differ between builds of one version, and are left out."""
INSTALLED: dict[Unit, str] = {
    "file": str(STDLIB_FOLDER),
    "folder": f"the packages {', '.join(PACKAGES)}",
}
"""Where documents come from without a `dataset_path`."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
SHUFFLE_SEED = 20251018
HOLD_OUT_EVERY = 20


def read_sources(
    path: str | os.PathLike[str] | None = None,
    split: Split = "train",
    unit: Unit = "file",
) -> list[str]:
    """Read documents: by default the .py files of what is installed, else the .py and .txt files below `path`.

    Installed packages inside others, caches, copies, empty files and files that are not UTF-8 (some of Python's own
    tests) are left out. Files are sorted by relative path, and documents shuffled with a fixed seed; every 20th then
    belongs to the validation split.

    Raises:
        ValueError: if `path` is not a folder or holds too few documents for the split.
    """
    key = "training.dataset_path" if split == "train" else "validation.dataset_path"
    name = os.fspath(path or INSTALLED[unit])
    suffixes = (".py",) if name == INSTALLED[unit] else (".py", ".txt")
    roots = [Path(name)]
    if name == INSTALLED["folder"]:
        roots = [Path(import_module(package).__path__[0]) for package in PACKAGES]
    if not all(root.is_dir() for root in roots):
        raise ValueError(
            f'{key} = "{name}" is not a folder; name a folder of .py or .txt files, or leave it out to use '
            f"{INSTALLED[unit]}"
        )
    texts = _documents(roots, suffixes, unit)
    random.Random(SHUFFLE_SEED).shuffle(texts)
    chosen = [
        text
        for i, text in enumerate(texts, 1)
        if (i % HOLD_OUT_EVERY == 0) == (split == "validation")
    ]
    if not chosen:
        raise ValueError(
            f'{key} = "{name}" has {len(texts)} {unit}s of {" or ".join(suffixes)} with text, too few for the {split} '
            f"split; name a folder with at least {1 if split == 'train' else HOLD_OUT_EVERY}"
        )
    return chosen


def _documents(roots: list[Path], suffixes: tuple[str, ...], unit: Unit) -> list[str]:
    """Return the documents below folders, without copies."""
    files: dict[str, Path] = {}
    for root in roots:
        for parent, folders, names in os.walk(root):
            folders[:] = [folder for folder in folders if folder not in SKIPPED_FOLDERS]
            found = [Path(parent, name) for name in names if name.endswith(suffixes)]
            files |= {file.relative_to(root.parent).as_posix(): file for file in found}
    parts: defaultdict[Path, list[str]] = defaultdict(list)
    for file in (files[relative] for relative in sorted(files.keys() - GENERATED)):
        with contextlib.suppress(UnicodeDecodeError):
            if (text := file.read_bytes().decode("utf-8")).strip():
                parts[file if unit == "file" else file.parent].append(text)
    # A dict drops copies (the tests have some), so that no validation document is also a training document.
    return list(dict.fromkeys("\n".join(part) for part in parts.values()))


def _load_sources(path: str, split: Split, unit: Unit) -> Any:
    from datasets import Dataset

    # Map-style and in memory: torchtitan then resumes by sample index, and nothing is written to a cache folder.
    return Dataset.from_dict({"text": read_sources(path, split, unit)})


def register_datasets() -> None:
    """Add the datasets of sources to torchtitan's; calling it again changes nothing.

    `synthetic` is not among them, because it yields tokens, not text: it has a loader of its own.
    """
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    splits: dict[str, Split] = {"": "train", "_validation": "validation"}
    for name, unit in UNITS.items():
        for suffix, split in splits.items():
            load = partial(_load_sources, split=split, unit=unit)
            DATASETS[name + suffix] = DatasetConfig(
                INSTALLED[unit], load, itemgetter("text")
            )


def build_synthetic_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any
) -> Any:
    """Return the training data loader of `training.dataset = "synthetic"`.

    Batches are ({"input": int64 [local_batch_size, seq_len]}, labels int64 [local_batch_size, seq_len]).

    Raises:
        ValueError: for a bad `training.dataset_path`, or a tokenizer without an EOS.
    """
    from torchtitan.components.dataloader import ParallelAwareDataloader

    training = job_config.training
    dataset = SyntheticDataset(
        training.dataset_path,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.get_vocab_size(),
        seq_len=training.seq_len,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )
    loader_options = asdict(training.dataloader) | {
        "batch_size": training.local_batch_size
    }
    return ParallelAwareDataloader(
        dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **loader_options
    )
