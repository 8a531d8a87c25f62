from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module
from torch.profiler import ProfilerActivity, profile

from speedtronic.config import ModelConfig
from speedtronic.errors import ConfigError
from speedtronic.model import (
    GPT,
    CausalSelfAttention,
    GPTConfig,
    ReferenceTransformer,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerBlock,
    apply_rotary,
    build_reference_transformer,
    set_gradient_checkpointing,
)
from speedtronic.model import loss as loss_module
from speedtronic.model import transformer as transformer_module
from tests.support.cases import case

TINY: dict[str, Any] = {
    "vocab_size": 23,
    "block_size": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "d_model": 16,
    "d_ff": 30,
}


def tiny(seed: int = 0, **changes: Any) -> ReferenceTransformer:
    torch.manual_seed(seed)
    return ReferenceTransformer(**{**TINY, **changes})


def tokens(batch: int = 2, length: int = 12, seed: int = 3) -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def enlarge(model: nn.Module) -> None:
    """Make the weights large, so that attention is far from uniform and a wrong formula shows."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))


# An independent model in float64: one head at a time, keys and values picked by hand, pairs rotated as complex numbers.


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def plain_rotation(x: Tensor, base: float) -> Tensor:
    length, size = x.shape
    turned = torch.empty_like(x)
    for position in range(length):
        for i in range(size // 2):
            pair = complex(x[position, i].item(), x[position, i + size // 2].item())
            angle = position / base ** (2 * i / size)
            pair *= complex(math.cos(angle), math.sin(angle))
            turned[position, i], turned[position, i + size // 2] = pair.real, pair.imag
    return turned


def plain_attention(attention: CausalSelfAttention, x: Tensor, base: float) -> Tensor:
    weights = {name: value.detach().double() for name, value in attention.named_parameters()}
    size, group = attention.head_size, attention.n_head // attention.n_kv_head
    heads = []
    for head in range(attention.n_head):
        queries = slice(head * size, (head + 1) * size)
        keys = slice(head // group * size, (head // group + 1) * size)
        q, k = x @ weights["q_proj.weight"][queries].T, x @ weights["k_proj.weight"][keys].T
        if attention.qk_norm:
            q, k = (plain_rms_norm(part, torch.ones(size)) for part in (q, k))
        q, k = plain_rotation(q, base), plain_rotation(k, base)
        v = x @ weights["v_proj.weight"][keys].T
        out = torch.zeros_like(v)
        for t in range(len(x)):
            scores = q[t] @ k[: t + 1].T / math.sqrt(size)
            out[t] = scores.softmax(0) @ v[: t + 1]
        heads.append(out)
    return torch.cat(heads, -1) @ weights["out_proj.weight"].T


def plain_swiglu(mlp: SwiGLU, x: Tensor) -> Tensor:
    weights = {name: value.detach().double() for name, value in mlp.named_parameters()}
    gate = x @ weights["gate_proj.weight"].T
    return (gate / (1 + torch.exp(-gate)) * (x @ weights["up_proj.weight"].T)) @ weights["down_proj.weight"].T


def plain_ngrams(model: ReferenceTransformer, row: Tensor) -> Tensor:
    """The n-gram embeddings of each token, for one document without padding."""
    tables = model.transformer["ngrams"].tables if model.config.ngram_order > 1 else []
    added = torch.zeros(len(row), model.config.d_model, dtype=torch.float64)
    for position in range(len(row)):
        run = int(row[position]) + 1
        for distance, table in enumerate(tables, 1):
            run = (run * 48271 + (int(row[position - distance]) + 1 if position >= distance else 0)) % (2**31 - 1)
            added[position] += table.weight.detach().double()[run % model.config.ngram_buckets]
    return added


def plain_logits(model: ReferenceTransformer, ids: Tensor) -> Tensor:
    rows = []
    for row in ids:
        x = model.transformer["wte"].weight.detach().double()[row] + plain_ngrams(model, row)
        for block in model.blocks:
            assert isinstance(block, TransformerBlock)
            normed = plain_rms_norm(x, block.attn_norm.weight.detach().double())
            x = x + plain_attention(block.attn, normed, model.config.rope_base)
            x = x + plain_swiglu(block.mlp, plain_rms_norm(x, block.mlp_norm.weight.detach().double()))
        x = plain_rms_norm(x, model.transformer["norm"].weight.detach().double())
        rows.append(x @ model.lm_head.weight.detach().double().T)
    return torch.stack(rows)


def test_logits_equal_an_independent_model() -> None:
    for tie in (True, False):
        for kv_heads in (1, 2, 4):
            with case(tie, kv_heads):
                model = tiny(n_kv_head=kv_heads, tie_weights=tie, rope_base=50.0)
                enlarge(model)
                ids = tokens()
                torch.testing.assert_close(
                    model(ids)["logits"].double(), plain_logits(model, ids), rtol=1e-4, atol=1e-4
                )


def test_logits_with_qk_norm_and_ngrams_equal_an_independent_model() -> None:
    model = tiny(qk_norm=True, ngram_order=4, ngram_buckets=37)
    enlarge(model)
    ids = tokens()
    torch.testing.assert_close(model(ids)["logits"].double(), plain_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_ngrams_do_not_cross_the_start_of_a_document_or_padding() -> None:
    model = tiny(ngram_order=3)
    enlarge(model)
    first, second = tokens(1, 5, seed=1), tokens(1, 6, seed=2)
    packed = model(torch.cat((first, second), 1), document_ids=torch.tensor([[0] * 5 + [1] * 6]))["logits"]
    alone = torch.cat((model(first)["logits"], model(second)["logits"]), 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    padded = torch.cat((torch.full((1, 3), 7), second), 1)
    mask = torch.tensor([[False] * 3 + [True] * 6])
    torch.testing.assert_close(model(padded, attention_mask=mask)["logits"][:, 3:], model(second)["logits"])


def test_an_ngram_does_not_look_ahead() -> None:
    model = tiny(ngram_order=3)
    ids = tokens(1, 8)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % TINY["vocab_size"]
    before, after = model(ids)["logits"], model(changed)["logits"]
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_projection_that_was_replaced_or_has_hooks_is_called_on_its_own() -> None:
    model = tiny()
    expected = model(tokens())["logits"]
    seen: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "up_proj")):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    torch.testing.assert_close(model(tokens())["logits"], expected)
    assert len(seen) == 2 * TINY["n_layer"]
    attention = model.blocks[0].attn
    assert isinstance(attention, CausalSelfAttention)
    attention.k_proj = nn.Sequential(attention.k_proj)
    torch.testing.assert_close(model(tokens())["logits"], expected)


@pytest.mark.parametrize(
    "register",
    [
        torch_module.register_module_forward_hook,
        torch_module.register_module_forward_pre_hook,
        torch_module.register_module_full_backward_hook,
        torch_module.register_module_full_backward_pre_hook,
    ],
    ids=lambda register: register.__name__,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about outputs that are no tensors
def test_a_hook_on_all_modules_sees_every_layer(register: Callable[..., Any]) -> None:
    """As counters of operations and profilers register them."""
    model = tiny(tie_weights=False, ngram_order=2)
    expected = model(tokens())["logits"]
    names = {module: name for name, module in model.named_modules()}
    seen: set[str] = set()
    handle = register(lambda module, *_: seen.add(names[module]))
    try:
        logits = model(tokens())["logits"]
        logits.sum().backward()
    finally:
        handle.remove()
    torch.testing.assert_close(logits, expected)
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | RMSNorm | nn.Embedding)}
    assert layers <= seen


class Quantised(Tensor):
    """A weight that cannot be concatenated with others, and counts its products."""

    products = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.cat
        cls.products += func is F.linear
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is Tensor.detach else result


def test_a_projection_with_its_own_forward_or_weight_type_is_called_on_its_own() -> None:
    model = tiny()
    expected = model(tokens())["logits"]
    attention = model.blocks[0].attn
    assert isinstance(attention, CausalSelfAttention)
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight.detach().as_subclass(Quantised))
    torch.testing.assert_close(model(tokens())["logits"], expected)
    assert Quantised.products == 1
    # Programs that move weights between devices set `forward` like this.
    attention.k_proj.forward = lambda x: 0 * x[..., : attention.k_proj.out_features]  # type: ignore[method-assign]
    assert not torch.equal(model(tokens())["logits"], expected)


def test_an_empty_batch_has_empty_logits() -> None:
    empty = torch.zeros(0, 8, dtype=torch.long)
    assert tiny(qk_norm=True, ngram_order=3)(empty)["logits"].shape == (0, 8, TINY["vocab_size"])


def test_rms_norm_refuses_another_width() -> None:
    for width in (1, 4):
        with case(width), pytest.raises(RuntimeError, match=r"normalized_shape=\[8\]"):
            RMSNorm(8)(torch.randn(2, width))


def test_rms_norm_has_the_same_gradients_as_torchs() -> None:
    norm = RMSNorm(8, eps=1e-3)
    nn.init.normal_(norm.weight)
    x, upstream = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), upstream)
    theirs = torch.autograd.grad(F.rms_norm(x, (8,), norm.weight, 1e-3), (x, norm.weight), upstream)
    torch.testing.assert_close(ours, theirs)


def test_rms_norm_works_under_function_transforms() -> None:
    norm, x = RMSNorm(8), torch.randn(4, 3, 8)
    torch.testing.assert_close(torch.func.vmap(norm)(x), norm(x))
    gradient = torch.func.grad(lambda part: norm(part).square().sum())(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(norm(leaf).square().sum(), leaf)[0])


def test_derivatives_of_derivatives_through_a_norm_equal_those_of_its_formula() -> None:
    """A penalty on the gradient, and a penalty on the gradient of that, for the input and for the weight."""
    norm = RMSNorm(6)
    nn.init.normal_(norm.weight)
    data = torch.randn(4, 6)

    def three_orders(normalised: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaf, weight = data.clone().requires_grad_(), norm.weight.detach().clone().requires_grad_()
        first = torch.autograd.grad(normalised(leaf, weight).sin().sum(), (leaf, weight), create_graph=True)
        penalty = sum(part.square().sum() for part in first)
        second = torch.autograd.grad(penalty, (leaf, weight), create_graph=True)
        third = torch.autograd.grad(sum(part.pow(3).sum() for part in second), (leaf, weight))
        return [*first, *second, *third]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, x)

    torch.testing.assert_close(three_orders(ours), three_orders(plain_rms_norm), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch.func.jacfwd uses it
def test_function_transforms_of_each_order_through_a_norm_equal_those_of_its_formula() -> None:
    norm, x = RMSNorm(6), torch.randn(2, 6)
    for first in (torch.func.jacrev, torch.func.jacfwd):
        for second in (torch.func.jacrev, torch.func.jacfwd):
            with case(first, second):
                ours = first(second(lambda x: norm(x).sin().sum()))(x)
                theirs = first(second(lambda x: plain_rms_norm(x, torch.ones(6)).sin().sum()))(x)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_penalty_on_the_gradients_of_the_model_equals_one_through_torchs_operations() -> None:
    """The attention kernels that torch takes by itself have no second derivative; the one of its formula has."""
    model, ids = tiny(qk_norm=True, dropout=0.0), tokens()
    enlarge(model)
    weights = list(model.parameters())

    def gradients_of_the_penalty() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):
            first = torch.autograd.grad(model(ids, labels=ids)["loss"], weights, create_graph=True)
            return torch.autograd.grad(sum(part.square().sum() for part in first), weights)

    ours = gradients_of_the_penalty()
    with pytest.MonkeyPatch.context() as patch:
        for module in (transformer_module, loss_module):
            patch.setattr(module, "only_backward_differentiates", lambda: False)
        torchs = gradients_of_the_penalty()
    torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-4)


def test_one_step_of_an_inner_optimizer_is_differentiated_through() -> None:
    """As in MAML (Finn et al. 2017): the loss after an inner step, by the weights before it."""
    norm, x = RMSNorm(6), torch.randn(3, 6)
    labels = torch.tensor([[0, 4, 2]])

    def ours(weight: Tensor) -> Tensor:
        return loss_module.causal_cross_entropy(norm(x @ weight)[None], labels)

    def theirs(weight: Tensor) -> Tensor:
        return F.cross_entropy(plain_rms_norm(x @ weight, torch.ones(6)), labels[0])

    def after_a_step(loss: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
        return loss(weight - 3 * gradient)

    start = torch.randn(6, 6)
    by_ours, by_theirs = (
        torch.autograd.grad(after_a_step(loss, leaf), leaf)
        for loss, leaf in ((loss, start.clone().requires_grad_()) for loss in (ours, theirs))
    )
    torch.testing.assert_close(by_ours, by_theirs, rtol=1e-4, atol=1e-5)
    by_transforms = torch.func.grad(lambda weight: ours(weight - 3 * torch.func.grad(ours)(weight)))(start)
    torch.testing.assert_close((by_transforms,), by_theirs, rtol=1e-4, atol=1e-5)


def test_rms_norm_equals_its_formula() -> None:
    norm = RMSNorm(8, eps=1e-3)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 8)
    expected = plain_rms_norm(x.double(), norm.weight.detach().double(), eps=1e-3)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    for weight_dtype in (torch.float32, torch.bfloat16):
        with case(weight_dtype):
            norm = RMSNorm(64).to(weight_dtype)
            x = torch.randn(4, 64, dtype=torch.bfloat16) * 300
            expected = plain_rms_norm(x.double(), torch.ones(64, dtype=torch.float64)).to(torch.bfloat16)
            assert norm(x).dtype == torch.bfloat16
            torch.testing.assert_close(norm(x), expected, rtol=0, atol=0)


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    rotary = RotaryEmbedding(6, max_seq_len=9, base=20.0)
    x = torch.randn(1, 9, 1, 6)
    turned = apply_rotary(x, *rotary(9))[0, :, 0]
    torch.testing.assert_close(turned.double(), plain_rotation(x[0, :, 0].double(), 20.0), rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_only_on_the_distance() -> None:
    rotary = RotaryEmbedding(8, max_seq_len=40)
    cos, sin = rotary(40)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(query_at: int, key_at: int) -> Tensor:
        turned = [apply_rotary(x, cos[i : i + 1], sin[i : i + 1]) for x, i in ((query, query_at), (key, key_at))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 2), score(36, 31), rtol=1e-4, atol=1e-5)


def test_rotary_tables_stay_float32_and_exact_after_any_cast_of_the_module() -> None:
    rotary = RotaryEmbedding(8, max_seq_len=5000)
    exact = rotary.cos.clone()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        rotary.to(dtype)
        assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
        assert torch.equal(rotary.cos, exact)
    assert math.isclose(rotary.cos[4999, 0, 0].item(), math.cos(4999.0), abs_tol=1e-6)


def test_rotary_tables_are_not_saved() -> None:
    assert not RotaryEmbedding(8, max_seq_len=4).state_dict()


def test_queries_keep_their_precision_in_the_rotation_under_autocast() -> None:
    cos, sin = RotaryEmbedding(8, max_seq_len=300)(300)
    x = torch.randn(1, 300, 1, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        turned = apply_rotary(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rotary(x.float(), cos, sin).bfloat16())


def test_swiglu_width_is_two_thirds_of_d_ff_rounded_up_to_a_multiple_of_n_head() -> None:
    for d_ff, n_head, hidden in ((1024, 8, 688), (30, 4, 20), (31, 4, 24), (3, 2, 2), (1, 8, 8), (96, 8, 64)):
        with case(d_ff, n_head, hidden):
            config = GPTConfig(d_ff=d_ff, n_head=n_head, d_model=16 * n_head)
            assert config.hidden_size == hidden
            assert SwiGLU(config).gate_proj.weight.shape == (hidden, 16 * n_head)


# Construction.


def test_a_config_resolves_key_value_heads_and_feed_forward_width() -> None:
    config = GPTConfig(block_size=64, n_head=4, d_model=32)
    assert (config.n_kv_head, config.d_ff, config.max_seq_len) == (4, 128, 64)


def test_the_defaults_equal_those_of_the_model_section() -> None:
    section = ModelConfig().model_dump()
    config = GPTConfig()
    options = ("dropout", "tie_weights", "rope_base", "qk_norm", "ngram_order", "ngram_buckets")
    for name in ("vocab_size", "n_layer", "n_head", "d_model", *options):
        assert getattr(config, name) == section[name]
    assert config.block_size == section["max_seq_len"]


def test_the_model_takes_keywords_or_one_config() -> None:
    torch.manual_seed(0)
    by_config = ReferenceTransformer(GPTConfig(**TINY))
    by_keywords = tiny()
    assert by_config.config == by_keywords.config
    assert all(torch.equal(a, b) for a, b in zip(by_config.parameters(), by_keywords.parameters(), strict=True))
    assert GPT is ReferenceTransformer


def test_max_seq_len_is_another_name_for_block_size() -> None:
    assert ReferenceTransformer(n_layer=1, d_model=16, max_seq_len=9).config.block_size == 9
    assert ReferenceTransformer(n_layer=1, d_model=16, max_seq_len=9, block_size=9).config.block_size == 9
    with pytest.raises(ConfigError, match="block_size 8 and max_seq_len 9"):
        ReferenceTransformer(max_seq_len=9, block_size=8)


def test_an_unknown_argument_is_a_type_error_that_lists_the_known_ones() -> None:
    with pytest.raises(TypeError, match="n_heads.*n_head"):
        ReferenceTransformer(n_heads=4)  # type: ignore[call-arg]


def test_a_config_and_arguments_together_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="n_layer"):
        ReferenceTransformer(GPTConfig(), n_layer=2)
    with pytest.raises(TypeError, match="dict"):
        ReferenceTransformer({"n_layer": 2})  # type: ignore[arg-type]


def test_a_bad_value_is_a_config_error_and_a_value_error() -> None:
    for options, message in (
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, not 0"),
        ({"n_layer": True}, "n_layer"),
        ({"d_ff": 10.5}, "d_ff"),
        ({"n_head": 4, "n_kv_head": 3}, "n_head 4 must be divisible by n_kv_head 3"),
        ({"d_model": 30, "n_head": 4}, "d_model 30 must be divisible by n_head 4"),
        ({"d_model": 12, "n_head": 4}, "odd head width, 3"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"ngram_order": 0}, "ngram_order must be a whole number of at least 1, not 0"),
        ({"ngram_buckets": 0}, "ngram_buckets"),
        ({"ngram_order": 17, "block_size": 16}, "ngram_order 17 exceeds block_size 16"),
    ):
        with case(options, message):
            with pytest.raises(ConfigError, match=message) as caught:
                ReferenceTransformer(**options)
            assert isinstance(caught.value, ValueError)


def test_the_model_section_of_a_config_builds_the_model() -> None:
    section = ModelConfig(
        vocab_size=31,
        max_seq_len=12,
        n_layer=3,
        n_head=4,
        n_kv_head=2,
        d_model=16,
        d_ff=24,
        dropout=0.25,
        tie_weights=False,
        rope_base=77.0,
        qk_norm=True,
        ngram_order=3,
        ngram_buckets=50,
        gradient_checkpointing=True,
    )
    model = build_reference_transformer(section)
    assert model.config == GPTConfig(31, 12, 3, 4, 2, 16, 24, 0.25, False, 77.0, True, 3, 50)
    assert all(block.gradient_checkpointing for block in model.blocks)


def test_weights_start_from_a_narrow_normal_and_norms_from_one() -> None:
    model = tiny(d_model=128, vocab_size=400)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.001, name


def test_the_seed_decides_the_weights() -> None:
    first, again, other = tiny(1), tiny(1), tiny(2)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_no_part_has_a_bias_and_projections_are_separate_matrices() -> None:
    names = [name for name, _ in tiny(n_layer=1, tie_weights=False).named_parameters()]
    parts = (
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.out_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    expected = {f"transformer.h.0.{part}.weight" for part in (*parts, "attn_norm", "mlp_norm")}
    assert set(names) == expected | {"transformer.wte.weight", "transformer.norm.weight", "lm_head.weight"}


# Tied embeddings.


def test_a_tied_head_is_the_embedding_and_counts_once() -> None:
    tied, untied = tiny(tie_weights=True), tiny(tie_weights=False)
    assert tied.lm_head.weight is tied.transformer["wte"].weight
    assert untied.num_parameters() - tied.num_parameters() == TINY["vocab_size"] * TINY["d_model"]
    assert tied.num_parameters() == sum(p.numel() for p in tied.parameters())


def test_frozen_weights_are_left_out_of_the_trainable_count() -> None:
    model = tiny()
    model.transformer["norm"].requires_grad_(False)
    assert model.num_parameters(trainable_only=True) == model.num_parameters() - TINY["d_model"]


def test_a_tied_model_stays_tied_when_a_state_is_assigned() -> None:
    model, source = tiny(1), tiny(2)
    model.load_state_dict(source.state_dict(), assign=True)
    assert model.lm_head.weight is model.transformer["wte"].weight
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


def test_a_tied_model_refuses_the_state_of_an_untied_one() -> None:
    with pytest.raises(RuntimeError, match="tie_weights=False"):
        tiny(tie_weights=True).load_state_dict(tiny(tie_weights=False).state_dict())


def test_an_untied_model_takes_the_state_of_a_tied_one() -> None:
    source, model = tiny(1, tie_weights=True), tiny(2, tie_weights=False)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens())["logits"], source(tokens())["logits"])


# Behaviour.


def test_with_labels_the_loss_is_the_mean_cross_entropy() -> None:
    model, ids = tiny(), tokens()
    assert model(ids)["loss"] is None
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    out = model(ids, labels)
    expected = nn.functional.cross_entropy(out["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(out["loss"], expected)
    torch.testing.assert_close(model(ids, ids[:, 1:])["loss"], expected)


def test_the_first_loss_is_near_that_of_a_uniform_guess() -> None:
    ids = tokens()
    assert tiny()(ids, ids.roll(-1, 1))["loss"].item() == pytest.approx(math.log(TINY["vocab_size"]), abs=0.1)


def test_all_ignored_labels_give_a_zero_that_reaches_every_weight() -> None:
    model = tiny()
    loss = model(tokens(), torch.full((2, 12), -100))["loss"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in model.parameters())


def test_future_tokens_do_not_change_past_logits() -> None:
    model = tiny()
    enlarge(model)
    ids = tokens()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TINY["vocab_size"]
    before, after = model(ids)["logits"], model(changed)["logits"]
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3


def test_right_padding_needs_no_mask() -> None:
    model, ids = tiny(), tokens(length=9)
    enlarge(model)
    padded = torch.cat((ids, torch.zeros(2, 3, dtype=torch.long)), 1)
    mask = torch.arange(12).expand(2, 12) < 9
    expected = model(ids)["logits"]
    torch.testing.assert_close(model(padded)["logits"][:, :9], expected)
    torch.testing.assert_close(model(padded, attention_mask=mask)["logits"][:, :9], expected)


def test_left_padding_with_a_mask_equals_no_padding() -> None:
    for mask_dtype in (torch.bool, torch.int64, torch.float32):
        with case(mask_dtype):
            model, ids = tiny(), tokens(length=9)
            enlarge(model)
            padded = torch.cat((torch.full((2, 3), 5), ids), 1)
            mask = (torch.arange(12).expand(2, 12) >= 3).to(mask_dtype)
            torch.testing.assert_close(
                model(padded, attention_mask=mask)["logits"][:, 3:], model(ids)["logits"], rtol=1e-4, atol=1e-4
            )


# Two rows, each packed with documents of these lengths.
PACKED = ((5, 4, 3), (1, 11))


def packed_ids() -> Tensor:
    return torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in PACKED])


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_documents_with_a_mask_equal_separate_documents(recompute: bool) -> None:
    packed, alone = tiny(), tiny()
    enlarge(packed)
    enlarge(alone)
    packed.set_gradient_checkpointing(recompute)
    ids, labels = tokens(), tokens(seed=4)
    out = packed(ids, labels, document_ids=packed_ids())
    out["loss"].backward()
    logits = []
    for row, lengths in enumerate(PACKED):
        documents = zip(ids[row].split(lengths), labels[row].split(lengths), strict=True)
        outputs = [alone(document[None], targets[None]) for document, targets in documents]
        for length, output in zip(lengths, outputs, strict=True):
            (output["loss"] * length / ids.numel()).backward()
        logits.append(torch.cat([output["logits"][0] for output in outputs]))
    torch.testing.assert_close(out["logits"], torch.stack(logits), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_a_document_mask_and_an_attention_mask_act_together() -> None:
    model, ids = tiny(), tokens()
    enlarge(model)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[:, 6] = False  # a hole in the second document of the first row and of the second
    both = model(ids, attention_mask=real, document_ids=packed_ids())["logits"]
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % TINY["vocab_size"]
    unseen = model(changed, attention_mask=real, document_ids=packed_ids())["logits"]
    torch.testing.assert_close(both[:, 7:], unseen[:, 7:])
    documents = model(ids, document_ids=packed_ids())["logits"]
    assert (both[:, 7:9] - documents[:, 7:9]).abs().amax() > 1e-3
    torch.testing.assert_close(both[0, 9:], documents[0, 9:])  # the third document never saw the hole


def test_one_document_is_plain_causal_attention() -> None:
    model, ids = tiny(), tokens()
    enlarge(model)
    masked = model(ids, document_ids=torch.full_like(ids, 3))["logits"]
    torch.testing.assert_close(masked, model(ids)["logits"], rtol=1e-5, atol=1e-5)


def test_a_row_of_only_padding_stays_finite() -> None:
    model, ids = tiny(), tokens()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1] = False
    labels = ids.masked_fill(~mask, -100)
    out = model(ids, labels, mask)
    out["loss"].backward()
    assert out["logits"].isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_shapes_that_do_not_fit_are_refused_and_the_error_names_both() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"17 tokens exceeds max_seq_len, 16"):
        model(tokens(length=17))
    with pytest.raises(ValueError, match=r"\(B, T\), not \(12,\)"):
        model(tokens()[0])
    with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 11\).*\(2, 12\)"):
        model(tokens(), attention_mask=torch.ones(2, 11))
    with pytest.raises(ValueError, match=r"document_ids of shape \(12,\).*\(2, 12\)"):
        model(tokens(), document_ids=torch.zeros(12, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2, 10\).*\(2, 12, 23\)"):
        model(tokens(), torch.zeros(2, 10, dtype=torch.long))


def test_dropout_acts_only_in_training() -> None:
    model, ids = tiny(dropout=0.5), tokens()
    assert not torch.equal(model(ids)["logits"], model(ids)["logits"])
    model.eval()
    assert torch.equal(model(ids)["logits"], model(ids)["logits"])


def test_dropout_reaches_each_place() -> None:
    for place in ("embedding", "attention", "residual"):
        with case(place):
            model = tiny(dropout=0.5, n_layer=1)
            block = model.blocks[0]
            assert isinstance(block, TransformerBlock)
            if place != "embedding":
                model.transformer["drop"].eval()
            if place != "attention":
                block.attn.eval()
            if place != "residual":
                block.dropout.eval()
            assert not torch.equal(model(tokens())["logits"], model(tokens())["logits"])


def test_three_updates_move_every_trainable_weight() -> None:
    model = tiny(tie_weights=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        ids = tokens(seed=step)
        model(ids, ids.roll(-1, 1))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    unmoved = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not unmoved


def test_a_model_learns_a_sequence_by_heart() -> None:
    model, ids = tiny(d_model=32), tokens(batch=1)
    labels = ids.roll(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(ids, labels)["loss"]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_bfloat16_autocast_comes_close_to_float32() -> None:
    model, ids = tiny(), tokens()
    enlarge(model)
    exact = model(ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(ids, ids)
    assert rough["logits"].dtype == torch.bfloat16
    assert rough["loss"].dtype == torch.float32
    assert rough["loss"].item() == pytest.approx(exact["loss"].item(), rel=0.02)


def test_a_model_of_bfloat16_weights_computes_in_bfloat16() -> None:
    model = tiny().bfloat16()
    assert model(tokens())["logits"].dtype == torch.bfloat16


# Gradient checkpointing.


def gradients(model: ReferenceTransformer, seed: int = 9) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(tokens(), tokens().roll(-1, 1))["loss"].backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_recomputed_activations_give_the_same_gradients_even_with_dropout() -> None:
    model = tiny(dropout=0.3)
    plain = gradients(model)
    model.set_gradient_checkpointing(True)
    recomputed = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def count_attention_calls(model: ReferenceTransformer, backward: bool) -> int:
    calls = []
    hooks = [block.attn.register_forward_hook(lambda *_: calls.append(1)) for block in model.blocks]
    loss = model(tokens(), tokens())["loss"]
    if backward:
        loss.backward()
    for hook in hooks:
        hook.remove()
    return len(calls)


def test_activations_are_recomputed_only_in_training() -> None:
    model = tiny()
    assert count_attention_calls(model, backward=True) == 2
    model.set_gradient_checkpointing(True)
    assert count_attention_calls(model, backward=True) == 4
    model.eval()
    assert count_attention_calls(model, backward=True) == 2
    model.train()
    with torch.no_grad():
        assert count_attention_calls(model, backward=False) == 2


def test_gradient_checkpointing_reaches_every_block_and_returns_the_module() -> None:
    model = tiny()
    assert set_gradient_checkpointing(model) is model
    assert all(block.gradient_checkpointing for block in model.transformer["h"])
    assert set_gradient_checkpointing(model, False) is model
    assert not any(block.gradient_checkpointing for block in model.transformer["h"])


def test_a_module_without_gradient_checkpointing_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Linear has no method set_gradient_checkpointing"):
        set_gradient_checkpointing(nn.Linear(1, 1))


# Copies, devices, numbers.


def test_a_state_dict_carries_the_whole_model() -> None:
    source, model = tiny(1), tiny(2)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens())["logits"], source(tokens())["logits"])


def test_a_deep_copy_is_independent_and_still_tied() -> None:
    model = tiny()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens())["logits"], model(tokens())["logits"])
    assert twin.lm_head.weight is twin.transformer["wte"].weight
    assert twin.lm_head.weight is not model.lm_head.weight


def test_a_model_built_on_the_meta_device_becomes_real_with_a_state() -> None:
    source = tiny()
    with torch.device("meta"):
        model = tiny()
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.transformer["wte"].weight
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens())["logits"], source(tokens())["logits"])


def test_flops_per_token_follow_the_palm_formula() -> None:
    model = tiny(tie_weights=True)
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    feed_forward = 3 * 16 * 20
    products = 2 * (attention + feed_forward) + 23 * 16
    assert model.flops_per_token(12) == 6 * products + 12 * 2 * 16 * 12
    assert tiny(tie_weights=False).flops_per_token(12) == model.flops_per_token(12)


def test_a_training_step_reads_nothing_back_from_the_device() -> None:
    model, ids = tiny(dropout=0.1), tokens()
    mask = torch.ones_like(ids, dtype=torch.bool)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(ids, ids, mask)["loss"].backward()
        model(ids, ids, mask, torch.zeros_like(ids))["loss"].backward()
        model(ids, torch.full_like(ids, -100))["loss"].backward()
    operations = {event.key for event in profiler.key_averages()}
    assert "aten::scaled_dot_product_attention" in operations
    assert "aten::_local_scalar_dense" not in operations


def test_grouped_keys_are_not_copied_before_attention() -> None:
    shapes = []
    original = nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        shapes.append((query.shape[1], key.shape[1], value.shape[1], options["enable_gqa"], options["is_causal"]))
        return original(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", spy)
        tiny()(tokens())
    assert shapes == [(4, 2, 2, True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_model_compiles_without_a_graph_break(recompute: bool, dynamic: bool) -> None:
    model, ids = tiny(), tokens()
    model.set_gradient_checkpointing(recompute)
    torch.compiler.reset()  # else the sizes that other tests compiled for decide which are symbolic
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    labels = torch.full_like(ids, -100)
    mask = torch.ones_like(ids, dtype=torch.bool)
    for masks in ((None, None), (mask, None), (None, packed_ids()), (mask, packed_ids())):
        expected, out = model(ids, labels, *masks), compiled(ids, labels, *masks)
        torch.testing.assert_close(out["logits"], expected["logits"])
        out["loss"].backward()
        assert out["loss"].item() == 0.0


def test_attention_with_a_mask_gets_one_bias_for_all_layers_and_as_many_key_heads_as_query_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card's quick kernels refuse a mask beside grouped heads, and a mask of bools becomes a bias in each layer."""
    seen: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
    attention = F.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((query, key, options))
        return attention(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    model = tiny(n_layer=3, n_head=4, n_kv_head=2)
    ids = torch.arange(12).reshape(2, 6) % 11
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6])
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with case(precision):
            seen.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                model(ids, attention_mask=mask)
            assert len({id(options["attn_mask"]) for _, _, options in seen}) == 1
            for query, key, options in seen:
                assert options["attn_mask"].dtype == query.dtype == dtype
                assert key.shape == query.shape
                assert not options["enable_gqa"]
    seen.clear()
    model(ids)
    assert all(key.size(1) == 2 and options["enable_gqa"] for _, key, options in seen), "without a mask they may differ"


def test_repeated_key_heads_and_a_bias_give_what_grouped_heads_and_bools_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(n_layer=2, n_head=4, n_kv_head=2)
    ids = torch.arange(12).reshape(2, 6) % 11
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    ours = model(ids, ids, document_ids=documents)
    attention = F.scaled_dot_product_attention

    def plain(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, **options: Any) -> Tensor:
        del options
        return attention(query, key[:, ::2], value[:, ::2], attn_mask=attn_mask == 0, enable_gqa=True)

    monkeypatch.setattr(F, "scaled_dot_product_attention", plain)
    torch.testing.assert_close(model(ids, ids, document_ids=documents)["logits"], ours["logits"])
