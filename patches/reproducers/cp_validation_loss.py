# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism multiplies the validation loss, or stops it: one batch on two ranks, over gloo on CPU."""

import contextlib
import sys
import tempfile
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchtitan.distributed.parallel_dims
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig
from torchtitan.tools import utils

utils.device_type = torchtitan.distributed.parallel_dims.device_type = "cpu"
TOKENS, VOCAB, RANKS = 32, 16, 2


class Model(torch.nn.Embedding):
    """Logits of the next token, without attention: labels are what is counted."""

    # as of torchtitan's models with SDPA
    get_attention_masks = MagicMock(side_effect=TypeError)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)


def validate(rank: int, folder: str, ratios: torch.Tensor) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model, (tokens, labels) = Model(VOCAB, VOCAB), torch.randint(VOCAB, (2, 1, TOKENS))
    expected = cross_entropy_loss(model(tokens, tokens), labels) / TOKENS
    for i, has_freqs_cis in enumerate((True, False)):  # as llama3, and as qwen3
        if has_freqs_cis:
            model.freqs_cis = torch.zeros(TOKENS)
        else:
            del model.freqs_cis
        validator = object.__new__(Validator)
        vars(validator).update(
            job_config=JobConfig(),
            tokenizer=None,
            parallel_dims=torchtitan.distributed.ParallelDims(
                1, 1, RANKS, 1, 1, 1, 1, world_size=RANKS
            ),
            validation_dataloader=[({"input": tokens}, labels)],
            validation_context=contextlib.nullcontext,
            maybe_enable_amp=contextlib.nullcontext(),
            loss_fn=cross_entropy_loss,
            metrics_processor=MagicMock(),
        )
        with contextlib.suppress(AttributeError):
            validator.validate([model], step=1)
            ratios[i] = (
                validator.metrics_processor.log_validation.call_args.kwargs["loss"]
                / expected
            )


if __name__ == "__main__":
    ratios = torch.full((2,), torch.nan).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            validate, (folder, ratios), nprocs=RANKS, start_method="fork"
        )
    if not torch.allclose(ratios, torch.ones(2)):
        sys.exit(
            f"validation losses with CP {RANKS} are {ratios.tolist()} times one rank's (nan: AttributeError)"
        )
