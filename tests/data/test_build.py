from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from speedtronic.config import ConfigError, DataConfig, SpeedtronicConfig
from speedtronic.data import (
    CharTokenizer,
    CorpusCharTokenizer,
    ShardWriter,
    Tokenizer,
    TokenLoader,
    build_data,
    build_dataloader,
)
from speedtronic.data.build import Loader, open_tokenizer
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.prepare.train_tokenizer import train_tokenizer
from speedtronic.errors import DataError
from tests.support.chat import CHATML, ids_by_hand, tokenizer_folder

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text_path(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    tokenizer = CharTokenizer()
    with ShardWriter(tmp_path / "shards", tokenizer=tokenizer) as writer:
        writer.write(tokenizer.encode_array(TEXT))
    return str(tmp_path / "shards")


def config(*, vocab_size: int = 256, block_size: int = 8, **data: Any) -> SpeedtronicConfig:
    model = {"vocab_size": vocab_size, "max_seq_len": block_size}
    return SpeedtronicConfig.from_dict({"model": model, "data": data})


def labels(loader: Loader) -> list[int]:
    return [token for batch in loader for token in batch["labels"].flatten().tolist()]


class Squares(Dataset[tuple[int, int]]):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module with factories."""
    module = ModuleType("some_user_data")
    vars(module).update(
        squares=lambda data: Squares(2 * data.micro_batch_size),
        pair=lambda data: (Squares(6), Squares(3)),
        stream=lambda data: Stream(),
        streaming_validation=lambda data: (Squares(6), Stream()),
        mapping=lambda data: {"train": Squares(6)},
        generator=lambda data: (number for number in range(3)),
        unsized=lambda data: Unsized(),
        nothing=lambda data: 3,
        a_class=lambda data: Squares,
        triple=lambda data: (Squares(6), Squares(3), Squares(3)),
        list_of_two=lambda data: [Squares(6), Squares(3)],
        rows=lambda data: [{"input_ids": [1, 2, 9], "labels": [2, 9, -100]}],
        constant="/",
        failing=lambda data: {}["key"],
    )
    monkeypatch.setitem(sys.modules, "some_user_data", module)
    return "some_user_data"


def test_without_a_source_data_is_synthetic_and_counted_in_tokens() -> None:
    data = build_data(config(num_tokens=83, vocab_size=20), pin_memory=False)

    assert isinstance(data.train, TokenLoader)
    assert len(data.train) == 10
    assert max(labels(data.train)) < 20
    assert data.validation is None
    assert data.tokenizer is None


def test_text_is_read_as_bytes(text_path: str) -> None:
    data = build_data(config(text_path=text_path), pin_memory=False)

    assert labels(data.train) == list(TEXT.encode()[1:73])
    assert data.tokenizer is not None
    assert data.tokenizer.decode(labels(data.train)) == TEXT[1:73]


def test_the_byte_tokenizer_names_no_ids_that_text_cannot_have(text_path: str) -> None:
    data = build_data(config(text_path=text_path, vocab_size=512), pin_memory=False)

    assert data.tokenizer is not None
    assert data.tokenizer.vocab_size == 256


def test_text_is_read_as_the_characters_that_it_has(text_path: str) -> None:
    data = build_data(config(text_path=text_path, tokenizer="chars"), pin_memory=False)

    assert isinstance(data.tokenizer, CorpusCharTokenizer)
    assert data.tokenizer.vocab_size == len({*TEXT, "\0"})
    assert data.tokenizer.decode(labels(data.train)) == TEXT[1:73]


def test_shards_bring_their_own_tokenizer(shards: str) -> None:
    data = build_data(config(shards=shards), pin_memory=False)

    assert labels(data.train) == list(TEXT.encode()[1:73])
    assert isinstance(data.tokenizer, CharTokenizer)


def test_documents_of_shards_are_packed_where_that_is_asked_for(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer:
        for text in ("abcde", "fgh"):
            writer.write(CharTokenizer().encode_array(text))
            writer.end_document()

    data = build_data(config(shards=str(tmp_path / "s"), packing="best_fit", document_mask=True), pin_memory=False)

    (batch,) = data.train
    assert batch["input_ids"].tolist() == [list(b"abcdefgh")]
    assert batch["labels"].tolist() == [[*b"bcde", 0, *b"gh", 0]]
    assert batch["document_ids"].tolist() == [[0] * 5 + [1] * 3]


def prepared(folder: Path, texts: list[str], tokenizer: Tokenizer | None = None) -> str:
    with ShardWriter(folder, tokenizer=tokenizer or CharTokenizer()) as writer:
        for text in texts:
            writer.write(CharTokenizer().encode_array(text))
            writer.end_document()
    return str(folder)


def test_a_mixture_holds_out_the_end_of_each_source(tmp_path: Path) -> None:
    weights = {prepared(tmp_path / "a", ["a" * 799]): 3, prepared(tmp_path / "b", ["b" * 399]): 1}
    data = build_data(config(mixture=weights, validation_fraction=0.1, shuffle=True), pin_memory=False)

    assert data.validation is not None
    held_out = [bytes([int(batch["input_ids"][0, 0])]) for batch in data.validation]
    assert held_out == [b"a"] * 9 + [b"b"] * 4
    train = [bytes([int(batch["input_ids"][0, 0])]) for batch in data.train]
    assert abs(train.count(b"a") / len(train) - 0.75) < 0.02
    assert isinstance(data.tokenizer, CharTokenizer)


def test_a_mixture_of_two_tokenizers_is_refused(tmp_path: Path) -> None:
    weights = {prepared(tmp_path / "a", ["aaaaaaaaaa"]): 1, prepared(tmp_path / "b", ["b" * 10], CharTokenizer(200)): 1}

    with pytest.raises(DataError, match=r"data\.mixture: .*b was made with another tokenizer than .*a, so the same id"):
        build_data(config(mixture=weights), pin_memory=False)


def test_chats_are_encoded_once_into_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    folder = tokenizer_folder(tmp_path / "t", CHATML)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "Hi"}]}\n')
    keys = {"chat": str(tmp_path / "a.jsonl"), "tokenizer": str(folder), "packing": "best_fit"}
    settings = config(vocab_size=300, block_size=16, **keys)

    (batch,) = build_data(settings, pin_memory=False).train
    expected = ids_by_hand(["<|im_start|>", "assistant\n", "Hi", "<|im_end|>", "\n"])
    assert batch["input_ids"][0, :15].tolist() == expected
    assert [each for each in batch["labels"][0].tolist() if each != -100] == expected[11:]
    (entry,) = (tmp_path / "cache").iterdir()
    written = (entry / "index.json").stat().st_mtime_ns
    build_data(settings, pin_memory=False)
    assert (entry / "index.json").stat().st_mtime_ns == written
    tokenizer = open_tokenizer(settings.data)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 265


def test_a_factory_builds_data_from_the_data_section(factory: str) -> None:
    loader = build_data(config(dataset=f"{factory}:squares", micro_batch_size=2, target_batch_size=2), pin_memory=False)

    assert [[field.tolist() for field in batch] for batch in loader.train] == [
        [[0, 1], [0, 1]],
        [[2, 3], [4, 9]],
    ]


def test_a_factory_may_bring_a_validation_part(factory: str) -> None:
    data = build_data(config(dataset=f"{factory}:pair"), pin_memory=False)

    assert data.validation is not None
    assert (len(list(data.train)), len(data.validation)) == (6, 3)


def test_a_factory_may_bring_a_stream(factory: str) -> None:
    loader = build_data(config(dataset=f"{factory}:stream", micro_batch_size=2, target_batch_size=2), pin_memory=False)

    assert [batch.tolist() for batch in loader.train] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_factory_may_bring_a_stream_to_validate_on(factory: str, num_workers: int) -> None:
    data = build_data(
        config(
            dataset=f"{factory}:streaming_validation", micro_batch_size=2, target_batch_size=2, num_workers=num_workers
        ),
        pin_memory=False,
    )
    assert isinstance(data.validation, StreamLoader)

    try:
        for _ in range(2):
            data.validation.restart()
            assert [batch.tolist() for batch in data.validation] == [[0, 1], [2, 3], [4, 5], [6]]
    finally:
        data.validation.close()


@pytest.mark.parametrize("source", ["squares", "stream"])
def test_ranks_share_the_training_data(factory: str, source: str) -> None:
    options = config(dataset=f"{factory}:{source}", micro_batch_size=2, target_batch_size=2, drop_last=False)

    def first_fields(loader: Loader) -> list[int]:
        return [
            number for batch in loader for number in (batch if isinstance(batch, torch.Tensor) else batch[0]).tolist()
        ]

    ranks = [first_fields(build_dataloader(options, rank=rank, world_size=2)) for rank in range(2)]
    same = [first_fields(build_data(options, pin_memory=False, rank=rank, world_size=2).train) for rank in range(2)]

    assert sorted(ranks[0] + ranks[1]) == first_fields(build_dataloader(options))
    assert same == ranks


def test_every_rank_validates_on_all_of_the_held_out_data(factory: str) -> None:
    data = build_data(config(dataset=f"{factory}:pair"), pin_memory=False, rank=1, world_size=2)

    assert data.validation is not None
    assert len(list(data.validation)) == 3


def test_reading_a_stream_does_not_draw_from_the_global_generator(factory: str) -> None:
    loader = build_data(config(dataset=f"{factory}:stream"), pin_memory=False).train
    before = torch.get_rng_state()

    list(loader)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": "no_such_module_here:make"}, ConfigError, "cannot import 'no_such_module_here'"),
        ({"dataset": "some_user_data:gone"}, ConfigError, "has no 'gone'"),
        ({"dataset": "some_user_data:nothing"}, ConfigError, "must return a Dataset.* not int"),
        ({"dataset": "some_user_data:constant"}, ConfigError, r"some_user_data:constant must be a function, not str"),
        ({"dataset": "some_user_data:stream", "shuffle": True}, ConfigError, r"data\.shuffle"),
        ({"dataset": "some_user_data:a_class"}, ConfigError, "must return a Dataset.* not the class Squares"),
        ({"dataset": "some_user_data:triple"}, ConfigError, "must return a Dataset.* not tuple"),
        ({"dataset": "some_user_data:list_of_two"}, ConfigError, r"must return .* a pair \(.*\), not list"),
        ({"dataset": "some_user_data:mapping"}, ConfigError, "must return a Dataset.* not dict"),
        ({"dataset": "some_user_data:generator"}, ConfigError, "must return a Dataset.* not generator"),
        ({"dataset": "some_user_data:unsized"}, ConfigError, "must return a Dataset with __len__.* not Unsized"),
        (
            {"dataset": "some_user_data:stream", "validation_fraction": 0.5},
            ConfigError,
            "needs data with a length",
        ),
        (
            {"dataset": "some_user_data:pair", "validation_fraction": 0.5},
            ConfigError,
            "already has a validation part",
        ),
        ({"synthetic": False}, ConfigError, "no source"),
        ({"num_tokens": 7}, DataError, r"data\.num_tokens is 7, less than one block of 8"),
        ({"num_tokens": 8, "validation_fraction": 0.1}, DataError, "1 sample cannot be divided"),
    ],
)
@pytest.mark.usefixtures("factory")
def test_what_cannot_be_built_is_one_clear_error(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_data(config(**options), pin_memory=False)


@pytest.mark.usefixtures("factory")
def test_what_a_factory_raises_passes_through() -> None:
    with pytest.raises(KeyError, match="key") as failure:
        build_data(config(dataset="some_user_data:failing"), pin_memory=False)

    assert failure.value.__notes__ == ["raised by the factory some_user_data:failing that data.dataset names"]


@pytest.mark.parametrize("source", ["synthetic", "text", "shards"])
def test_labels_that_are_aligned_already_are_not_shifted_again(source: str, text_path: str, shards: str) -> None:
    sources: dict[str, dict[str, Any]] = {
        "synthetic": {},
        "text": {"text_path": text_path},
        "shards": {"shards": shards},
    }
    twice = config(**sources[source], labels="unshifted")

    with pytest.raises(ConfigError, match=r"data\.labels: unshifted is for .* data\.dataset"):
        build_data(twice, pin_memory=False)
    with pytest.raises(ConfigError, match=r"data\.labels: unshifted is for .* data\.dataset"):
        build_dataloader(twice)


def test_a_users_dataset_may_have_labels_that_repeat_its_inputs(factory: str) -> None:
    assert len(list(build_data(config(dataset=f"{factory}:pair", labels="unshifted"), pin_memory=False).train)) == 6


@pytest.mark.parametrize("name", ["reference_transformer", "gpt"])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("block_size", r"data\.block_size is 9, but the model takes at most 8 \(model\.max_seq_len\)"),
        ("vocab_size", r"data\.vocab_size is 9, but the model takes at most 8 \(model\.vocab_size\)"),
    ],
)
def test_data_beyond_a_built_in_model_names_both_sizes(name: str, key: str, message: str) -> None:
    model = {"name": name, "max_seq_len": 8, "vocab_size": 8}

    with pytest.raises(ConfigError, match=message):
        build_data(SpeedtronicConfig.from_dict({"model": model, "data": {key: 9}}), pin_memory=False)


@pytest.mark.parametrize(("vocab_size", "max_seq_len", "message"), [(9, 3, "the id 9"), (10, 2, "has 3 tokens")])
def test_samples_beyond_a_built_in_model_are_named(
    factory: str, vocab_size: int, max_seq_len: int, message: str
) -> None:
    def built(name: str) -> Loader:
        model = {"name": name, "max_seq_len": max_seq_len, "vocab_size": vocab_size}
        raw = {"model": model, "data": {"dataset": f"{factory}:rows"}}
        return build_data(SpeedtronicConfig.from_dict(raw), pin_memory=False).train

    with pytest.raises(DataError, match=rf"^samples 0 of builtins\.list: .*{message}"):
        next(iter(built("reference_transformer")))
    assert next(iter(built("mine")))["input_ids"].tolist() == [[1, 2, 9]]


def test_the_sizes_of_other_models_are_not_checked() -> None:
    raw = {"model": {"name": "mine", "max_seq_len": 8, "vocab_size": 8}, "data": {"block_size": 9, "vocab_size": 9}}

    data = build_data(SpeedtronicConfig.from_dict(raw), pin_memory=False)

    assert next(iter(data.train))["input_ids"].shape == (1, 9)


def test_a_text_is_read_with_the_tokenizer_of_a_file(tmp_path: Path, text_path: str) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    trained = train_tokenizer([text_path], tokenizer, vocab_size=270)

    data = build_data(config(text_path=text_path, tokenizer=str(tokenizer), vocab_size=270), pin_memory=False)

    assert data.tokenizer is not None
    assert data.tokenizer.vocab_size == trained.vocab_size
    first = next(iter(data.train))["input_ids"][0].tolist()
    assert first == data.tokenizer.encode(TEXT)[:8]


def test_a_missing_tokenizer_file_is_named(text_path: str) -> None:
    with pytest.raises(DataError, match=r"^gpt\.json: no such tokenizer file"):
        build_data(config(text_path=text_path, tokenizer="gpt.json"), pin_memory=False)


def test_a_vocabulary_too_small_for_the_tokenizer_names_both(shards: str, text_path: str) -> None:
    with pytest.raises(DataError, match=r"vocabulary of 256, but data\.vocab_size is 128; set model\.vocab_size"):
        build_data(config(shards=shards, vocab_size=128), pin_memory=False)
    with pytest.raises(DataError, match=r"vocabulary of \d+, but data\.vocab_size is 10"):
        build_data(config(text_path=text_path, tokenizer="chars", vocab_size=10), pin_memory=False)
    with pytest.raises(DataError, match="does not fit a vocabulary of 64"):
        build_data(config(text_path=text_path, vocab_size=64), pin_memory=False)


def test_missing_shards_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"speedtronic data prepare .*--out {tmp_path / 'none'}"):
        build_data(config(shards=str(tmp_path / "none")), pin_memory=False)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
@pytest.mark.parametrize("source", ["text", "chars", "shards"])
def test_the_held_out_tail_shares_no_target_with_training(
    text_path: str, shards: str, source: str, fraction: float
) -> None:
    sources = {
        "text": {"text_path": text_path},
        "chars": {"text_path": text_path, "tokenizer": "chars"},
        "shards": {"shards": shards},
    }
    data = build_data(config(**sources[source], validation_fraction=fraction), pin_memory=False)
    assert data.tokenizer is not None
    assert data.validation is not None

    train, validation = labels(data.train), labels(data.validation)

    assert data.tokenizer.decode(train + validation) == TEXT[1:73]
    assert len(validation) == 8 * max(1, int(9 * fraction))


def test_the_validation_loader_is_sequential_and_complete(text_path: str) -> None:
    data = build_data(
        config(
            text_path=text_path,
            validation_fraction=0.6,
            shuffle=True,
            micro_batch_size=2,
            target_batch_size=2,
        ),
        pin_memory=False,
    )
    assert data.validation is not None

    assert [len(batch["labels"]) for batch in data.validation] == [2, 2, 1]
    data.validation.restart()
    assert labels(data.validation) == list(TEXT.encode()[33:73])


def test_held_out_samples_of_a_factory_are_its_last(factory: str) -> None:
    data = build_data(
        config(dataset=f"{factory}:squares", micro_batch_size=5, target_batch_size=5, validation_fraction=0.2),
        pin_memory=False,
    )
    assert data.validation is not None

    assert [batch[0].tolist() for batch in data.validation] == [[8, 9]]


def test_a_loader_is_built_from_the_data_section_alone(text_path: str) -> None:
    loader = build_dataloader(DataConfig(text_path=text_path, block_size=8, micro_batch_size=3, target_batch_size=3))

    assert next(iter(loader))["input_ids"].shape == (3, 8)


def test_the_section_of_a_loaded_config_keeps_its_resolved_sizes(text_path: str) -> None:
    loader = build_dataloader(config(text_path=text_path, block_size=16).data)

    assert next(iter(loader))["input_ids"].shape == (1, 16)


def test_a_given_dataset_replaces_the_configured_source() -> None:
    loader = build_dataloader(
        config(text_path="unused.txt", micro_batch_size=4, target_batch_size=4), dataset=Squares()
    )

    assert [batch[1].tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49]]


def test_a_given_tokenizer_replaces_the_configured_one(text_path: str) -> None:
    tokenizer: Tokenizer = CorpusCharTokenizer(TEXT)

    loader = build_dataloader(config(text_path=text_path), tokenizer=tokenizer)

    assert tokenizer.decode(labels(loader)) == TEXT[1:73]


def test_a_given_vocabulary_replaces_the_configured_one(text_path: str) -> None:
    assert max(labels(build_dataloader(config(num_tokens=80), vocab_size=5))) == 4
    with pytest.raises(DataError, match="vocabulary of 50"):
        build_dataloader(config(text_path=text_path), vocab_size=50)


@pytest.mark.parametrize(
    ("configured", "device", "pinned"), [(None, True, True), (None, False, False), (False, True, False)]
)
def test_memory_is_pinned_as_configured_or_else_as_the_device_wants(
    monkeypatch: pytest.MonkeyPatch, configured: bool | None, device: bool, pinned: bool
) -> None:
    asked: list[bool] = []

    class Spy(TokenLoader):
        def __init__(self, *args: Any, pin_memory: bool, **options: Any) -> None:
            asked.append(pin_memory)
            super().__init__(*args, pin_memory=False, **options)

    monkeypatch.setattr("speedtronic.data.build.TokenLoader", Spy)

    build_dataloader(config(pin_memory=configured), pin_memory_device=device)

    assert asked == [pinned]


def test_a_loader_built_from_a_config_leaves_out_the_held_out_part(text_path: str) -> None:
    assert labels(build_dataloader(config(text_path=text_path, validation_fraction=0.2))) == list(TEXT.encode()[1:65])


def test_an_order_seed_changes_the_order_of_the_training_part_alone(text_path: str) -> None:
    settings = config(text_path=text_path, shuffle=True, validation_fraction=0.3, micro_batch_size=1)
    ordered, other = (build_data(settings, pin_memory=False, order_seed=seed) for seed in (None, 99))

    def rows(loader: Loader | None) -> list[list[int]]:
        assert loader is not None
        return [batch["input_ids"][0].tolist() for batch in loader]

    there, here = rows(ordered.train), rows(other.train)
    assert there != here
    assert sorted(there) == sorted(here)
    assert rows(ordered.validation) == rows(other.validation)


def test_a_tokenizer_beside_a_dataset_is_that_of_its_ids(factory: str, tmp_path: Path) -> None:
    """So that a checkpoint knows what the ids mean, and `generate` can write."""
    text = tmp_path / "text.txt"
    text.write_text("some words and some more words\n" * 50, encoding="utf-8")
    file = tmp_path / "tokenizer.json"
    train_tokenizer([text], file, vocab_size=300)
    section = {"dataset": f"{factory}:squares", "tokenizer": str(file)}
    data = build_data(config(vocab_size=300, **section), pin_memory=False)
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.tokenizer.encode("some words")) == "some words"
    with pytest.raises(DataError, match=r"a vocabulary of 27., but data\.vocab_size is 256"):
        build_data(config(vocab_size=256, **section), pin_memory=False)
    assert build_data(config(dataset=f"{factory}:squares"), pin_memory=False).tokenizer is None


def test_a_tokenizer_that_would_encode_nothing_is_refused() -> None:
    for options in ({"dataset": Squares(6)}, {}):
        with pytest.raises(ConfigError, match=r"^tokenizer: is for data\.text_path"):
            build_dataloader(config(), tokenizer=CharTokenizer(256), **options)
