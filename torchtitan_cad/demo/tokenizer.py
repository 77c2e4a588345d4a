"""Small tokenizers for training without downloads, in the files torchtitan reads from `model.hf_assets_path`.

torchtitan's loader asks for a BOS and an EOS around every document. The tokenizers here have no BOS, so that exactly
one token, the EOS, separates two documents.

`load_tokenizer` is for any tokenizer: it names the remedy where there is none.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

Kind = Literal["bpe", "bytes"]

DEFAULT_VOCAB_SIZE = 2048  # of torchtitan's debug models
EOS_TOKEN = "<|end_of_text|>"
NUM_BYTE_TOKENS = 256 + 1  # every byte, and EOS
MAX_VOCAB_SIZE = 2**20  # four times the largest vocabularies in use
FORMAT_VERSION = 1
_CONFIG = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_READABLE = (_TOKENIZER, "vocab.json", "vocab.txt")
_REMEDY = "set it to a folder with a tokenizer.json, or make one with `torchtitan-cad prepare --output"


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

    Returns:
        `output_dir`.

    Raises:
        ValueError: if `kind` is unknown or `vocab_size` too small to hold all bytes and EOS, or above
            `MAX_VOCAB_SIZE`.
    """
    if kind not in ("bpe", "bytes"):
        raise ValueError(f'kind = "{kind}" is not a kind of tokenizer; use "bpe" or "bytes"')
    if vocab_size < NUM_BYTE_TOKENS:
        raise ValueError(f"vocab_size = {vocab_size} cannot hold every byte and EOS; use {NUM_BYTE_TOKENS} or more")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size = {vocab_size} is larger than any model's; use {MAX_VOCAB_SIZE} or less")
    if kind == "bytes":
        vocab_size, texts = NUM_BYTE_TOKENS, []
    elif texts is None:
        from torchtitan_cad.demo.datasets import read_sources

        texts = training_sample(read_sources())

    folder = Path(output_dir)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "torchtitan_cad": {
            "version": FORMAT_VERSION,
            "kind": kind,
            "vocab_size": vocab_size,
            "texts_sha256": _fingerprint(texts),
        },
    }
    if _read_config(folder) != config:
        folder.mkdir(parents=True, exist_ok=True)
        # The config goes last: with it in place the folder is complete.
        _write(folder / _TOKENIZER, train_tokenizer(texts, vocab_size, show_progress).to_str(pretty=True))
        _write(folder / _CONFIG, json.dumps(config, indent=2) + "\n")
    return folder


def training_sample(texts: Sequence[str]) -> Sequence[str]:
    """Return every fourth text: 2048 tokens are learned as well from 8 MB as from 30 MB, in a quarter of the time."""
    return texts[::4]


def train_tokenizer(texts: Sequence[str], vocab_size: int, show_progress: bool = False) -> Tokenizer:
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
    bar = tqdm(texts, desc="training the tokenizer", unit="file", leave=False, disable=not show_progress)
    tokenizer.train_from_iterator(bar, trainer, length=len(texts))
    return tokenizer


def check_files(assets_path: str) -> None:
    """Raise ValueError, with the remedy, unless torchtitan's own loader finds files of a tokenizer in the folder."""
    folder = Path(assets_path)
    if any((folder / name).is_file() for name in _READABLE):
        return
    reason = "no tokenizer in it" if folder.is_dir() else "no such folder"
    raise ValueError(f"model.hf_assets_path = {assets_path!r}: {reason}; {_REMEDY} outputs/assets`")


def load_tokenizer(build: Callable[[Any], Any], job_config: Any, vocab_size: int) -> Any:
    """Return the tokenizer that `build`, of torchtitan's TrainSpec, makes of `model.hf_assets_path`.

    Args:
        vocab_size: of the model.

    Raises:
        ValueError: there is none that can be read, or it has more tokens than the model; names key, value and remedy.
    """
    folder = Path(job_config.model.hf_assets_path)
    key = f"model.hf_assets_path = {job_config.model.hf_assets_path!r}"
    smaller = f" --vocab-size {vocab_size}" if vocab_size < DEFAULT_VOCAB_SIZE else ""
    remedy = f"{_REMEDY} outputs/assets{smaller}`"
    try:
        tokenizer = build(job_config)
    except Exception as error:  # a broken file is a bare Exception
        reason = " ".join(str(error).split()) if folder.is_dir() else "no such folder"
        raise ValueError(f"{key}: {reason}; {remedy}") from error
    if tokenizer is not None and tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"{key}: the tokenizer has {tokenizer.get_vocab_size()} tokens, model.flavor = "
            f"{job_config.model.flavor!r} only {vocab_size}: use another of the two; {remedy}"
        )
    return tokenizer


def _fingerprint(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _read_config(folder: Path) -> object:
    if not (folder / _TOKENIZER).is_file():
        return None
    try:
        return json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing, so that an interrupted run leaves no half of one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
