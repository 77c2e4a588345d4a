# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad prepare``: a tokenizer for training without downloads."""

from pathlib import Path
from typing import Literal

from torchtitan_cad.planning.text import printable


def run(
    output: Path = Path("outputs/assets"),
    vocab_size: int = 2048,
    kind: Literal["bpe", "bytes"] = "bpe",
    sources: Path | None = None,
) -> None:
    """Write a tokenizer for model.hf_assets_path, trained on Python sources.

    Nothing is downloaded. A tokenizer that is there already is replaced if it was made by this command.

    Args:
        output: Folder to write tokenizer.json and tokenizer_config.json to.
        vocab_size: Tokens in all, at most the model's vocabulary (2048 for torchtitan's debug models).
        kind: Byte-pair encoding, or one token a byte (longer documents).
        sources: Folder of .py and .txt files to use instead of the standard library's sources.
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
    texts = training_sample(read_sources(sources))
    folder = prepare_tokenizer(
        output, vocab_size, kind, texts=texts, show_progress=True
    )
    load_planner()  # so that the ranks of the first run find the planners compiled
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shown = printable(folder)
    tokens = tokenizer.get_vocab_size()
    print(
        f'{shown}: {kind} tokenizer with {tokens} tokens; set model.hf_assets_path = "{shown}" '
        "(--hf_assets_path with torchtitan 0.3.0)"
    )
