# SPDX-License-Identifier: BSD-3-Clause
"""Datasets, synthetic documents and tokenizers, read through torchtitan's own loader and tokenizer."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.lib.refusals import refusal
from torchtitan_cad.demo.datasets import (
    build_synthetic_dataloader,
    read_sources,
    register_datasets,
)
from torchtitan_cad.demo.synthetic import SyntheticDataset, parse_lengths
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.prepare.tokenizer import EOS_TOKEN, prepare_tokenizer

enable_cpu()

from torchtitan.components.tokenizer import HuggingFaceTokenizer, build_hf_tokenizer  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import (  # noqa: E402
    DATASETS,
    build_text_dataloader,
)

EOS = 0


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder of 60 small source files, each with its number in it."""
    folder = tmp_path_factory.mktemp("sources")
    for i in range(60):
        parent = folder / f"package{i % 7}"
        parent.mkdir(exist_ok=True)
        body = "".join(
            f"\n\ndef function_{i}_{j}(x):\n    return x + {j}\n"
            for j in range(1 + i % 5)
        )
        (parent / f"module{i}.py").write_text(
            f'"""Module {i}."""\n\nimport os\n{body}', encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def assets(tmp_path_factory, sources) -> Path:
    return prepare_tokenizer(
        tmp_path_factory.mktemp("assets"), vocab_size=400, texts=read_sources(sources)
    )


@pytest.fixture(scope="module")
def tokenizer(assets) -> HuggingFaceTokenizer:
    config = JobConfig()
    config.model.hf_assets_path = str(assets)
    return build_hf_tokenizer(config)


def loader(
    tokenizer, dataset, path, *, rank=0, ranks=1, batch=2, seq_len=64, workers=0
):
    register_datasets()
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = (
        dataset,
        None if path is None else str(path),
    )
    config.training.local_batch_size, config.training.seq_len = batch, seq_len
    config.training.dataloader.num_workers = workers
    build = (
        build_synthetic_dataloader if dataset == "synthetic" else build_text_dataloader
    )
    return build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, job_config=config
    )


def take(batches, count):
    """Inputs and labels of `count` batches: two int64 tensors [count, batch, seq_len]."""
    iterator = iter(batches)
    pairs = [next(iterator) for _ in range(count)]
    return torch.stack([inputs["input"] for inputs, _ in pairs]), torch.stack(
        [labels for _, labels in pairs]
    )


def document_lengths(tokens) -> list[int]:
    """Lengths of the documents that end in a stream of tokens, EOS included."""
    return np.diff(np.flatnonzero(tokens.numpy().ravel() == EOS), prepend=-1).tolist()


class TestSources:
    def test_shuffled_but_independent_of_the_file_system(self, sources, monkeypatch):
        walk, before = os.walk, read_sources(sources)
        monkeypatch.setattr("os.walk", lambda top: reversed(list(walk(top))))
        assert read_sources(sources) == before
        numbers = [int(text.split("Module ")[1].split(".")[0]) for text in before]
        assert numbers != sorted(numbers)

    def test_folders(self, sources, tmp_path):
        files = sorted(sources.rglob("*.py"))
        parents = sorted({file.parent for file in files})
        expected = [
            "\n".join(file.read_text() for file in files if file.parent == parent)
            for parent in parents
        ]
        documents = read_sources(sources, unit="folder")
        assert sorted(documents) == sorted(expected)
        assert documents == read_sources(sources, unit="folder")
        with refusal("training.dataset_path"):
            read_sources(tmp_path, unit="folder")

    def test_what_is_left_out(self, tmp_path):
        (tmp_path / "kept.py").write_text("kept", encoding="utf-8")
        (tmp_path / "kept.txt").write_text("kept too", encoding="utf-8")
        (tmp_path / "empty.py").write_text("\n \n", encoding="utf-8")
        (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
        (tmp_path / "image.png").write_bytes(b"png")
        for name in ("site-packages", "dist-packages", "__pycache__"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "other.py").write_text("other", encoding="utf-8")
        assert sorted(read_sources(tmp_path)) == ["kept", "kept too"]

    def test_errors_name_the_key(self, tmp_path):
        with refusal("training.dataset_path", "nowhere"):
            read_sources(tmp_path / "nowhere")
        with refusal("training.dataset_path"):
            read_sources(tmp_path)
        (tmp_path / "one.py").write_text("one", encoding="utf-8")
        with refusal("validation.dataset_path"):
            read_sources(tmp_path, "validation")


class TestSourcesLoader:
    def test_registering_keeps_torchtitans_datasets(self):
        register_datasets()
        DATASETS["of_somebody_else"] = other = DatasetConfig("", list, str)
        register_datasets()
        assert DATASETS.pop("of_somebody_else") is other
        sources = {
            f"python_{name}"
            for name in (
                "stdlib",
                "stdlib_validation",
                "packages",
                "packages_validation",
            )
        }
        assert {"c4", "c4_test", "c4_validation", *sources} <= set(DATASETS)

    def test_one_eos_between_documents(self, tokenizer, sources):
        texts = read_sources(sources)
        inputs, labels = take(loader(tokenizer, "python_stdlib", sources, batch=1), 20)
        assert torch.equal(inputs[..., 1:], labels[..., :-1])
        # torchtitan's text loader uses every seq_len + 1 tokens for one sample: the last label completes the stream.
        stream = torch.cat([inputs, labels[..., -1:]], dim=-1).ravel().tolist()
        expected = [
            token
            for text in texts
            for token in [*tokenizer.encode(text, add_eos=False), EOS]
        ]
        assert stream == expected[: len(stream)]


class TestSynthetic:
    def test_batches_and_exact_lengths(self, tokenizer):
        inputs, labels = take(
            loader(tokenizer, "synthetic", "fixed:300,200,1,5000", seq_len=128), 30
        )
        assert inputs.shape == labels.shape == (30, 2, 128)
        assert inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(inputs.ravel()[1:], labels.ravel()[:-1])
        assert document_lengths(inputs) == [300, 200, 1, 5000, 300, 200, 1]
        assert inputs.min() >= 0
        assert inputs.max() < tokenizer.get_vocab_size()

    def test_lognormal(self):
        distribution = parse_lengths("lognormal:median=100,sigma=1.5,max=2000,seed=3")
        lengths = np.array(
            [distribution.draw(i, np.random.default_rng(i)) for i in range(20_000)]
        )
        assert lengths.min() >= 1
        assert lengths.max() == 2000
        # Quartiles of a normal distribution are 0.6745 standard deviations from the mean.
        expected = 100 * np.exp(1.5 * np.array([-0.6745, 0, 0.6745]))
        assert np.percentile(lengths, (25, 50, 75)) == pytest.approx(expected, rel=0.1)

    def test_ranks_redistribute_one_stream(self, tokenizer):
        spec, ranks = "lognormal:median=20,sigma=1,max=100,seed=5", 4
        all_documents = SyntheticDataset(
            spec, eos_id=EOS, vocab_size=tokenizer.get_vocab_size(), seq_len=8
        )
        for rank in range(ranks):
            inputs, _ = take(
                loader(tokenizer, "synthetic", spec, rank=rank, ranks=ranks), 3
            )
            stream = inputs.ravel().numpy()
            expected = np.concatenate(
                [all_documents.tokens(i) for i in range(rank, 400, ranks)]
            )
            assert np.array_equal(stream, expected[: len(stream)])

    @pytest.mark.parametrize(
        ("dataset", "workers"),
        [("python_stdlib", 0), ("synthetic", 0), ("synthetic", 2)],
    )
    def test_resume(self, tokenizer, sources, dataset, workers):
        path = (
            "lognormal:median=50,sigma=1,max=1000"
            if dataset == "synthetic"
            else sources
        )
        whole, resumed = (
            loader(tokenizer, dataset, path, rank=1, ranks=2, workers=workers)
            for _ in range(2)
        )
        iterator = iter(whole)
        for _ in range(5):
            next(iterator)
        resumed.load_state_dict(whole.state_dict())
        for mine, expected in zip(take(resumed, 4), take(iterator, 4), strict=True):
            assert torch.equal(mine, expected)

    def test_another_spec_in_the_checkpoint(self):
        datasets = [
            SyntheticDataset(f"fixed:{n}", eos_id=0, vocab_size=9, seq_len=8)
            for n in (5, 6)
        ]
        with refusal("training.dataset_path", "fixed:6"):
            datasets[1].load_state_dict(datasets[0].state_dict())

    @pytest.mark.parametrize(
        "spec",
        [
            None,
            "uniform:1,2",
            "lognormal:median=4096",
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
    def test_spec_errors(self, spec):
        with refusal("training.dataset_path", spec and f'"{spec}"'):
            parse_lengths(spec)

    @pytest.mark.parametrize(
        "content", ["[]", "[1, 0]", "[1.5]", '{"a": 1}', "[1,", "[true]"]
    )
    def test_bad_histogram(self, tmp_path, content):
        (tmp_path / "lengths.json").write_text(content)
        with refusal("training.dataset_path"):
            parse_lengths(f"histogram:{tmp_path / 'lengths.json'}")

    def test_needs_eos(self):
        with refusal("training.dataset"):
            SyntheticDataset("fixed:5", eos_id=None, vocab_size=9, seq_len=8)


class TestTokenizer:
    TEXT = "def f(x):\n    return 'é∑🙂' + x  # \t tab\r\n"

    @pytest.mark.parametrize(("kind", "size"), [("bpe", 400), ("bytes", 257)])
    def test_round_trip_through_torchtitan(self, tmp_path, sources, kind, size):
        config = JobConfig()
        config.model.hf_assets_path = str(
            prepare_tokenizer(tmp_path, 400, kind, read_sources(sources))
        )
        tokenizer = build_hf_tokenizer(config)
        assert tokenizer.get_vocab_size() == size
        assert (tokenizer.eos_id, tokenizer.bos_id) == (EOS, None)
        # As torchtitan's text loader calls it: one EOS at the end, nothing in front.
        tokens = tokenizer.encode(self.TEXT, add_bos=True, add_eos=True)
        assert tokens.index(EOS) == len(tokens) - 1
        assert tokenizer.decode(tokens[:-1]) == self.TEXT
        assert tokenizer.decode(tokens) == self.TEXT
        if kind == "bytes":
            assert len(tokens) == len(self.TEXT.encode()) + 1

    def test_what_was_made_otherwise_is_made_again(self, tmp_path):
        made = prepare_tokenizer(tmp_path, 300, texts=["one two"]) / "tokenizer.json"
        first, time = made.read_bytes(), made.stat().st_mtime_ns
        prepare_tokenizer(tmp_path, 300, texts=["one two"])
        assert made.stat().st_mtime_ns == time, "the same again"
        other = prepare_tokenizer(tmp_path / "other", 300, texts=["other words"])
        # as an interrupted run would, between both files
        made.write_bytes((other / "tokenizer.json").read_bytes())
        assert made.read_bytes() != first
        prepare_tokenizer(tmp_path, 300, texts=["one two"])
        assert made.read_bytes() == first


class TestPrepare:
    def test_command(self, tmp_path, sources, capsys):
        folder = tmp_path / "assets"
        assert (
            main(
                [
                    "prepare",
                    "--output",
                    str(folder),
                    "--vocab-size",
                    "300",
                    "--sources",
                    str(sources),
                ]
            )
            == 0
        )
        output = capsys.readouterr().out
        assert (
            Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(EOS_TOKEN)
            == EOS
        )
        assert f'model.hf_assets_path = "{folder}"' in output
