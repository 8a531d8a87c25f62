"""Names and sizes of the reference transformer as those of Hugging Face's Llama, and back.

Both models store heads one after another and turn the pairs `(x[i], x[i + E/2])` of a head by the same angles. So every
tensor of one is a tensor of the other under another name, and nothing is permuted.

With `model.qk_norm` it is a Qwen3: a Llama that normalises the queries and keys of each head before it turns them. Its
norms have weights, which are ones here.

Legend: `D` width, `E` head width, `F` feed-forward width, `V` vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from speedtronic.config import ModelConfig
from speedtronic.errors import CheckpointError, ConfigError

# Options of the reference transformer that the shapes of its tensors do not show.
_WITHOUT_SHAPE = ("n_head", "n_kv_head", "rope_base", "qk_norm")
_EMBEDDING, _HEAD, _NORM = "transformer.wte.weight", "lm_head.weight", "transformer.norm.weight"
_TOP = {_EMBEDDING: "model.embed_tokens.weight", _NORM: "model.norm.weight", _HEAD: "lm_head.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.out_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
_OURS = re.compile(r"transformer\.h\.(\d+)\.(.+)\.weight")
_THEIRS = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
# Tables that older versions of transformers saved; they follow from the configuration.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def to_llama(names: Iterable[str]) -> dict[str, str]:
    """Llama's name of each tensor of the reference transformer.

    Raises:
        CheckpointError: the reference transformer has no such names; all are listed.
    """
    return _renamed(names, _TOP, _OURS, _BLOCK, "model.layers", "the reference transformer")


def from_llama(names: Iterable[str]) -> dict[str, str]:
    """The reference transformer's name of each tensor of a `LlamaForCausalLM`, without its tables of angles.

    Raises:
        CheckpointError: a Llama without biases has no such names; all are listed.
    """
    kept = [name for name in names if not _DERIVED.fullmatch(name)]
    return _renamed(kept, _TOP_BACK, _THEIRS, _BLOCK_BACK, "transformer.h", "a Llama without biases")


def hugging_face_config(
    model: ModelConfig, shapes: Mapping[str, Sequence[int]], *, norm_eps: float, token_id: int | None, dtype: str
) -> dict[str, Any]:
    """The contents of `config.json` for a reference transformer: a Llama, or with `qk_norm` a Qwen3.

    Args:
        model: the section that it was built from.
        shapes: of its tensors, by our names; without `lm_head.weight` when that is the embedding.
        norm_eps: added to the mean square in every RMSNorm.
        token_id: the token that ends a document, and so also stands before the next; None when there is none.
        dtype: of the weights, as torch names it: `float32`.

    Raises:
        CheckpointError: the section has an option that neither has; or these are not the tensors of its reference
            transformer, and every difference is listed.
    """
    if (problem := model.without_hugging_face_form) is not None:
        raise CheckpointError(f"{problem}; export it with --format safetensors")
    gate = shapes.get("transformer.h.0.mlp.gate_proj.weight", [0])
    problems = list(_differences(_expected_shapes(model, gate[0], tied=_HEAD not in shapes), shapes))
    if problems:
        raise CheckpointError(
            "these are not the weights of the reference transformer that its configuration describes:\n  "
            + "\n  ".join(problems)
        )
    family = "Qwen3" if model.qk_norm else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": gate[0],
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.n_kv_head,
        "head_dim": model.d_model // model.n_head,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": _HEAD not in shapes,
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({} if model.qk_norm else {"mlp_bias": False}),  # a Qwen3 has no such option
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": token_id,
        "eos_token_id": token_id,
        "pad_token_id": None,
        # Named twice each: transformers 5 reads the second name, most other readers only the first.
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "torch_dtype": dtype,
        "dtype": dtype,
        **(_without_sliding_window(model.n_layer) if model.qk_norm else {}),
    }


def _without_sliding_window(layers: int) -> dict[str, Any]:
    """What a Qwen3 says besides: every layer attends to all that is before."""
    return {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
    }


def weights_of_ones(model: ModelConfig) -> dict[str, tuple[int]]:
    """Names and shapes of the tensors that the Hugging Face form has besides ours, and that are ones."""
    if not model.qk_norm:
        return {}
    norms = [f"model.layers.{layer}.self_attn.{norm}_norm.weight" for layer in range(model.n_layer) for norm in "qk"]
    return dict.fromkeys(norms, (model.d_model // model.n_head,))


def reference_model(config: Mapping[str, Any], *, norm_eps: float) -> ModelConfig:
    """The `model` section of the reference transformer that computes the same as a Llama, or as a Qwen3 whose norms of
    heads have weights of one.

    Args:
        config: the contents of its `config.json`.
        norm_eps: added by the reference transformer to the mean square in every RMSNorm.

    Raises:
        CheckpointError: it is neither, or the reference transformer cannot compute the same; every reason is listed.
    """
    if config.get("model_type") == "qwen3":
        config = {**_DEFAULTS_OF_QWEN3, **config}
    problems = list(_obstacles(config, norm_eps))
    if problems:
        raise CheckpointError("the reference transformer cannot be this model:\n  " + "\n  ".join(problems))
    try:
        return ModelConfig(
            vocab_size=config["vocab_size"],
            max_seq_len=config["max_position_embeddings"],
            n_layer=config["num_hidden_layers"],
            n_head=config["num_attention_heads"],
            n_kv_head=config.get("num_key_value_heads") or config["num_attention_heads"],
            d_model=config["hidden_size"],
            # SwiGLU is 2/3 of d_ff, rounded up to a multiple of n_head.
            d_ff=3 * config["intermediate_size"] // 2,
            tie_weights=config.get("tie_word_embeddings", False),
            rope_base=_rope(config).get("rope_theta", 10000.0),
            qk_norm=config["model_type"] == "qwen3",
        )
    except ConfigError as error:
        raise CheckpointError(f"the reference transformer cannot be this model: {error}") from error


def reference_names(
    model: ModelConfig, config: Mapping[str, Any], names: Sequence[str], *, norm_eps: float
) -> dict[str, str | None]:
    """The reference transformer's name of each tensor in a Hugging Face folder, None for one that has to be of ones.

    Args:
        model: the section that the reference transformer was built from.
        config: the contents of the folder's `config.json`.
        names: of the tensors in it. If they are not those of a Llama, they stay as they are.
        norm_eps: added by the reference transformer to the mean square in every RMSNorm.

    Raises:
        CheckpointError: it is a Llama or a Qwen3 that computes something else from these tensors than the reference
            transformer.
    """
    if _TOP[_EMBEDDING] not in names:
        return {name: name for name in names}
    theirs = reference_model(config, norm_eps=norm_eps)
    if differences := hidden_differences(theirs.model_dump(), model):
        family = "Qwen3" if theirs.qk_norm else "Llama"
        raise CheckpointError(f"this {family} computes something else than this model:\n  " + "\n  ".join(differences))
    ones = weights_of_ones(theirs)
    return {**from_llama(name for name in names if name not in ones), **{name: None for name in names if name in ones}}


def hidden_differences(theirs: Mapping[str, Any], ours: ModelConfig) -> list[str]:
    """The options by which two reference transformers compute different results from tensors of the same shapes.

    Args:
        theirs: the `model` section of one; an option that it lacks has its default.
        ours: the `model` section of the other.
    """
    options = {key: theirs.get(key, ModelConfig.model_fields[key].default) for key in _WITHOUT_SHAPE}
    return [
        f"model.{key} is {value} there and {getattr(ours, key)} here"
        for key, value in options.items()
        if value != getattr(ours, key)
    ]


def _renamed(
    names: Iterable[str],
    top: Mapping[str, str],
    pattern: re.Pattern[str],
    block: Mapping[str, str],
    layers: str,
    owner: str,
) -> dict[str, str]:
    renamed: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        match = pattern.fullmatch(name)
        if name in top:
            renamed[name] = top[name]
        elif match is not None and match[2] in block:
            renamed[name] = f"{layers}.{match[1]}.{block[match[2]]}.weight"
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"not a tensor of {owner}:\n  " + "\n  ".join(unknown))
    return renamed


def _expected_shapes(model: ModelConfig, feed_forward: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    width = model.d_model
    kv_width = width // model.n_head * model.n_kv_head
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn.q_proj": (width, width),
        "attn.k_proj": (kv_width, width),
        "attn.v_proj": (kv_width, width),
        "attn.out_proj": (width, width),
        "mlp_norm": (width,),
        "mlp.gate_proj": (feed_forward, width),
        "mlp.up_proj": (feed_forward, width),
        "mlp.down_proj": (width, feed_forward),
    }
    expected: dict[str, tuple[int, ...]] = {_EMBEDDING: (model.vocab_size, width), _NORM: (width,)}
    for layer in range(model.n_layer):
        expected |= {f"transformer.h.{layer}.{name}.weight": shape for name, shape in block.items()}
    return expected if tied else {**expected, _HEAD: (model.vocab_size, width)}


def _differences(expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in shapes:
            yield f"{name} is missing"
        elif tuple(shapes[name]) != shape:
            yield f"{name} has shape {tuple(shapes[name])} instead of {shape}"
    yield from (f"{name} is not in the reference transformer" for name in shapes if name not in expected)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# Fixed in the reference transformer, and the defaults of a Llama and a Qwen3.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
_DEFAULT_NORM_EPS = 1e-6
# What a `config.json` of a Qwen3 that does not say otherwise means, as its published configuration class has it.
_DEFAULTS_OF_QWEN3: Mapping[str, Any] = {"num_key_value_heads": 32, "head_dim": 128}


def _obstacles(config: Mapping[str, Any], norm_eps: float) -> Iterator[str]:
    if config.get("model_type") not in ("llama", "qwen3"):
        yield f"model_type is {config.get('model_type')!r}, not 'llama' or 'qwen3'"
        return
    wrong = [name for name in _SIZES if type(config.get(name)) is not int or config[name] < 1]
    if wrong:
        yield from (f"{name} is {config.get(name)!r}, not a size" for name in wrong)
        return
    heads, width, feed_forward = config["num_attention_heads"], config["hidden_size"], config["intermediate_size"]
    head_width = config.get("head_dim")
    if head_width is not None and (type(head_width) is not int or head_width * heads != width):
        yield f"head_dim {head_width!r} is not hidden_size {width} / num_attention_heads {heads}"
    if feed_forward % heads:
        yield f"intermediate_size {feed_forward} is not a multiple of num_attention_heads {heads}"
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            yield f"{name} is {config[name]!r}; here it is always {value!r}"
    others = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
    if others:
        yield f"layer_types has {', '.join(sorted(map(repr, others)))}; here every layer is 'full_attention'"
    if (eps := config.get("rms_norm_eps", _DEFAULT_NORM_EPS)) != norm_eps:
        yield f"rms_norm_eps is {eps!r}; here it is always {norm_eps}"
    rope = _rope(config)
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"its rotary embedding is changed, {rope}; here it is always the plain one"


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the rotary embedding, under the names of transformers 5, whichever version wrote them."""
    found = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    for section in ("rope_scaling", "rope_parameters"):
        given = config.get(section)
        if isinstance(given, Mapping):
            found |= {"rope_type" if name == "type" else name: value for name, value in given.items()}
    return found
