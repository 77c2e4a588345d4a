# SPDX-License-Identifier: BSD-3-Clause
"""Small tokenizers for training without downloads, in the files torchtitan reads from `model.hf_assets_path`.

torchtitan's loader asks for a BOS and an EOS around every document. The tokenizers here have no BOS, so that exactly
one token, the EOS, separates two documents.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

Kind = Literal["bpe", "bytes"]

DEFAULT_VOCAB_SIZE = 2048  # of torchtitan's debug models
EOS_TOKEN = "<|end_of_text|>"
NUM_BYTE_TOKENS = 256 + 1  # every byte, and EOS
MAX_VOCAB_SIZE = 2**20  # four times the largest vocabularies in use
_CONFIG = "tokenizer_config.json"
_OF_TOKENIZERS = (
    "tokenizer.json",
    _CONFIG,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_OURS = "torchtitan_cad"
"""key of tokenizer_config.json, by which a tokenizer that was made here is known"""
_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS_TOKEN,
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    _OURS: True,
}


def prepare_tokenizer(
    output_dir: str | os.PathLike[str],
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    kind: Kind = "bpe",
    texts: Sequence[str] | None = None,
    show_progress: bool = False,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `output_dir`, and return it.

    The files depend on the arguments alone. EOS has id 0.

    Args:
        output_dir: the folder to use as `model.hf_assets_path`; made if missing.
        vocab_size: tokens in all, EOS included; at most the model's vocabulary. A byte tokenizer uses 257 of them.
        kind: "bpe" for byte-level byte-pair encoding, "bytes" for one token a byte.
        texts: what to train on; a sample of the training documents of `python_stdlib` if None. Unused for "bytes".
        show_progress: show a progress bar while training.

    Raises:
        ValueError: a `vocab_size` that cannot hold all bytes and EOS or exceeds `MAX_VOCAB_SIZE`, or the folder has a
            tokenizer of another origin.
    """
    if not NUM_BYTE_TOKENS <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size = {vocab_size}: use {NUM_BYTE_TOKENS}, for every byte and EOS, to {MAX_VOCAB_SIZE}"
        )
    folder = Path(output_dir)
    _check_is_ours(folder)
    if kind == "bytes":
        vocab_size = NUM_BYTE_TOKENS
        texts = []
    elif texts is None:
        from torchtitan_cad.demo.datasets import read_sources

        texts = training_sample(read_sources())
    tokenizer = train_tokenizer(texts, vocab_size, show_progress)
    folder.mkdir(parents=True, exist_ok=True)
    # first what tells whose tokenizer it is, should this be interrupted
    _write(folder / _CONFIG, json.dumps(_SETTINGS, indent=2))
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    return folder


def _check_is_ours(folder: Path) -> None:
    """Raise ValueError for a folder with a tokenizer that was not made here."""
    config = folder / _CONFIG
    if config.is_file() and f'"{_OURS}"' in config.read_text(errors="replace"):
        return
    for name in _OF_TOKENIZERS:
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name} may be a tokenizer of another origin, which would be lost; name another folder, or "
                "remove it"
            )


def training_sample(texts: Sequence[str]) -> Sequence[str]:
    """Return every fourth text: 2048 tokens are learned as well from 8 MB as from 30 MB, in a quarter of the time."""
    return texts[::4]


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, show_progress: bool = False
) -> Tokenizer:
    """Train a byte-level BPE tokenizer with EOS as id 0; without merges if `vocab_size` is 257."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bar = tqdm(
        texts,
        desc="training the tokenizer",
        unit="file",
        leave=False,
        disable=not show_progress,
    )
    tokenizer.train_from_iterator(bar, trainer, length=len(texts))
    return tokenizer


def _write(path: Path, content: str) -> None:
    """Write the whole file or nothing, so that an interrupted run leaves no half of one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(content + "\n")
    temporary.replace(path)
