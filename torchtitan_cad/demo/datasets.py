# SPDX-License-Identifier: BSD-3-Clause
"""Training data that needs no download: Python sources that are installed here, and synthetic documents.

    python_stdlib  a document is a file of the standard library
    synthetic      random tokens with given document lengths, see synthetic.py

The first takes `dataset_path` for other sources, and holds out every 20th document as python_stdlib_validation.
torchtitan is imported inside functions: `torchtitan-cad prepare` does without it.
"""

import contextlib
import os
import random
import sysconfig
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from torchtitan_cad.demo.synthetic import SyntheticDataset

Split = Literal["train", "validation"]

STDLIB_DATASET = "python_stdlib"
STDLIB_FOLDER = Path(sysconfig.get_path("stdlib"))
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
SHUFFLE_SEED = 20251018
HOLD_OUT_EVERY = 20


def read_sources(
    path: str | os.PathLike[str] | None = None,
    split: Split = "train",
) -> list[str]:
    """Read documents: by default the .py files of the standard library, else the .py and .txt files below `path`.

    Installed packages inside others, caches, copies, empty files and files that are not UTF-8 (some of Python's own
    tests) are left out. Files are sorted by relative path, and documents shuffled with a fixed seed; every 20th then
    belongs to the validation split.

    Raises:
        ValueError: if `path` is not a folder or holds too few documents for the split.
    """
    key = "training.dataset_path" if split == "train" else "validation.dataset_path"
    root = Path(path or STDLIB_FOLDER)
    suffixes = (".py",) if root == STDLIB_FOLDER else (".py", ".txt")
    if not root.is_dir():
        raise ValueError(
            f'{key} = "{root}" is not a folder; name a folder of .py or .txt files, or leave it out to use '
            f"{STDLIB_FOLDER}"
        )
    texts = _documents(root, suffixes)
    random.Random(SHUFFLE_SEED).shuffle(texts)
    chosen = [
        text
        for i, text in enumerate(texts, 1)
        if (i % HOLD_OUT_EVERY == 0) == (split == "validation")
    ]
    if not chosen:
        raise ValueError(
            f'{key} = "{root}" has {len(texts)} files of {" or ".join(suffixes)} with text, too few for the {split} '
            f"split; name a folder with at least {1 if split == 'train' else HOLD_OUT_EVERY}"
        )
    return chosen


def _documents(root: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the documents below a folder, without copies."""
    files = []
    for parent, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in SKIPPED_FOLDERS]
        files += [Path(parent, name) for name in names if name.endswith(suffixes)]
    files.sort(key=lambda file: file.relative_to(root.parent).as_posix())
    texts = []
    for file in files:
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(file.read_bytes().decode("utf-8"))
    # A dict drops copies (the tests have some), so that no validation document is also a training document.
    return list(dict.fromkeys(text for text in texts if text.strip()))


def _load_sources(path: str, split: Split) -> Any:
    from datasets import Dataset

    # Map-style and in memory: torchtitan then resumes by sample index, and nothing is written to a cache folder.
    return Dataset.from_dict({"text": read_sources(path, split)})


def register_datasets() -> None:
    """Add the datasets of sources to torchtitan's; calling it again changes nothing.

    `synthetic` is not among them, because it yields tokens, not text: it has a loader of its own.
    """
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    splits: dict[str, Split] = {"": "train", "_validation": "validation"}
    for suffix, split in splits.items():
        load = partial(_load_sources, split=split)
        DATASETS[STDLIB_DATASET + suffix] = DatasetConfig(
            str(STDLIB_FOLDER), load, itemgetter("text")
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
