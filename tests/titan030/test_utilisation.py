# SPDX-License-Identifier: BSD-3-Clause
"""`cad/mfu(%)` with torchtitan 0.3.0: its count of a row's attention is the one that is replaced."""

import json

import pytest
import torch

from tests.titan030 import tiny
from tests.titan030.harness import run
from torchtitan_cad.integration.torchtitan_v0_3.job import recipe_kinds
from torchtitan_cad.planning.model.work import attention_flops

ROW = 4096


@pytest.mark.parametrize("name", tiny.RECIPES)
def test_linear_work_is_what_torchtitan_counts_for_rows_of_no_tokens(name):
    config = tiny.recipe(name)
    config.training.seq_len = ROW
    model_config = config.model_spec.model
    with torch.device("meta"):
        model = model_config.build()
    _, with_rows = model_config.get_nparams_and_flops(model, ROW)
    _, linear = model_config.get_nparams_and_flops(model, 0)
    kinds = recipe_kinds(config, tp=1)
    assert with_rows - attention_flops(kinds, [ROW] * len(kinds)) == linear


def test_a_job_says_what_its_documents_take(tmp_path):
    run("llama3", dump_folder=tmp_path)
    (file,) = tmp_path.rglob("cad_steps.jsonl")
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    config = tiny.recipe("llama3")
    for step in steps:
        (keys,) = step["pairs_per_token"]
        assert 1 <= keys <= (config.training.seq_len + 1) / 2
        assert step["tokens_per_second"] > 0
        assert step["mfu_percent"] > 0
