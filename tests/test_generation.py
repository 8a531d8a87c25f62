from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import SpeedtronicConfig
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.errors import CheckpointError, ConfigError, InputError
from speedtronic.generation import TextGenerator, generate_batch, generate_tokens, load_generator, sample_next
from speedtronic.model import ReferenceTransformer
from speedtronic.registry import build_model, register_model

LOGITS = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()


def frequencies(logits: Tensor, draws: int = 4000, **options: Any) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    chosen = sample_next(logits.expand(draws, -1), generator=generator, **options)
    return (chosen.bincount(minlength=logits.size(-1)) / draws).tolist()


# One token.


def test_sampling_follows_the_probabilities() -> None:
    assert frequencies(LOGITS) == pytest.approx([0.4, 0.1, 0.3, 0.2], abs=0.03)


def test_temperature_divides_the_logits() -> None:
    squares = [0.16, 0.01, 0.09, 0.04]
    assert frequencies(LOGITS, temperature=0.5) == pytest.approx([p / 0.3 for p in squares], abs=0.03)


def test_temperature_zero_takes_the_likeliest_token_of_each_row() -> None:
    rows = torch.stack((LOGITS[0], LOGITS[0].flip(0)))
    chosen = sample_next(rows, temperature=0.0)
    assert chosen.tolist() == [0, 3]
    assert chosen.dtype == torch.int64


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-30, 1e-3])
def test_a_tiny_temperature_neither_overflows_nor_errs(temperature: float) -> None:
    assert frequencies(LOGITS * 1e4, draws=50, temperature=temperature) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("k", "expected"), [(1, [1, 0, 0, 0]), (2, [4 / 7, 0, 3 / 7, 0]), (99, [0.4, 0.1, 0.3, 0.2])])
def test_top_k_keeps_the_k_likeliest(k: int, expected: list[float]) -> None:
    assert frequencies(LOGITS, top_k=k) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    assert sum(f > 0 for f in frequencies(torch.zeros(1, 5), top_k=2)) == 2


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-9, [1, 0, 0, 0]),
        (0.39, [1, 0, 0, 0]),
        (0.41, [4 / 7, 0, 3 / 7, 0]),
        (0.8, [4 / 9, 0, 3 / 9, 2 / 9]),
        (1.0, [0.4, 0.1, 0.3, 0.2]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p: float, expected: list[float]) -> None:
    assert frequencies(LOGITS, top_p=p) == pytest.approx(expected, abs=0.03)


def test_top_p_applies_to_what_top_k_left() -> None:
    assert frequencies(LOGITS, top_k=2, top_p=0.5) == [1.0, 0.0, 0.0, 0.0]


def test_equal_generators_choose_equal_tokens() -> None:
    rows = torch.zeros(50, 9)
    first, second = (sample_next(rows, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1, not 0"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_an_argument_out_of_range_is_a_config_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_next(LOGITS, **options)
    with pytest.raises(ConfigError, match=message):
        generate_tokens(Successor(), [0], max_new_tokens=1, context_length=4, **options)


# Many tokens.


class Successor(nn.Module):
    """Always predicts the last token plus one, modulo 10."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: {"logits": logits}) -> None:
        super().__init__()
        self.wrap = wrap
        self.dropout = nn.Dropout()
        self.norm = nn.BatchNorm1d(3).eval()
        self.lengths: list[int] = []
        self.states: list[tuple[bool, ...]] = []

    def forward(self, input_ids: Tensor) -> Any:
        self.lengths.append(input_ids.size(1))
        self.states.append((self.training, self.norm.training, torch.is_inference_mode_enabled()))
        return self.wrap(nn.functional.one_hot((input_ids + 1) % 10, 10) * 100.0)


def greedy(model: nn.Module, prompt: list[int], count: int, **options: Any) -> list[int]:
    options = {"context_length": 8, "temperature": 0.0, **options}
    return list(generate_tokens(model, prompt, max_new_tokens=count, **options))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: logits,
        lambda logits: (logits,),
        lambda logits: [torch.zeros(()), logits],
        lambda logits: {"logits": logits, "loss": None},
    ],
    ids=["tensor", "tuple", "after a loss", "mapping"],
)
def test_every_form_of_output_can_write(wrap: Callable[[Tensor], Any]) -> None:
    assert greedy(Successor(wrap), [7], 5) == [8, 9, 0, 1, 2]


@pytest.mark.parametrize("output", [None, {"loss": torch.zeros(())}, torch.zeros(2, 2), (torch.zeros(()),)])
def test_a_model_without_logits_is_an_input_error(output: Any) -> None:
    with pytest.raises(InputError, match=r"logits of shape \(B, T, V\)"):
        greedy(Successor(lambda _: output), [1], 1)


def test_the_context_is_cropped_to_the_newest_tokens() -> None:
    model = Successor()
    assert greedy(model, [1, 2], 5, context_length=4) == [3, 4, 5, 6, 7]
    assert model.lengths == [2, 3, 4, 4, 4]
    model = Successor()
    assert greedy(model, [9, 9, 9, 5], 1, context_length=1) == [6]
    assert model.lengths == [1]


def test_tokens_beyond_the_vocabulary_are_never_chosen() -> None:
    assert all(token < 4 for token in greedy(Successor(), [7], 6, vocab_limit=4))


def test_the_text_ends_before_the_stop_token() -> None:
    assert greedy(Successor(), [7], 9, stop_id=0) == [8, 9]


def test_tokens_are_made_as_they_are_asked_for() -> None:
    model = Successor()
    tokens = generate_tokens(model, [3], max_new_tokens=10**9, context_length=8, temperature=0.0)
    assert list(itertools.islice(tokens, 3)) == [4, 5, 6]
    assert len(model.lengths) == 3


def test_the_model_is_in_evaluation_mode_for_its_forward_alone() -> None:
    model = Successor().train()
    model.norm.eval()
    tokens = generate_tokens(model, [3], max_new_tokens=5, context_length=8)
    next(tokens)
    assert model.states == [(False, False, True)]
    assert (model.training, model.dropout.training, model.norm.training) == (True, True, False)
    assert not torch.is_inference_mode_enabled()


def test_the_seed_decides_the_text_and_no_seed_varies() -> None:
    model = ReferenceTransformer(vocab_size=50, block_size=8, n_layer=1, n_head=2, d_model=8)

    def text(seed: int | None) -> list[int]:
        return list(generate_tokens(model, [1], max_new_tokens=20, context_length=8, seed=seed))

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert text(None) != text(None)


def test_global_random_numbers_are_not_moved() -> None:
    model = ReferenceTransformer(vocab_size=50, block_size=8, n_layer=1, n_head=2, d_model=8, dropout=0.5)
    before = torch.get_rng_state()
    list(generate_tokens(model, [1], max_new_tokens=3, context_length=8))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([1], {"context_length": 0}, "context_length must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_token(
    prompt: list[int], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_tokens(Successor(), prompt, **{"max_new_tokens": 1, "context_length": 4, **options})


# Text.


class Writer(nn.Module):
    """Writes the bytes of a text, whatever it reads, and remembers the first thing it read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.script: Iterator[int] = iter(text.encode())
        self.first_read: list[int] | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.first_read is None:
            self.first_read = input_ids[0].tolist()
        logits = torch.zeros(*input_ids.shape, 300)
        logits[..., next(self.script)] = 1.0
        return logits


def writer(text: str) -> TextGenerator:
    return TextGenerator(Writer(text), CharTokenizer(), context_length=16, step=1)


def test_a_character_of_several_bytes_appears_when_it_is_whole() -> None:
    pieces = list(writer("aé€!").stream("x", max_new_tokens=7, temperature=0.0))
    assert "".join(pieces) == "aé€!"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_at_the_end_is_shown_as_replaced() -> None:
    assert "".join(writer("a€").stream("x", max_new_tokens=3, temperature=0.0)) == "a\ufffd"


def test_the_text_ends_with_its_document() -> None:
    assert "".join(writer("end\0next").stream("x", temperature=0.0)) == "end"


@pytest.mark.parametrize(("prompt", "read"), [("ab", [97, 98]), ("", [0])])
def test_an_empty_prompt_begins_a_document(prompt: str, read: list[int]) -> None:
    generator = writer("z\0")
    list(generator.stream(prompt, temperature=0.0))
    assert isinstance(generator.model, Writer)
    assert generator.model.first_read == read


# From a checkpoint.

TEXT = "to be or not"


def config(folder: Path, **sections: Any) -> SpeedtronicConfig:
    return SpeedtronicConfig.from_dict(
        {
            "run": {"output_dir": str(folder)},
            "model": {"vocab_size": 16, "max_seq_len": 12, "n_layer": 1, "n_head": 2, "d_model": 8},
            **sections,
        }
    )


def save(settings: SpeedtronicConfig, step: int = 3, **changes: Any) -> nn.Module:
    model = build_model(settings)
    state = {
        "model": model.state_dict(),
        "config": settings.to_dict(redact_secrets=True),
        "tokenizer": CorpusCharTokenizer(TEXT).spec(),
        "step": step,
        **changes,
    }
    CheckpointManager(Path(settings.run.output_dir) / settings.checkpoint.directory).save(step, state)
    return model


def test_a_run_is_loaded_from_any_of_its_folders(tmp_path: Path) -> None:
    save(config(tmp_path), step=2)
    model = save(config(tmp_path), step=3)
    expected = list(TextGenerator(model, CorpusCharTokenizer(TEXT), 12, 3).stream("to be", seed=1))
    steps = {"": 3, "checkpoints": 3, "checkpoints/step_000000000003": 3, "checkpoints/step_000000000002": 2}
    for folder, step in steps.items():
        generator = load_generator(tmp_path / folder)
        assert generator.step == step, folder
        assert generator.context_length == 12
        assert not generator.model.training
        if step == 3:
            assert list(generator.stream("to be", seed=1)) == expected


def test_the_averaged_weights_write_where_there_are_any(tmp_path: Path) -> None:
    settings = config(tmp_path)
    average = build_model(settings).state_dict()
    save(settings, ema=average)
    loaded = load_generator(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in average.items())


def test_the_context_is_as_long_as_the_training_sequences(tmp_path: Path) -> None:
    save(config(tmp_path, data={"block_size": 5}))
    assert load_generator(tmp_path).context_length == 5


def test_a_checkpoint_without_a_configuration_is_refused(tmp_path: Path) -> None:
    save(config(tmp_path), config={})
    with pytest.raises(CheckpointError, match="no configuration"):
        load_generator(tmp_path)


def test_values_that_a_checkpoint_does_not_keep_may_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def factory(section: Any, *, special_token: str, width: int) -> nn.Module:
        given.append({"special_token": special_token, "width": width})
        return nn.Linear(width, width)

    register_model("keeps-a-token", factory, replace=True)
    settings = config(tmp_path, model={"name": "keeps-a-token", "extra": {"special_token": "<s>", "width": 2}})
    save(settings)
    load_generator(tmp_path, extra={"special_token": "<s>", "width": 7})
    assert given[-1] == {"special_token": "<s>", "width": 2}


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    settings = config(tmp_path)
    other = settings.to_dict()
    other["model"]["d_model"] = 16
    save(settings, config=other)
    with pytest.raises(CheckpointError, match=r"do not fit .*lm_head.weight has shape .*, and 11 more$"):
        load_generator(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"synthetic": True}, "had no tokenizer: synthetic data is random token ids, no text$"),
        ({"dataset": "cats:images"}, r"that of data\.dataset: cats:images; .* train with data\.tokenizer"),
        (None, "had no tokenizer$"),
    ],
)
def test_what_a_model_without_a_tokenizer_was_trained_on_is_said(
    tmp_path: Path, data: dict[str, Any] | None, said: str
) -> None:
    settings = config(tmp_path, **({} if data is None else {"data": data}))
    save(settings, tokenizer=None, **({"config": None} if data is None else {}))
    with pytest.raises(InputError, match=f"this model cannot write.*{said}") as caught:
        load_generator(tmp_path)
    assert ("token ids" in str(caught.value)) == (data is not None)


def test_a_custom_model_is_never_imported_from_what_a_checkpoint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_plugin.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = config(tmp_path)
    saved = settings.to_dict()
    saved["model"]["name"], saved["plugins"] = "evil_plugin:build", ["evil_plugin"]
    save(settings, config=saved)
    with pytest.raises(ConfigError, match="custom model 'evil_plugin:build'.*name the YAML"):
        load_generator(tmp_path)


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_a_folder_without_a_checkpoint_is_a_checkpoint_error(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint here; train first"):
        load_generator(tmp_path / folder)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    save(config(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step_000000000003"
    (checkpoint / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"step_000000000003: model\.safetensors"):
        load_generator(checkpoint)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**22])
def test_a_seed_out_of_range_is_said_at_the_call(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"the seed must be from 0 to 2\*\*63-1, not"):
        generate_tokens(nn.Identity(), [1], max_new_tokens=1, context_length=1, seed=seed)


# With a cache of keys and values.


def small(**options: Any) -> ReferenceTransformer:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 31, "block_size": 24, "n_layer": 2, "n_head": 4, "d_model": 32}
    model = ReferenceTransformer(**shape | options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that the tokens differ from each other
    return model


SHAPES = [{}, {"n_kv_head": 2}, {"qk_norm": True}, {"ngram_order": 3, "ngram_buckets": 64}, {"tie_weights": False}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("prompt", [[5], [3, 1, 4, 1, 5], list(range(30))], ids=len)
def test_the_cache_changes_no_token(shape: dict[str, Any], prompt: list[int]) -> None:
    """Beyond the context too."""
    model = small(**shape)
    made = [
        list(generate_tokens(model, prompt, max_new_tokens=30, context_length=24, seed=1, cache=cache))
        for cache in (True, False)
    ]
    assert made[0] == made[1]
    assert len(set(made[0])) > 5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_with_a_cache_are_those_without(shape: dict[str, Any]) -> None:
    model = small(**shape).eval()
    ids = torch.randint(31, (3, 20))
    with torch.no_grad():
        whole = model(ids)["logits"]
        cache = model.make_cache(3, 20)
        for start, end in ((0, 7), (7, 8), (8, 9), (9, 15), (15, 20)):
            logits = model(ids[:, start:end], cache=cache)["logits"]
            torch.testing.assert_close(logits, whole[:, end - 1 : end], rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_a_cache_is_refused() -> None:
    model = small().eval()
    cache = model.make_cache(1, 10)
    ids = torch.zeros((1, 8), dtype=torch.int64)
    with pytest.raises(ValueError, match="neither labels"):
        model(ids, labels=ids, cache=cache)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="do not fit behind 8 tokens"):
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="empty cache"):
        model(ids[:, :1], attention_mask=torch.ones((1, 1)), cache=cache)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_of_any_lengths_are_continued_at_once_as_each_alone(shape: dict[str, Any]) -> None:
    model = small(**shape)
    prompts = [[5], [3, 1, 4, 1, 5, 9, 2], [2, 7]]
    options: dict[str, Any] = {"max_new_tokens": 12, "context_length": 24, "stop_id": 7}
    alone = [list(generate_tokens(model, prompt, seed=1 + row, **options)) for row, prompt in enumerate(prompts)]
    assert generate_batch(model, prompts, seed=1, **options) == alone
    assert generate_batch(model, [], **options) == []


def test_a_model_without_a_cache_continues_a_batch_too() -> None:
    class Following(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.nn.functional.one_hot((input_ids + 1) % 5, 5).float() * 50

    assert generate_batch(Following(), [[0], [2, 3]], max_new_tokens=3, context_length=4, seed=0) == [
        [1, 2, 3],
        [4, 0, 1],
    ]


def test_a_token_with_a_cache_costs_one_position() -> None:
    model = small()
    widths: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].size(1)))
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].size(1)))
    list(generate_tokens(model, [1, 2, 3], max_new_tokens=4, context_length=24, seed=0))
    assert widths == [3, 1, 1, 1, 1, 1, 1, 1]
