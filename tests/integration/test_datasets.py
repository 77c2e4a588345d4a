# SPDX-License-Identifier: BSD-3-Clause
"""Datasets, synthetic documents and tokenizers, read through torchtitan's own loader and tokenizer."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import (
    build_text_dataloader,
)

from tests.lib.refusals import refusal
from torchtitan_cad.demo.datasets import (
    build_synthetic_dataloader,
    read_sources,
    register_datasets,
)
from torchtitan_cad.demo.lengths import parse_lengths
from torchtitan_cad.demo.synthetic import SyntheticDataset
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.prepare.tokenizer import EOS_TOKEN, prepare_tokenizer

EOS = 0


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder of 120 small source files, each with its number in it."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "package").mkdir()
    for number in range(120):
        function = f"\n\ndef function_{number}(x):\n    return x + {number}\n"
        path = folder / "package" / f"module{number}.py"
        path.write_text(function * (1 + number % 5))
    return folder


def tokenizer_in(assets: Path):
    config = JobConfig()
    config.model.hf_assets_path = str(assets)
    return build_hf_tokenizer(config)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, sources):
    folder = tmp_path_factory.mktemp("assets")
    return tokenizer_in(prepare_tokenizer(folder, 400, texts=read_sources(sources)))


def loader(tokenizer, dataset: str, path: object, *, rank=0, ranks=1, workers=0):
    """Batches of two rows of 64 tokens."""
    register_datasets()
    config = JobConfig()
    training = config.training
    training.dataset, training.dataset_path = dataset, str(path)
    training.local_batch_size = 2
    training.seq_len = 64
    training.dataloader.num_workers = workers
    is_synthetic = dataset == "synthetic"
    build = build_synthetic_dataloader if is_synthetic else build_text_dataloader
    return build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, job_config=config
    )


def take(batches, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of `count` batches: two int64 tensors [count, batch, seq_len]."""
    inputs, labels = zip(*islice(batches, count), strict=True)
    return torch.stack([batch["input"] for batch in inputs]), torch.stack(labels)


def test_what_is_left_out_of_sources(tmp_path):
    for name, content in {
        "kept.py": b"kept",
        "kept.txt": b"kept too",
        "empty.py": b"\n \n",
        "latin.py": b"# coding: latin-1\nx = '\xe9'\n",
        "image.png": b"png",
        "site-packages/other.py": b"other",
        "dist-packages/other.py": b"other",
        "__pycache__/other.py": b"other",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert sorted(read_sources(tmp_path)) == ["kept", "kept too"]


@pytest.mark.parametrize(
    ("folder", "split"),
    [
        ("nowhere", "train"),
        ("empty", "train"),
        ("", "validation"),
    ],
)
def test_errors_of_sources_name_the_key(folder, split, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "one.py").write_text("one")
    key = "training" if split == "train" else "validation"
    with refusal(f"{key}.dataset_path"):
        read_sources(tmp_path / folder, split)


def test_one_eos_between_documents(tokenizer, sources):
    texts = read_sources(sources)
    inputs, labels = take(loader(tokenizer, "python_stdlib", sources), 4)
    assert torch.equal(inputs[..., 1:], labels[..., :-1])
    # torchtitan's text loader uses every seq_len + 1 tokens for one sample: the last label completes the stream.
    stream = torch.cat([inputs, labels[..., -1:]], dim=-1).ravel().tolist()
    expected = list[int]()
    for text in texts:
        expected += [*tokenizer.encode(text, add_eos=False), EOS]
    assert stream == expected[: len(stream)]


def test_synthetic_documents_have_exact_lengths(tokenizer):
    spec = "fixed:300,200,1,5000"
    inputs, labels = take(loader(tokenizer, "synthetic", spec), 60)
    assert inputs.shape == labels.shape == (60, 2, 64)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs.ravel()[1:], labels.ravel()[:-1])
    ends = torch.where(inputs.ravel() == EOS)[0]
    assert np.diff(ends, prepend=-1).tolist() == [300, 200, 1, 5000, 300, 200, 1]
    assert 0 <= inputs.min() <= inputs.max() < tokenizer.get_vocab_size()


def test_lognormal_lengths():
    draw = parse_lengths("lognormal:median=100,sigma=1.5,max=2000,seed=3").draw
    lengths = np.array([draw(i, np.random.default_rng(i)) for i in range(4000)])
    assert (lengths.min(), lengths.max()) == (1, 2000)
    # The upper quartile of a normal distribution is 0.6745 standard deviations from its mean.
    expected = [100, 100 * np.exp(1.5 * 0.6745)]
    assert np.percentile(lengths, (50, 75)) == pytest.approx(expected, rel=0.1)


def synthetic(spec: str, eos_id: int | None = EOS) -> SyntheticDataset:
    return SyntheticDataset(spec, eos_id=eos_id, vocab_size=400, seq_len=8)


def test_ranks_redistribute_one_stream(tokenizer):
    spec = "lognormal:median=20,sigma=1,max=100,seed=5"
    for rank in range(4):
        inputs, _ = take(loader(tokenizer, "synthetic", spec, rank=rank, ranks=4), 3)
        documents = [synthetic(spec).tokens(i) for i in range(rank, 400, 4)]
        stream = np.concatenate(documents)[: inputs.numel()]
        assert np.array_equal(inputs.ravel(), stream)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes(tokenizer, sources, workers):
    spec = "lognormal:median=50,sigma=1,max=1000"
    data = ("synthetic", spec) if workers else ("python_stdlib", sources)
    whole, resumed = (
        loader(tokenizer, *data, rank=1, ranks=2, workers=workers) for _ in range(2)
    )
    iterator = iter(whole)
    take(iterator, 5)
    resumed.load_state_dict(whole.state_dict())
    for found, expected in zip(take(resumed, 4), take(iterator, 4), strict=True):
        assert torch.equal(found, expected)


def test_another_spec_in_the_checkpoint():
    with refusal("training.dataset_path", "fixed:6"):
        synthetic("fixed:6").load_state_dict(synthetic("fixed:5").state_dict())


@pytest.mark.parametrize(
    "spec",
    [
        None,
        "uniform:1,2",
        "lognormal:4096",
        "lognormal:median=4096,sigma=1,max=9,mean=3",
        "lognormal:median=many,sigma=1,max=9",
        "lognormal:median=nan,sigma=1,max=9",
        "lognormal:median=9,sigma=-1,max=9",
        "fixed:",
        "fixed:300,0",
        "fixed:300,2.5",
        "fixed:300,seed=-1",
        "histogram:",
        "histogram:no/such.json",
    ],
)
def test_spec_errors(spec):
    with refusal("training.dataset_path", spec and f'"{spec}"'):
        parse_lengths(spec)


def test_synthetic_documents_need_eos():
    with refusal("training.dataset"):
        synthetic("fixed:5", eos_id=None)


TEXT = "def f(x):\n    return 'é∑🙂' + x  # \t tab\r\n"


@pytest.mark.parametrize(
    ("kind", "size"), [("bpe", 400), ("bytes", 257)], ids=["bpe", "bytes"]
)
def test_round_trip_through_torchtitan(tmp_path, sources, kind, size):
    assets = prepare_tokenizer(tmp_path, 400, kind, read_sources(sources))
    tokenizer = tokenizer_in(assets)
    assert tokenizer.get_vocab_size() == size
    assert (tokenizer.eos_id, tokenizer.bos_id) == (EOS, None)
    # As torchtitan's text loader calls it: one EOS at the end, nothing in front.
    tokens = tokenizer.encode(TEXT, add_bos=True, add_eos=True)
    assert tokens.index(EOS) == len(tokens) - 1
    assert tokenizer.decode(tokens) == TEXT


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_a_tokenizer_of_another_origin_is_kept(name, tmp_path):
    other = tmp_path / name
    other.write_text("of a model")
    with refusal(str(tmp_path), remedy="another folder"):
        prepare_tokenizer(tmp_path, 300, texts=["one two"])
    assert other.read_text() == "of a model"


def test_prepare(tmp_path, sources, capsys):
    options = f"--output={tmp_path}", "--vocab-size=300", f"--sources={sources}"
    assert main(["prepare", *options]) == 0
    assert f'model.hf_assets_path = "{tmp_path}"' in capsys.readouterr().out
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.token_to_id(EOS_TOKEN) == EOS
