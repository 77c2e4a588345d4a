# SPDX-License-Identifier: BSD-3-Clause
"""Parts of `python -m bench.gpu` by themselves: what they find, and the plans that they run."""

import pytest

from bench.gpu.parts import Part
from bench.gpu.process import run_part


@pytest.mark.matrix
def test_a_word_that_is_posted_before_its_rows_is_found():
    """That there is none otherwise, `make bench-gpu-dry` shows."""
    function = "tests.bench.fake_parts:posts_too_early"
    fault = run_part(Part("fault", "a planted fault", function, 300), "cpu", 300, None)
    assert fault.status == "failed"
    first = fault.figures["first_mismatches"][0]
    assert (first["round"], first["row"], first["mended"]) == (1, 0, False)
