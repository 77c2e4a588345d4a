# SPDX-License-Identifier: BSD-3-Clause
"""Lengths of named corpora: what their files say is what is drawn."""

import pytest

from torchtitan_cad.tools.options import Options, read_inputs
from torchtitan_cad.tools.simulation.batches import CORPORA, named_lengths, read_corpus


def test_the_corpora_are_found():
    assert set(CORPORA) == {"codealpaca", "prolong-64k", "prolong-512k", "pypi"}


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_says_where_it_is_from(name):
    source = read_corpus(name)["source"]
    assert "github.com/" in source or "pip install" in source
    asked = Options(model="llama-8b", ranks=8, documents=name)
    inputs, notes, _ = read_inputs(None, (), asked)
    assert inputs.documents.lengths.min() >= 1
    assert any(source in note for note in notes)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("prolong-64k", {65_536: 0.6}), ("prolong-512k", {65_536: 0.4, 524_288: 0.2})],
)
def test_a_mixture_has_its_shares_of_tokens(name, wanted):
    lengths = named_lengths(name)
    for length, share in wanted.items():
        tokens = lengths[lengths == length].sum() / lengths.sum()
        assert tokens == pytest.approx(share, abs=0.02)
