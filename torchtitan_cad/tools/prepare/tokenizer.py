# SPDX-License-Identifier: BSD-3-Clause
"""Small tokenizers for training without downloads, in the files torchtitan reads from `model.hf_assets_path`.

torchtitan's loader asks for a BOS and an EOS around every document. The tokenizers here have no BOS, so that exactly
one token, the EOS, separates two documents.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

Kind = Literal["bpe", "bytes"]

DEFAULT_VOCAB_SIZE = 2048  # of torchtitan's debug models
EOS_TOKEN = "<|end_of_text|>"
NUM_BYTE_TOKENS = 256 + 1  # every byte, and EOS
MAX_VOCAB_SIZE = 2**20  # four times the largest vocabularies in use
_CONFIG = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_OF_TOKENIZERS = (_TOKENIZER, _CONFIG, "tokenizer.model", "vocab.json", "vocab.txt")
_OURS = "torchtitan_cad"
"""key of tokenizer_config.json: what the tokenizer is made of"""


def prepare_tokenizer(
    output_dir: str | os.PathLike[str],
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    kind: Kind = "bpe",
    texts: Sequence[str] | None = None,
    show_progress: bool = False,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `output_dir`, unless the same ones are there already.

    The files depend on the arguments alone. EOS has id 0.

    Args:
        output_dir: the folder to use as `model.hf_assets_path`; made if missing.
        vocab_size: tokens in all, EOS included; at most the model's vocabulary. A byte tokenizer uses 257 of them.
        kind: "bpe" for byte-level byte-pair encoding, "bytes" for one token a byte.
        texts: what to train on; a sample of the training documents of `python_stdlib` if None. Unused for "bytes".
        show_progress: show a progress bar while training.

    Raises:
        ValueError: an unknown `kind`, or a `vocab_size` that cannot hold all bytes and EOS or exceeds
            `MAX_VOCAB_SIZE`, or the folder has a tokenizer of another origin.
    """
    if kind not in ("bpe", "bytes"):
        raise ValueError(
            f'kind = "{kind}" is not a kind of tokenizer; use "bpe" or "bytes"'
        )
    if vocab_size < NUM_BYTE_TOKENS:
        raise ValueError(
            f"vocab_size = {vocab_size} cannot hold every byte and EOS; use {NUM_BYTE_TOKENS} or more"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size = {vocab_size} is larger than any model's; use {MAX_VOCAB_SIZE} or less"
        )
    if kind == "bytes":
        vocab_size = NUM_BYTE_TOKENS
        texts = []
    elif texts is None:
        from torchtitan_cad.demo.datasets import read_sources

        texts = training_sample(read_sources())

    folder = Path(output_dir)
    digest = hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
    made_of = {"kind": kind, "vocab_size": vocab_size, "texts_sha256": digest}
    files = folder / _TOKENIZER, folder / _CONFIG
    is_there = all(file.is_file() for file in files)
    if not is_there or files[1].read_bytes() != _config(files[0].read_bytes(), made_of):
        _check_is_ours(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = (
            train_tokenizer(texts, vocab_size, show_progress)
            .to_str(pretty=True)
            .encode()
        )
        # first what tells whose tokenizer it is, should this be interrupted
        _write(files[1], _config(tokenizer, made_of))
        _write(files[0], tokenizer)
    return folder


def _check_is_ours(folder: Path) -> None:
    """Raise ValueError for a folder with a tokenizer that was not made here."""
    with suppress(OSError, ValueError):
        settings = json.loads((folder / _CONFIG).read_bytes())
        if isinstance(settings, dict) and _OURS in settings:
            return
    for name in _OF_TOKENIZERS:
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name} may be a tokenizer of another origin, which would be lost; name another folder, or "
                "remove it"
            )


def _config(tokenizer: bytes, made_of: dict[str, Any]) -> bytes:
    """Return tokenizer_config.json beside the tokenizer.json ``tokenizer``, which it names by a hash.

    A run that was interrupted between both files, or another program, may have left another tokenizer beside it.
    """
    digest = hashlib.sha256(tokenizer).hexdigest()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        _OURS: {**made_of, "tokenizer_sha256": digest},
    }
    return f"{json.dumps(settings, indent=2)}\n".encode()


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


def _write(path: Path, content: bytes) -> None:
    """Write the whole file or nothing, so that an interrupted run leaves no half of one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
