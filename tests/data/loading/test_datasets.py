from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from speedtronic.data import CharTokenizer, CorpusCharTokenizer, ShardDataset, ShardWriter
from speedtronic.data.loading.datasets import PackedDataset, SyntheticTokenDataset, TextFileTokenDataset, TokenDataset
from speedtronic.errors import DataError
from speedtronic.model import ReferenceTransformer

TEXT = "It is a truth universally acknowledged, that a text must be read in blocks."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text_path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def shard_dataset(folder: Path, block_size: int) -> ShardDataset:
    tokenizer = CharTokenizer()
    with ShardWriter(folder, tokenizer=tokenizer, shard_tokens=10) as writer:
        writer.write(tokenizer.encode_array(TEXT))
    return ShardDataset(folder, block_size)


@pytest.fixture(params=["bytes", "characters", "shards"])
def blocks(request: pytest.FixtureRequest, tmp_path: Path, text_path: Path) -> TokenDataset:
    """Blocks of 8 tokens of the same text, from each kind of source."""
    if request.param == "bytes":
        return TextFileTokenDataset(text_path, 8)
    if request.param == "characters":
        return TextFileTokenDataset(text_path, 8, CorpusCharTokenizer(map(chr, range(128))))
    return shard_dataset(tmp_path / "shards", 8)


def test_every_token_of_the_blocks_but_the_first_is_a_target_once(blocks: TokenDataset) -> None:
    assert len(blocks) == (len(TEXT) - 1) // 8 == 9

    inputs = [token for item in blocks for token in item["input_ids"].tolist()]
    labels = [token for item in blocks for token in item["labels"].tolist()]

    assert inputs == list(TEXT.encode()[:72])
    assert labels == list(TEXT.encode()[1:73])


def test_samples_are_rows_of_int64(blocks: TokenDataset) -> None:
    item = blocks[2]

    assert item["input_ids"].shape == item["labels"].shape == (8,)
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(item["input_ids"][1:], item["labels"][:-1])


def test_a_batch_is_its_samples(blocks: TokenDataset) -> None:
    batch = blocks.batch([7, 0, 3])

    for name in ("input_ids", "labels"):
        assert torch.equal(batch[name], torch.stack([blocks[index][name] for index in (7, 0, 3)]))
        assert batch[name].is_contiguous()


def test_indices_count_from_the_end_too_and_end_with_the_data(blocks: TokenDataset) -> None:
    assert torch.equal(blocks[-1]["labels"], blocks[8]["labels"])
    with pytest.raises(IndexError):
        blocks[9]


def test_a_part_holds_its_range_and_has_its_own_fingerprint(blocks: TokenDataset) -> None:
    part = blocks.part(3, 6)

    assert [item["labels"].tolist() for item in part] == [blocks[i]["labels"].tolist() for i in (3, 4, 5)]
    assert len({blocks.fingerprint, part.fingerprint, blocks.part(3, 7).fingerprint}) == 3
    with pytest.raises(IndexError):
        part[3]


def documents(folder: Path, lengths: Iterable[int], shard_tokens: int = 10) -> Path:
    """Shards of documents of these lengths, separators included, a few tokens in each file."""
    tokenizer = CharTokenizer()
    with ShardWriter(folder, tokenizer=tokenizer, shard_tokens=shard_tokens) as writer:
        for length in lengths:
            writer.write(tokenizer.encode_array("x" * (length - 1)))
            writer.end_document()
    return folder


def test_documents_are_counted_within_each_sample(tmp_path: Path) -> None:
    dataset = ShardDataset(documents(tmp_path / "shards", [3, 5, 1, 7, 1, 20]), 8, document_mask=True)
    batch = dataset.batch([0, 1, 2, 3])
    assert batch["document_ids"].tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["document_ids"].dtype == torch.int64
    # A separator, 0 as a byte, is the last token of its document.
    ends = batch["input_ids"][:, :-1] == 0
    assert torch.equal(ends, batch["document_ids"].diff() == 1)


def test_parts_and_single_samples_have_their_documents_too(tmp_path: Path) -> None:
    dataset = ShardDataset(documents(tmp_path / "shards", [3, 5, 1, 7, 1, 20]), 8, document_mask=True)
    part = dataset.part(1, 3)
    assert torch.equal(part.batch([0, 1])["document_ids"], dataset.batch([1, 2])["document_ids"])
    assert torch.equal(part[1]["document_ids"], dataset[2]["document_ids"])
    assert part[1].keys() == {"input_ids", "labels", "document_ids"}


def test_samples_have_no_documents_unless_asked_for(tmp_path: Path) -> None:
    folder = documents(tmp_path / "shards", [9, 9])
    plain, masked = ShardDataset(folder, 8), ShardDataset(folder, 8, document_mask=True)
    assert plain[0].keys() == {"input_ids", "labels"}
    assert plain.fingerprint == masked.fingerprint


@pytest.mark.parametrize("source", ["shards", "cache"])
def test_a_damaged_token_that_reaches_a_batch_names_its_folder(tmp_path: Path, text_path: Path, source: str) -> None:
    dataset: TokenDataset
    if source == "shards":
        folder, dataset = tmp_path / "shards", shard_dataset(tmp_path / "shards", 8)
    else:
        dataset = TextFileTokenDataset(text_path, 8, CorpusCharTokenizer(map(chr, range(128))))
        (folder,) = (tmp_path / "cache").iterdir()
    shard = folder / "shard_00000.bin"
    content = bytearray(shard.read_bytes())
    content[32 + 2 * 3 + 1] ^= 0x80  # the high byte of token 3
    shard.write_bytes(content)

    with pytest.raises(DataError, match=rf"{folder}: holds the token id \d{{5}}, .*inspect {folder} --verify"):
        dataset.batch([0, 1])
    assert dataset.batch([1, 2])["labels"].tolist() == [list(TEXT.encode()[9:17]), list(TEXT.encode()[17:25])]


def test_a_dataset_pickles(blocks: TokenDataset) -> None:
    assert blocks[4]["labels"].tolist() == pickle.loads(pickle.dumps(blocks))[4]["labels"].tolist()


class Streamed(IterableDataset[torch.Tensor]):
    def __init__(self, dataset: TokenDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (item["labels"] for item in self.dataset)


def test_iterating_in_workers_yields_each_block_once(text_path: Path) -> None:
    dataset = TextFileTokenDataset(text_path, 8)

    streamed = list(DataLoader(Streamed(dataset), batch_size=None, num_workers=2))

    assert sorted(row.tolist() for row in streamed) == sorted(item["labels"].tolist() for item in dataset)


def test_equal_blocks_are_recognised_wherever_the_text_lies(tmp_path: Path, text_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT)
    other = tmp_path / "other.txt"
    other.write_text(TEXT.lower())
    first = TextFileTokenDataset(text_path, 8).fingerprint

    assert TextFileTokenDataset(copy, 8).fingerprint == first
    assert TextFileTokenDataset(other, 8).fingerprint != first
    assert TextFileTokenDataset(text_path, 9).fingerprint != first


def test_text_of_exactly_one_block_and_its_last_target_is_enough(text_path: Path) -> None:
    assert len(TextFileTokenDataset(text_path, len(TEXT) - 1)) == 1


def test_text_shorter_than_a_block_names_both_sizes(tmp_path: Path, text_path: Path) -> None:
    with pytest.raises(DataError, match=rf"text\.txt: has {len(TEXT)} tokens, but one block of 100 needs 101"):
        TextFileTokenDataset(text_path, 100)
    with pytest.raises(DataError, match=f"shards: has {len(TEXT)} tokens, but one block of 100 needs 101"):
        shard_dataset(tmp_path / "shards", 100)


def test_a_block_of_no_tokens_is_refused(text_path: Path) -> None:
    with pytest.raises(DataError, match="block_size must be at least 1, not 0"):
        TextFileTokenDataset(text_path, 0)


def test_byte_text_is_held_against_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("é" * 10)

    assert len(TextFileTokenDataset(path, 4, vocab_size=200)) == 4
    with pytest.raises(DataError, match=r"0xc3 .* vocabulary of 128"):
        TextFileTokenDataset(path, 4, vocab_size=128)


class Bare:
    """The least that encodes: nothing to be recognised by, so nothing to find it by in a cache."""

    vocab_size = 128
    separator_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(map(chr, ids))


def test_a_tokenizer_without_a_spec_works_from_memory(tmp_path: Path, text_path: Path) -> None:
    dataset = TextFileTokenDataset(text_path, 8, Bare())  # type: ignore[arg-type]

    assert dataset[1]["labels"].tolist() == list(TEXT.encode()[9:17])
    assert not (tmp_path / "cache").exists()


def test_a_synthetic_sample_is_a_function_of_seed_and_index() -> None:
    dataset = SyntheticTokenDataset(num_samples=50, block_size=16, vocab_size=97, seed=3)
    rows = [dataset[index]["input_ids"].tolist() for index in range(50)]

    assert [dataset[index]["input_ids"].tolist() for index in reversed(range(50))] == rows[::-1]
    assert SyntheticTokenDataset(80, 16, 97, 3)[7]["input_ids"].tolist() == rows[7]
    assert SyntheticTokenDataset(50, 16, 97, 4)[7]["input_ids"].tolist() != rows[7]
    assert len({tuple(row) for row in rows}) == 50


def test_synthetic_samples_are_the_same_in_every_version() -> None:
    assert SyntheticTokenDataset(10, 8, 100, 1234)[5]["input_ids"].tolist() == [17, 96, 55, 4, 8, 12, 16, 20]


def test_synthetic_tokens_fit_the_vocabulary_and_are_aligned() -> None:
    batch = SyntheticTokenDataset(64, 128, 11, 0).batch(range(64))

    assert batch["input_ids"].min() == 0
    assert batch["input_ids"].max() == 10
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


def test_most_synthetic_tokens_can_be_predicted() -> None:
    rows = SyntheticTokenDataset(100, 64, 512, 0).rows(range(100))
    strides = np.diff(rows, axis=1) % 512
    usual = np.array([np.bincount(row).argmax() for row in strides])

    assert set(usual) == {1, 2, 3, 4}
    assert 0.7 < (strides == usual[:, None]).mean() < 0.9


@pytest.mark.parametrize("name", ["num_samples", "block_size", "vocab_size"])
def test_synthetic_data_of_no_size_is_refused(name: str) -> None:
    sizes = {"num_samples": 1, "block_size": 1, "vocab_size": 1, "seed": 0, name: 0}

    with pytest.raises(DataError, match=f"{name} must be at least 1, not 0"):
        SyntheticTokenDataset(**sizes)


# ---------------------------------------------------------------------- targets


def with_targets(folder: Path, documents: list[tuple[list[int], list[bool]]], shard_tokens: int = 10) -> Path:
    """Shards of documents of byte ids, each ending with its separator, with which ids are targets."""
    with ShardWriter(folder, tokenizer=CharTokenizer(), shard_tokens=shard_tokens, with_targets=True) as writer:
        for ids, targets in documents:
            writer.append(np.array(ids, np.uint8), np.array([len(ids)]), np.array(targets))
    return folder


CHATS = [
    ([1, 2, 3, 4, 5, 0], [False, False, False, True, True, False]),
    ([6, 7, 8, 0], [False, True, True, True]),
    ([9, 10, 11, 12, 13, 14, 15, 16, 17, 0], [False] * 8 + [True, False]),
    ([18, 19, 0], [True, True, True]),
]


def test_labels_are_the_targets_of_the_shards(tmp_path: Path) -> None:
    dataset = ShardDataset(with_targets(tmp_path / "shards", CHATS), 11)

    assert [sample["labels"].tolist() for sample in dataset] == [
        [-100, -100, 4, 5, -100, -100, 7, 8, 0, -100, -100],
        [-100, -100, -100, -100, -100, -100, 17, -100, 18, 19, 0],
    ]
    assert dataset[1]["input_ids"].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 0, 18, 19]


# ---------------------------------------------------------------------- packing


def pieces(dataset: PackedDataset) -> list[tuple[list[int], list[int]]]:
    """The inputs and labels of each piece, by what the document ids say, without padding."""
    found = []
    for sample in dataset:
        ids = sample["document_ids"]
        for number in range(int(ids.max()) + 1):
            inputs, labels = sample["input_ids"][ids == number].tolist(), sample["labels"][ids == number].tolist()
            if number < int(ids.max()) or set(labels) != {-100}:
                found.append((inputs, labels))
    return sorted(found)


def test_packed_samples_hold_whole_documents_whose_ends_predict_nothing(tmp_path: Path) -> None:
    dataset = PackedDataset(with_targets(tmp_path / "shards", CHATS), 8, document_mask=True)

    assert pieces(dataset) == [
        ([1, 2, 3, 4, 5], [-100, -100, 4, 5, -100]),
        ([6, 7, 8], [7, 8, 0]),
        ([9, 10, 11, 12, 13, 14, 15, 16], [-100] * 7 + [17]),  # a document of 9 places is divided
        ([17], [-100]),
        ([18, 19], [19, 0]),
    ]
    assert len(dataset) == 3


def test_each_token_but_the_first_of_its_document_is_a_target_once(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300).tolist()
    folder = documents(tmp_path / "shards", lengths, shard_tokens=1000)
    dataset = PackedDataset(folder, 16)

    labels = torch.stack([sample["labels"] for sample in dataset])
    assert int((labels != -100).sum()) == sum(length - 1 for length in lengths)
    assert dataset[0].keys() == {"input_ids", "labels"}
    # Little is padding, and the end of the data is like the rest.
    filled = (labels != -100).float().mean(1)
    assert filled.mean() > 0.97
    assert abs(filled[-50:].mean() - filled.mean()) < 0.05


def test_a_document_without_an_end_is_packed_too(tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    with ShardWriter(tmp_path / "shards", tokenizer=tokenizer) as writer:
        writer.write(tokenizer.encode_array("abc"))
        writer.end_document()
        writer.write(tokenizer.encode_array("defgh"))
    dataset = PackedDataset(tmp_path / "shards", 7)

    assert sorted(dataset[0]["labels"].tolist()) == [0, *b"bc", *b"efgh"]


def test_packed_batches_parts_and_workers_agree(tmp_path: Path) -> None:
    dataset = PackedDataset(documents(tmp_path / "shards", range(2, 40)), 16, document_mask=True)
    batch = dataset.batch(np.array([5, 0, 3]))

    for name in ("input_ids", "labels", "document_ids"):
        assert torch.equal(batch[name], torch.stack([dataset[index][name] for index in (5, 0, 3)]))
        assert torch.equal(dataset.part(3, 6)[0][name], dataset[3][name])
        assert torch.equal(pickle.loads(pickle.dumps(dataset))[5][name], dataset[5][name])
    assert len({dataset.fingerprint, ShardDataset(dataset.shards, 16).fingerprint}) == 2


def test_documents_of_one_token_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document has two tokens"):
        PackedDataset(documents(tmp_path / "shards", [1, 1]), 4)


@pytest.mark.parametrize("options", [{}, {"n_kv_head": 1, "qk_norm": True}, {"ngram_order": 3}], ids=str)
def test_the_loss_of_packed_documents_is_that_of_each_one_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ReferenceTransformer(vocab_size=256, block_size=32, n_layer=2, n_head=2, d_model=32, **options)
    chance = np.random.default_rng(0)
    documents = []
    for length in chance.integers(2, 34, 40).tolist():
        documents.append(([*chance.integers(1, 256, length - 1).tolist(), 0], (chance.random(length) < 0.6).tolist()))
    dataset = PackedDataset(with_targets(tmp_path / "shards", documents, 400), 32, document_mask=True)
    packed = model(**dataset.batch(range(len(dataset))))["loss"].detach()

    total, count = 0.0, 0
    for ids, targets in documents:
        labels = torch.tensor([[each if target else -100 for each, target in zip(ids, targets, strict=True)][1:]])
        own = int((labels != -100).sum())
        total += own * float(model(torch.tensor([ids[:-1]]), labels=labels)["loss"].detach())
        count += own
    assert float(packed) == pytest.approx(total / count, abs=1e-5)

    # Without the mask the documents see each other.
    unmasked = PackedDataset(dataset.shards, 32)
    seen = model(**unmasked.batch(range(len(unmasked))))["loss"].detach()
    assert abs(float(seen) - total / count) > 1e-4
