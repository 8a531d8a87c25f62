"""A model exported as a Llama or a Qwen3 gives the same results in `transformers`, and the other way round.

All of it is marked slow: importing `transformers` takes seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.export.files import HuggingFaceTokenizer, export_hugging_face, open_model
from speedtronic.checkpoint.export.llama import from_llama, reference_model
from speedtronic.config import SpeedtronicConfig
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.tokenizer_json import tokenizer_json
from speedtronic.errors import CheckpointError
from speedtronic.generation import generate_tokens
from speedtronic.model.transformer import NORM_EPS, ReferenceTransformer, build_reference_transformer
from speedtronic.runtime import build_runtime
from tests.support.configs import tiny

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SHAPES = {
    "plain": {"n_layer": 2, "n_head": 4, "d_model": 32},
    "grouped": {"n_layer": 2, "n_head": 6, "n_kv_head": 2, "d_model": 48, "max_seq_len": 100},
    "one key-value head, untied": {"n_layer": 1, "n_head": 4, "n_kv_head": 1, "d_model": 40, "tie_weights": False},
    "odd sizes": {"vocab_size": 131, "n_layer": 3, "n_head": 3, "d_model": 66, "d_ff": 101, "rope_base": 777.0},
    "one head, untied": {"vocab_size": 7, "n_layer": 1, "n_head": 1, "d_model": 6, "d_ff": 1, "tie_weights": False},
    "normalised heads": {"n_layer": 2, "n_head": 6, "n_kv_head": 2, "d_model": 48, "d_ff": 101, "qk_norm": True},
    "normalised heads, untied": {"n_layer": 1, "n_head": 1, "d_model": 6, "tie_weights": False, "qk_norm": True},
    "long": {"n_layer": 1, "n_head": 2, "d_model": 64, "max_seq_len": 128, "rope_base": 500000.0},
}


def trained(**sizes: Any) -> tuple[SpeedtronicConfig, ReferenceTransformer]:
    """A model in which every weight matters: a new model has norms of one and logits near zero."""
    config = SpeedtronicConfig.from_dict({"model": {"vocab_size": 64, "max_seq_len": 64, **sizes}})
    torch.manual_seed(11)
    model = build_reference_transformer(config.model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.size(1) ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return config, model


def exported(folder: Path, config: SpeedtronicConfig, model: ReferenceTransformer, **options: Any) -> Path:
    state = {"model": model.state_dict(), "config": config.to_dict(redact_secrets=True)}
    checkpoint = CheckpointManager(folder / "checkpoints").save(1, state)
    options = {"tokenizer": HuggingFaceTokenizer(None, 0), **options}
    return export_hugging_face(open_model(checkpoint), folder / "llama", norm_eps=NORM_EPS, **options)


def loaded(folder: Path) -> Any:
    """The model that `transformers` loads from a folder, with no weight missing and none unused."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(model).__name__ in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return model.eval()


def ids_for(config: SpeedtronicConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.model.vocab_size, (2, config.model.max_seq_len), generator=generator)


def assert_same_logits(ours: ReferenceTransformer, theirs: Any, ids: Tensor) -> None:
    with torch.no_grad():
        expected, actual = ours(ids)["logits"], theirs(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_transformers_computes_the_same_logits(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config, model = trained(**sizes)
    assert_same_logits(model, loaded(exported(tmp_path, config, model)), ids_for(config))


def test_at_late_positions_only_the_angles_that_transformers_rounds_differ(tmp_path: Path) -> None:
    config, model = trained(**{**SHAPES["long"], "max_seq_len": 2048})
    theirs = loaded(exported(tmp_path, config, model))
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(2048)[None])
    half = sin.size(-1) // 2
    model.rotary.cos = cos[0, :, None]
    model.rotary.sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)
    assert_same_logits(model, theirs, ids_for(config))


@pytest.mark.parametrize("sizes", [SHAPES["grouped"], SHAPES["one key-value head, untied"], SHAPES["normalised heads"]])
def test_transformers_writes_the_same_text(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config, model = trained(**sizes)
    theirs = loaded(exported(tmp_path, config, model, tokenizer=None))
    prompt = ids_for(config)[0, :8].tolist()
    expected = generate_tokens(
        model, prompt, max_new_tokens=30, context_length=config.model.max_seq_len, temperature=0.0
    )
    with torch.no_grad():
        ids = torch.tensor([prompt])
        written = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    assert written[0, len(prompt) :].tolist() == list(expected)


def test_a_text_ends_where_the_document_ends(tmp_path: Path) -> None:
    config, model = trained(**SHAPES["plain"])
    prompt = ids_for(config)[0, :8].tolist()
    tokens = list(generate_tokens(model, prompt, max_new_tokens=20, context_length=64, temperature=0.0))
    end = tokens[5]
    theirs = loaded(exported(tmp_path, config, model, tokenizer=HuggingFaceTokenizer(None, end)))
    ids = torch.tensor([prompt])
    with torch.no_grad():
        written = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=end
        )
    assert written[0, len(prompt) :].tolist() == tokens[: tokens.index(end) + 1]


@pytest.mark.parametrize("sizes", [SHAPES["grouped"], SHAPES["odd sizes"], SHAPES["one key-value head, untied"]])
def test_a_llama_that_transformers_saves_again_is_the_reference_model(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config, model = trained(**sizes)
    theirs = loaded(exported(tmp_path, config, model))
    theirs.save_pretrained(tmp_path / "again")
    assert_same_logits(model, loaded(tmp_path / "again"), ids_for(config))

    written = json.loads((tmp_path / "again" / "config.json").read_text())
    ours = build_reference_transformer(reference_model(written, norm_eps=NORM_EPS)).eval()
    weights = theirs.state_dict()
    ours.load_state_dict({ours_: weights[name] for name, ours_ in from_llama(weights).items()})
    assert_same_logits(ours, theirs, ids_for(config))


def test_a_llama_of_transformers_becomes_the_reference_model() -> None:
    torch.manual_seed(2)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=48,
            intermediate_size=120,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=80,
            rms_norm_eps=NORM_EPS,
            initializer_range=0.15,
            rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
        )
    ).eval()
    ours = build_reference_transformer(reference_model(theirs.config.to_dict(), norm_eps=NORM_EPS)).eval()
    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[theirs_] for theirs_, name in from_llama(weights).items()})
    assert_same_logits(ours, theirs, torch.randint(90, (2, 80)))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", [SHAPES["grouped"], SHAPES["one key-value head, untied"], SHAPES["normalised heads"]])
def test_a_run_starts_from_the_folder_of_a_llama(tmp_path: Path, sizes: dict[str, Any], sharded: bool) -> None:
    config, model = trained(**sizes)
    theirs = loaded(exported(tmp_path, config, model))
    theirs.save_pretrained(tmp_path / "start", max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "start" / "model.safetensors.index.json").exists() == sharded
    run = tiny(tmp_path / "run", run={"init_from": str(tmp_path / "start"), "device": "cpu"}, model=dict(config.model))
    trainer, _ = build_runtime(run)
    with trainer.logger:
        assert_same_logits(trainer.model.eval(), theirs, ids_for(config))


def test_a_run_does_not_start_from_a_llama_with_another_formula(tmp_path: Path) -> None:
    config, model = trained(**SHAPES["plain"])
    folder = exported(tmp_path, config, model)
    run = tiny(tmp_path / "run", run={"init_from": str(folder)}, model={**dict(config.model), "rope_base": 5.0})
    with pytest.raises(CheckpointError, match=r"model\.rope_base is 10000\.0 there and 5\.0 here"):
        build_runtime(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_loaded_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    config, model = trained(**SHAPES["grouped"])
    theirs = loaded(exported(tmp_path, config, model, dtype=dtype))
    assert theirs.dtype == dtype
    assert torch.equal(theirs.model.embed_tokens.weight, model.transformer["wte"].weight.to(dtype))


def test_the_tokenizer_is_loaded_and_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a rose is a rose is a rose"] * 3, trainer)
    end = tokenizer.token_to_id("<|endoftext|>")
    config, model = trained(**{**SHAPES["plain"], "vocab_size": 300})
    folder = exported(tmp_path, config, model, tokenizer=HuggingFaceTokenizer(tokenizer.to_str(), end))

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "A rosé is  a rose,\n is a rose."
    ids = theirs(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids
    assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.bos_token_id) == (end, end)
    assert theirs.model_max_length == 64


CORPUS = "A rosé is  a rose,\n\tis Ārose ⟨𝄞⟩.\r\n"


@pytest.mark.parametrize("kind", ["bytes", "bytes in a larger vocabulary", "chars"])
def test_the_ids_of_bytes_and_characters_are_those_of_the_run(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tokenizers")
    sizes = {"bytes": 256, "bytes in a larger vocabulary": 300}
    ours = CharTokenizer(sizes[kind]) if kind in sizes else CorpusCharTokenizer(CORPUS)
    config, model = trained(**{**SHAPES["plain"], "vocab_size": ours.vocab_size})
    form = HuggingFaceTokenizer(tokenizer_json(ours.spec()), ours.separator_id)
    folder = exported(tmp_path, config, model, tokenizer=form)

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = CORPUS + "\0" + CORPUS
    ids = theirs(text)["input_ids"]
    assert ids == ours.encode(text)
    assert theirs.decode(ids) == text
    assert theirs.decode(ids, skip_special_tokens=True) == CORPUS * 2
    assert (theirs.eos_token_id, theirs.bos_token_id) == (0, 0)
    assert theirs.model_max_length == 64
    if kind == "chars":
        with pytest.raises(Exception, match="WordLevel"):  # the library has no class of its own for it
            theirs("z")
