# SPDX-License-Identifier: BSD-3-Clause
"""Documents for training, of the same few words."""

import random
from collections.abc import Sequence

import datasets

WORDS = "core attention is stateless and can be cut anywhere along queries"


def text_dataset(
    rng: random.Random, words_per_document: Sequence[int]
) -> datasets.Dataset:
    """Return documents of as many words each."""
    texts = [
        " ".join(rng.choices(WORDS.split(), k=count)) for count in words_per_document
    ]
    return datasets.Dataset.from_dict({"text": texts})
