"""What jobs of test_workers.py import (`custom_import`): how workers start, and data that cannot be read."""

import dataclasses
import multiprocessing
import os
from typing import Any

from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_cad.demo.datasets import register_datasets


class Breaking:
    """Takes the text of documents as they come, up to the one that cannot be read, if it is not number 0."""

    def __init__(self, breaks_at: int) -> None:
        self._left = breaks_at

    def __call__(self, sample: dict[str, Any]) -> str:
        self._left -= 1
        if self._left == 0:
            raise OSError("a document cannot be read")
        return sample["text"]


if multiprocessing.get_start_method(allow_none=True) is None:  # not in a worker, which imports this for Breaking
    multiprocessing.set_start_method(os.environ["WORKER_START_METHOD"])  # torchtitan 0.2.2 has no option for it
    register_datasets()
    breaking = Breaking(4 if os.environ["RANK"] == "1" else 0)
    DATASETS["breaking"] = dataclasses.replace(DATASETS["python_stdlib"], sample_processor=breaking)
