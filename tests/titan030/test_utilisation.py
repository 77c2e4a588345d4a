# SPDX-License-Identifier: BSD-3-Clause
"""`cad/mfu(%)` with torchtitan 0.3.0: its count of a row's attention is the one that is replaced."""

import pytest
import torch

from tests.titan030 import tiny
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
