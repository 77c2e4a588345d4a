# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad prepare``: a tokenizer for training without downloads, and what documents it leads to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from torchtitan_cad.planning.text import aligned, printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_EVERY = 8
"""The length statistics are taken from every eighth file: a few seconds instead of half a minute."""


def run(
    output: Path = Path("outputs/assets"),
    vocab_size: int = 2048,
    kind: Literal["bpe", "bytes"] = "bpe",
    sources: Path | None = None,
    statistics: bool = True,
) -> None:
    """Write a tokenizer for model.hf_assets_path, trained on Python sources, and print how long documents are.

    Nothing is downloaded, and what is there already is kept if it was made with the same settings.

    Args:
        output: Folder to write tokenizer.json and tokenizer_config.json to.
        vocab_size: Tokens in all, at most the model's vocabulary (2048 for torchtitan's debug models).
        kind: Byte-pair encoding, or one token a byte (longer documents).
        sources: Folder of .py and .txt files to use instead of the standard library's sources.
        statistics: Print the distribution of document lengths.
    """
    from tokenizers import Tokenizer

    from torchtitan_cad.demo.datasets import read_sources
    from torchtitan_cad.tools.prepare.tokenizer import (
        prepare_tokenizer,
        training_sample,
    )
    from torchtitan_cad.tools.shared import check_folder, load_planner

    if sources is not None and not sources.is_dir():
        raise ValueError(
            f"--sources {sources}: this is no folder; name one of .py or .txt files"
        )
    check_folder("--output", output)
    texts = read_sources(sources)
    folder = prepare_tokenizer(
        output, vocab_size, kind, training_sample(texts), show_progress=True
    )
    load_planner()  # so that the ranks of the first run find the planners compiled
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shown, tokens = printable(folder), tokenizer.get_vocab_size()
    print(
        f'{shown}: {kind} tokenizer with {tokens} tokens; set model.hf_assets_path = "{shown}" '
        "(--hf_assets_path with torchtitan 0.3.0)"
    )
    if not statistics:
        return
    lengths = _token_lengths(tokenizer, texts[::SAMPLE_EVERY])
    print(
        f"\nDocument lengths in tokens (every {SAMPLE_EVERY}th of {len(texts)} files)"
    )
    print(length_table(lengths))


def length_table(lengths: np.ndarray) -> str:
    """Return a header and one row; the last column is the length below which half of the causal attention work lies.

    Args:
        lengths: int64 [documents], in tokens, EOS included.
    """
    columns = [
        "documents",
        "tokens",
        "median",
        "mean",
        "90%",
        "99%",
        "longest",
        "half the attention below",
    ]
    ordered = np.sort(lengths).astype(np.int64)
    work = np.cumsum(ordered * (ordered + 1))
    half = ordered[np.searchsorted(work, work[-1] / 2)]
    median, p90, p99, longest = np.percentile(lengths, (50, 90, 99, 100))
    values = (
        len(lengths),
        lengths.sum(),
        median,
        lengths.mean(),
        p90,
        p99,
        longest,
        half,
    )
    return aligned([columns, [f"{value:,.0f}" for value in values]], left=())


def _token_lengths(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Tokens of every text and its EOS, int64 [texts]."""
    from tqdm import tqdm

    lengths: list[int] = []
    for start in tqdm(
        range(0, len(texts), 64), desc="measuring documents", leave=False
    ):
        lengths += [
            len(encoding.ids) + 1
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 64])
        ]
    return np.array(lengths, dtype=np.int64)
