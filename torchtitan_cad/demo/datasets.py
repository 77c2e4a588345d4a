"""Training data that needs no download: the standard library's sources, and synthetic documents.

    python_stdlib  one document a source file; python_stdlib_validation holds out every 20th file
    synthetic      random tokens with given document lengths, see synthetic.py

torchtitan is imported inside functions, so that `torchtitan-cad prepare` reads the corpus without loading it.
"""

import os
import random
import sysconfig
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchtitan_cad.demo.synthetic import SyntheticDataset

Split = Literal["train", "validation"]

STDLIB_FOLDER = Path(sysconfig.get_path("stdlib"))
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
SHUFFLE_SEED = 20251018
HOLD_OUT_EVERY = 20


def read_sources(folder: str | os.PathLike[str] = STDLIB_FOLDER, split: Split = "train") -> list[str]:
    """Read every .py file below the standard library's folder, or every .py and .txt file below another one.

    A file is a document. Installed packages, caches, copies, empty files and files that are not UTF-8 (some of Python's
    own tests) are left out. Files are sorted by relative path and shuffled with a fixed seed; every 20th then belongs
    to the validation split.

    Raises:
        ValueError: if `folder` is not a folder or holds too few files for the split.
    """
    key = "training.dataset_path" if split == "train" else "validation.dataset_path"
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f'{key} = "{folder}" is not a folder; name a folder of .py or .txt files, or leave it out to use the '
            "standard library's sources"
        )
    suffixes = (".py",) if folder == STDLIB_FOLDER else (".py", ".txt")
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        files += [Path(parent, name) for name in names if name.endswith(suffixes)]
    files.sort(key=lambda file: file.relative_to(folder).as_posix())

    # A dict drops copies (the tests have some), so that no validation document is also a training document.
    texts = list(dict.fromkeys(text for file in files if (text := _read_text(file))))
    random.Random(SHUFFLE_SEED).shuffle(texts)
    held_out = HOLD_OUT_EVERY - 1
    chosen = [text for i, text in enumerate(texts) if (i % HOLD_OUT_EVERY == held_out) == (split == "validation")]
    if not chosen:
        raise ValueError(
            f'{key} = "{folder}" has {len(texts)} non-empty {" or ".join(suffixes)} files, too few for the {split} '
            f"split; name a folder with at least {1 if split == 'train' else HOLD_OUT_EVERY}"
        )
    return chosen


def _read_text(file: Path) -> str:
    """Return the file's contents; "" if it is not UTF-8 or only white space."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return text if text.strip() else ""


def _load_sources(folder: str, split: Split) -> Any:
    from datasets import Dataset

    # Map-style and in memory: torchtitan then resumes by sample index, and nothing is written to a cache folder.
    return Dataset.from_dict({"text": read_sources(folder, split)})


def _text_of(sample: dict[str, str]) -> str:
    """Workers that are spawned get it pickled, which a lambda cannot be."""
    return sample["text"]


def register_datasets() -> None:
    """Add the `python_stdlib` datasets to torchtitan's; calling it again changes nothing.

    `synthetic` is not among them, because it yields tokens, not text: it has a loader of its own.
    """
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    variants: dict[str, Split] = {"python_stdlib": "train", "python_stdlib_validation": "validation"}
    for name, split in variants.items():
        DATASETS[name] = DatasetConfig(
            path=str(STDLIB_FOLDER),
            loader=partial(_load_sources, split=split),
            sample_processor=_text_of,
        )


def build_synthetic_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
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
    loader_options = asdict(training.dataloader) | {"batch_size": training.local_batch_size}
    return ParallelAwareDataloader(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **loader_options)
