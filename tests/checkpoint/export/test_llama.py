from __future__ import annotations

from typing import Any

import pytest

from speedtronic.checkpoint.export.llama import (
    from_llama,
    hugging_face_config,
    reference_model,
    reference_names,
    to_llama,
    weights_of_ones,
)
from speedtronic.config import ModelConfig
from speedtronic.errors import CheckpointError
from speedtronic.model import GPTConfig, ReferenceTransformer
from speedtronic.model.transformer import NORM_EPS, build_reference_transformer

GROUPED = ModelConfig(
    vocab_size=61, max_seq_len=32, n_layer=2, n_head=6, n_kv_head=2, d_model=36, d_ff=50, rope_base=500.0
)
UNTIED = ModelConfig(vocab_size=61, max_seq_len=32, n_layer=1, n_head=2, d_model=16, tie_weights=False)


def shapes_of(model: ReferenceTransformer) -> dict[str, list[int]]:
    """As a checkpoint has them: a tied head is the embedding."""
    parameters = dict(model.named_parameters())
    return {name: list(parameter.shape) for name, parameter in parameters.items()}


def config_of(section: ModelConfig, **changes: Any) -> dict[str, Any]:
    shapes = shapes_of(build_reference_transformer(section))
    return hugging_face_config(section, shapes, norm_eps=NORM_EPS, token_id=0, dtype="float32") | changes


@pytest.mark.parametrize("section", [GROUPED, UNTIED])
def test_every_tensor_has_a_name_and_gets_its_own_back(section: ModelConfig) -> None:
    names = list(build_reference_transformer(section).state_dict())
    theirs = to_llama(names)
    assert len(set(theirs.values())) == len(names)
    assert list(from_llama(theirs.values()).values()) == names


def test_names_are_those_of_a_llama() -> None:
    assert to_llama(["transformer.h.11.attn.out_proj.weight", "transformer.h.0.mlp_norm.weight"]) == {
        "transformer.h.11.attn.out_proj.weight": "model.layers.11.self_attn.o_proj.weight",
        "transformer.h.0.mlp_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    }


def test_names_that_no_llama_has_are_all_listed() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)q_proj\.bias.*extra\.weight"):
        from_llama(["model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "extra.weight"])
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0\.attn\.bias"):
        to_llama(["transformer.h.0.attn.bias"])


def test_tables_of_angles_are_left_out() -> None:
    names = ["model.layers.3.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "model.norm.weight"]
    assert from_llama(names) == {"model.norm.weight": "transformer.norm.weight"}


def test_the_configuration_has_the_sizes_of_the_model() -> None:
    config = config_of(GROUPED)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": 36,  # 2/3 of 50, rounded up to a multiple of 6
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "hidden_act": "silu",
    }
    assert {name: config[name] for name in sizes} == sizes
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    assert not config_of(UNTIED)["tie_word_embeddings"]


def test_an_option_that_no_model_has_is_refused_by_name() -> None:
    section = ModelConfig(ngram_order=3)
    with pytest.raises(CheckpointError, match=r"model\.ngram_order is 3, .*; export it with --format safetensors"):
        hugging_face_config(section, {}, norm_eps=NORM_EPS, token_id=None, dtype="float32")


def test_a_model_with_normalised_heads_is_a_qwen3_whose_norms_have_weights_of_one() -> None:
    section = GROUPED.model_copy(update={"qk_norm": True})
    config = config_of(section)
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (config["head_dim"], config["rms_norm_eps"]) == (6, NORM_EPS)
    assert weights_of_ones(section) == {
        "model.layers.0.self_attn.q_norm.weight": (6,),
        "model.layers.0.self_attn.k_norm.weight": (6,),
        "model.layers.1.self_attn.q_norm.weight": (6,),
        "model.layers.1.self_attn.k_norm.weight": (6,),
    }
    assert config_of(GROUPED)["model_type"] == "llama"
    assert weights_of_ones(GROUPED) == {}


def test_tensors_of_another_model_are_all_listed() -> None:
    shapes = shapes_of(build_reference_transformer(GROUPED))
    del shapes["transformer.norm.weight"]
    shapes["transformer.h.1.attn.k_proj.weight"] = [36, 36]
    shapes["transformer.h.1.attn.gate.weight"] = [1]
    with pytest.raises(CheckpointError) as error:
        hugging_face_config(GROUPED, shapes, norm_eps=NORM_EPS, token_id=None, dtype="float32")
    assert "transformer.norm.weight is missing" in str(error.value)
    assert "transformer.h.1.attn.k_proj.weight has shape (36, 36) instead of (12, 36)" in str(error.value)
    assert "transformer.h.1.attn.gate.weight is not in the reference transformer" in str(error.value)


@pytest.mark.parametrize("section", [GROUPED, UNTIED])
def test_the_section_of_a_llama_builds_the_model_that_it_came_from(section: ModelConfig) -> None:
    back = reference_model(config_of(section), norm_eps=NORM_EPS)
    assert shapes_of(build_reference_transformer(back)) == shapes_of(build_reference_transformer(section))
    assert (back.n_head, back.n_kv_head, back.rope_base) == (section.n_head, section.n_kv_head, section.rope_base)
    assert back.max_seq_len == section.max_seq_len
    assert back.tie_weights == section.tie_weights


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 32])
def test_every_feed_forward_width_that_heads_divide_is_met(heads: int) -> None:
    config = config_of(UNTIED, num_attention_heads=heads, num_key_value_heads=heads, head_dim=None)
    for width in range(heads, 40 * heads, heads):
        config |= {"hidden_size": 2 * heads, "intermediate_size": width}
        section = reference_model(config, norm_eps=NORM_EPS)
        shape = GPTConfig(n_head=section.n_head, d_model=section.d_model, d_ff=section.d_ff)
        assert shape.hidden_size == width


def test_a_configuration_of_an_older_transformers_is_read() -> None:
    config = config_of(GROUPED)
    del config["rope_parameters"], config["head_dim"], config["attention_bias"], config["mlp_bias"]
    assert reference_model(config | {"rope_scaling": None}, norm_eps=NORM_EPS).rope_base == 500.0


def test_without_key_value_heads_each_query_head_has_its_own() -> None:
    assert reference_model(config_of(UNTIED, num_key_value_heads=None), norm_eps=NORM_EPS).n_kv_head == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; here it is always 1e-05"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"head_dim": 32}, "head_dim 32 is not hidden_size 36"),
        ({"head_dim": "6"}, "head_dim '6'"),
        ({"intermediate_size": 37}, "intermediate_size 37 is not a multiple"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 4}, "n_kv_head"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": "many"}}, "rope_base"),
        ({"tie_word_embeddings": "yes"}, "tie_weights"),
    ],
)
def test_a_llama_that_the_reference_transformer_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError) as error:
        reference_model(config_of(GROUPED, **changes), norm_eps=NORM_EPS)
    assert reason in str(error.value)


def test_every_reason_is_listed_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)hidden_act.*mlp_bias.*rms_norm_eps"):
        reference_model(config_of(GROUPED, hidden_act="gelu", mlp_bias=True, rms_norm_eps=1e-6), norm_eps=NORM_EPS)


def test_a_folder_with_names_of_another_model_keeps_them() -> None:
    names = ["transformer.wte.weight", "anything"]
    assert reference_names(GROUPED, {}, names, norm_eps=NORM_EPS) == {name: name for name in names}


def test_the_names_of_the_same_llama_are_those_of_the_model() -> None:
    ours = list(build_reference_transformer(GROUPED).state_dict())
    theirs = list(to_llama(ours).values())
    assert list(reference_names(GROUPED, config_of(GROUPED), theirs, norm_eps=NORM_EPS).values()) == ours


def test_a_llama_of_equal_shapes_that_computes_something_else_is_refused() -> None:
    theirs = list(to_llama(build_reference_transformer(GROUPED).state_dict()).values())
    config = config_of(GROUPED, num_attention_heads=12, num_key_value_heads=4, head_dim=3, rope_parameters=None)
    config["rope_theta"] = 10000.0
    with pytest.raises(CheckpointError) as error:
        reference_names(GROUPED, config, theirs, norm_eps=NORM_EPS)
    assert "model.n_head is 12 there and 6 here" in str(error.value)
    assert "model.n_kv_head is 4 there and 2 here" in str(error.value)
    assert "model.rope_base is 10000.0 there and 500.0 here" in str(error.value)


def test_a_llama_is_no_model_with_normalised_heads() -> None:
    theirs = list(to_llama(build_reference_transformer(GROUPED).state_dict()).values())
    normalised = GROUPED.model_copy(update={"qk_norm": True})
    with pytest.raises(CheckpointError, match="model.qk_norm is False there and True here"):
        reference_names(normalised, config_of(GROUPED), theirs, norm_eps=NORM_EPS)


NORMALISED = GROUPED.model_copy(update={"qk_norm": True})


def test_a_qwen3_is_the_model_with_normalised_heads_and_its_norms_of_heads_must_be_of_ones() -> None:
    names = build_reference_transformer(NORMALISED).state_dict()
    ones = list(weights_of_ones(NORMALISED))
    assert reference_model(config_of(NORMALISED), norm_eps=NORM_EPS).qk_norm
    renamed = {**{theirs: ours for ours, theirs in to_llama(names).items()}, **dict.fromkeys(ones)}
    assert reference_names(NORMALISED, config_of(NORMALISED), list(renamed), norm_eps=NORM_EPS) == renamed
    with pytest.raises(CheckpointError, match="this Qwen3 computes .*\n  model.qk_norm is True there and False here"):
        reference_names(GROUPED, config_of(NORMALISED), list(renamed), norm_eps=NORM_EPS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"head_dim": None}, None),
        ({"layer_types": None, "sliding_window": 4096}, None),
    ],
)
def test_a_qwen3_attends_to_all_that_is_before(changes: dict[str, Any], reason: str | None) -> None:
    config = config_of(NORMALISED, **changes)
    if reason is None:
        reference_model(config, norm_eps=NORM_EPS)
    else:
        with pytest.raises(CheckpointError, match=reason):
            reference_model(config, norm_eps=NORM_EPS)


def test_what_a_qwen3_leaves_out_is_not_what_a_llama_leaves_out() -> None:
    config = config_of(NORMALISED)
    del config["head_dim"], config["num_key_value_heads"]
    with pytest.raises(CheckpointError, match="head_dim 128 is not hidden_size 36 / num_attention_heads 6"):
        reference_model(config, norm_eps=NORM_EPS)


def test_a_llama_without_a_configuration_is_refused() -> None:
    theirs = list(to_llama(build_reference_transformer(GROUPED).state_dict()).values())
    with pytest.raises(CheckpointError, match="model_type is None, not 'llama'"):
        reference_names(GROUPED, {}, theirs, norm_eps=NORM_EPS)
