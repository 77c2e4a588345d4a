# SPDX-License-Identifier: BSD-3-Clause
"""The first tokens of a job's dataset, drawn by a thread, as a dataset may answer late or never."""

import copy
import threading
from collections.abc import Callable
from typing import Any

from torchtitan_cad.integration.torchtitan_v0_2.inputs import open_dataset

PATIENCE_S = 30.0
"""seconds: a dataset's to answer, longer than the hub's client takes to find that there is no network."""
SAMPLE_TOKENS = 2**16
"""tokens: the most that are drawn"""
DRAWING = "doctor draws from a dataset"
"""name of the thread"""


def first_batch(
    section: str, config: Any, build: Callable[..., Any], *, tokenizer: Any, ranks: int
) -> dict[str, Any] | None:
    """Return the first batch of rank 0 of ``ranks``, empty without a tokenizer; None if there is no answer yet.

    Args:
        section: "training" or "validation".
        build: of torchtitan's TrainSpec.

    Raises what the dataset raises, and ValueError where it holds less than a batch.
    """
    small = _small_batches(section, config)
    answers: list[Any] = []

    def draw() -> None:
        try:
            # the last one has the fewest documents
            for rank in (ranks - 1, 0):
                loader = open_dataset(
                    section,
                    build,
                    job_config=small,
                    tokenizer=tokenizer,
                    dp_world_size=ranks,
                    dp_rank=rank,
                )
            answers.append(next(iter(loader))[0] if tokenizer else {})
        except StopIteration:
            name = getattr(config, section).dataset
            text = f"{section}.dataset = {name!r}: rank 0 gets less than one batch; set a larger one"
            answers.append(ValueError(text))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=draw, name=DRAWING, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not answers:
        return None
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def is_drawing() -> bool:
    """Tell whether a dataset that gave no answer is still being read, by a thread that no one waits for."""
    return any(thread.name == DRAWING for thread in threading.enumerate())


def _small_batches(section: str, config: Any) -> Any:
    """Return a config with batches of at most ``SAMPLE_TOKENS`` tokens, loaded by this process."""
    small = copy.deepcopy(config)
    table = getattr(small, section)
    table.seq_len = min(max(table.seq_len, 1), SAMPLE_TOKENS)
    most_rows = SAMPLE_TOKENS // table.seq_len
    table.local_batch_size = min(max(table.local_batch_size, 1), most_rows)
    table.dataloader.num_workers = 0
    return small
