"""The reference model: a decoder-only transformer that knows nothing of trainers.

Pre-norm RMSNorm (Zhang & Sennrich 2019), rotary position embedding (RoPE, Su et al. 2021, in the rotate-half
layout of Llama), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020), no biases. Two options make it
learn faster: `qk_norm` and `ngram_order`.

Legend: `B` batch, `T` sequence, `D` model width, `H` query heads, `K` key/value heads, `E` = D / H head
width, `F` feed-forward width, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from speedtronic import scheduling
from speedtronic.errors import ConfigError
from speedtronic.model.derivatives import only_backward_differentiates
from speedtronic.model.loss import causal_cross_entropy

if TYPE_CHECKING:
    from speedtronic.config import ModelConfig

ModuleT = TypeVar("ModuleT", bound=nn.Module)

NORM_EPS = 1e-5
INIT_STD = 0.02
# Multiplier and modulus of a well-known random number generator (Park & Miller 1988). Their product fits int64.
_HASH_FACTOR, _HASH_MODULUS = 48271, 2**31 - 1
# With fewer rows, a product of matrices takes about as long as reading the weights does.
_MANY_ROWS = 16


class ModelOutput(TypedDict):
    """The result of `ReferenceTransformer.forward`, a plain dict."""

    logits: Tensor
    """`(B, T, V)`, in the compute dtype."""
    loss: Tensor | None
    """Scalar mean cross-entropy in nats per token; `None` without labels."""


@dataclass
class KeyValueCache:
    """What attention keeps of the tokens so far, so that the next one needs no second look at them.

    Attributes:
        keys, values: `(layers, B, K, length, E)`.
        ids: the tokens, `(B, length)`.
        mask: bool `(B, length)`, false for padding; None where there is none.
        length: how many positions are filled.
    """

    keys: Tensor
    values: Tensor
    ids: Tensor
    mask: Tensor | None = None
    length: int = 0


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `ReferenceTransformer`. Construction replaces each `None` by its default.

    Attributes:
        vocab_size: number of token ids, V.
        block_size: longest sequence, in tokens.
        n_layer: number of blocks.
        n_head: number of query heads, H.
        n_kv_head: number of key/value heads, K, a divisor of `n_head`; `None` is `n_head`.
        d_model: model width, D, a multiple of `n_head` with an even head width.
        d_ff: nominal feed-forward width; `None` is `4 * d_model`. SwiGLU has three matrices where a plain
            feed-forward has two, so its real width is 2/3 of this (see `hidden_size`).
        dropout: probability in [0, 1), of embeddings, attention weights and residual branches.
        tie_weights: whether the output head is the token embedding.
        rope_base: base of the rotary wavelengths.
        qk_norm: whether to scale queries and keys to a root mean square of one, per head, before the rotation (Henry
            et al. 2020, without weights).
        ngram_order: longest run of tokens with an embedding of its own, which is added to the embedding of the run's
            last token (hashed n-grams: Bojanowski et al. 2017). 1 means no n-gram embeddings.
        ngram_buckets: rows of each n-gram table; n-grams with the same hash share a row.

    Raises:
        ConfigError: a value is out of range, or two values do not fit each other.
    """

    vocab_size: int = 512
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 8
    n_kv_head: int | None = None
    d_model: int = 256
    d_ff: int | None = None
    dropout: float = 0.0
    tie_weights: bool = True
    rope_base: float = 10000.0
    qk_norm: bool = False
    ngram_order: int = 1
    ngram_buckets: int = 4096

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_kv_head", self.n_head if self.n_kv_head is None else self.n_kv_head)
        object.__setattr__(self, "d_ff", 4 * self.d_model if self.d_ff is None else self.d_ff)
        sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff")
        for name in (*sizes, "ngram_order", "ngram_buckets"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.n_head % self.kv_heads:
            raise ConfigError(f"n_head {self.n_head} must be divisible by n_kv_head {self.n_kv_head}")
        if self.d_model % self.n_head:
            raise ConfigError(f"d_model {self.d_model} must be divisible by n_head {self.n_head}")
        if self.head_size % 2:
            raise ConfigError(
                f"d_model {self.d_model} / n_head {self.n_head} is an odd head width, {self.head_size}; "
                "rotary embedding turns pairs, so it must be even"
            )
        if self.ngram_order > self.block_size:
            raise ConfigError(
                f"ngram_order {self.ngram_order} exceeds block_size {self.block_size}: no run is longer than a sequence"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be in [0, 1), not {self.dropout!r}")
        if not self.rope_base > 0.0:
            raise ConfigError(f"rope_base must be greater than 0, not {self.rope_base!r}")

    @property
    def max_seq_len(self) -> int:
        """Another name for `block_size`."""
        return self.block_size

    @property
    def kv_heads(self) -> int:
        """K, resolved."""
        return cast(int, self.n_kv_head)

    @property
    def head_size(self) -> int:
        """E, the width of one head."""
        return self.d_model // self.n_head

    @property
    def hidden_size(self) -> int:
        """F, the width of SwiGLU: 2/3 of `d_ff`, rounded up to a multiple of `n_head`."""
        per_head = -(-2 * cast(int, self.d_ff) // (3 * self.n_head))
        return per_head * self.n_head


class GPTOptions(TypedDict, total=False):
    """Arguments of `ReferenceTransformer`: those of `GPTConfig`, and `max_seq_len`, another name for `block_size`."""

    vocab_size: int
    block_size: int
    max_seq_len: int
    n_layer: int
    n_head: int
    n_kv_head: int | None
    d_model: int
    d_ff: int | None
    dropout: float
    tie_weights: bool
    rope_base: float
    qk_norm: bool
    ngram_order: int
    ngram_buckets: int


class RMSNorm(nn.Module):
    """Scale by the root mean square of the last dimension: `x / sqrt(mean(x²) + eps) * weight`.

    Input and output `(..., D)` in the same dtype; the arithmetic is never below float32.
    """

    def __init__(self, width: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            # torch's kernel needs equal dtypes, and warns about a half-precision input with float32 weights.
            wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
            return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)
        # The shape is checked because the product would broadcast a width of one. torch's kernel refuses a wrong width.
        if x.shape[-1:] == self.weight.shape and _torch_is_slow_with_norms_of(x):
            return unit_rms(x, self.eps) * self.weight
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


def unit_rms(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """`x / sqrt(mean(x²) + eps)` over the last dimension, in the dtype of `x`; the arithmetic is float32 or more."""
    if _torch_is_slow_with_norms_of(x):
        out: Tensor = _EagerUnitRMS.apply(x, eps)[0]  # type: ignore[no-untyped-call]
        return out
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def _torch_is_slow_with_norms_of(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and only_backward_differentiates()


class _EagerUnitRMS(torch.autograd.Function):
    """`unit_rms` in fewer passes over memory than torch takes, which has no own kernel for it on CPUs.

    With n = x · r and r = 1 / sqrt(mean(x²) + eps), the gradient is dx = r · (dn - n · mean(dn · n)) - r² · n · dr / D.
    Both results are part of the graph and the gradient is made of them alone, so it can be differentiated again.
    """

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
        scale = (mean_square + eps).rsqrt()
        return x * scale, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, of_scale: Tensor | None) -> tuple[Tensor | None, None]:
        normal, scale = ctx.saved_tensors
        gradient = None
        if upstream is not None:
            # Σ dn · n; the -1 / width below makes it -mean(dn · n).
            along = torch.linalg.vecdot(upstream, normal).unsqueeze(-1)
            gradient = torch.addcmul(upstream, normal, along, value=-1 / normal.size(-1)).mul_(scale)
        if of_scale is not None:
            # Only the gradient of a gradient comes this way: the model uses the scale nowhere else.
            through_scale = scale.square() * normal * of_scale / -normal.size(-1)
            gradient = through_scale if gradient is None else gradient + through_scale
        return gradient, None


class RotaryEmbedding(nn.Module):
    """Cosines and sines that rotate each pair `(x[i], x[i + E/2])` by the angle `position / base^(2i / E)`.

    The tables are computed in float64, held in float32 and never saved. They are made again when the module moves to
    another dtype or device, because bfloat16 is too coarse for an angle of a few thousand.
    """

    def __init__(self, head_size: int, max_seq_len: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_size = head_size
        self.max_seq_len = max_seq_len
        self.base = base
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = self._tables(torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Tables of T = `length` positions from `start` on, for `apply_rotary`: two float32 tensors `(T, 1, E)`."""
        return self.cos[start : start + length], self.sin[start : start + length]

    def extra_repr(self) -> str:
        return f"{self.head_size}, max_seq_len={self.max_seq_len}, base={self.base}"

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Not every device has float64, so the tables are computed on the CPU.
        # The angle of pair i at position t is t / base^(2i / E).
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu") / self.head_size
        positions = torch.arange(self.max_seq_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base**-exponents)
        cos, sin = angles.cos(), angles.sin()
        # `apply_rotary` computes x · cos + swap_halves(x) · sin. The minus sign of the first half is in the table: that
        # saves a negation at every use.
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        first, second = (table.unsqueeze(1).to(device, torch.float32) for table in tables)
        return first, second

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        before = self.cos
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos is not before:
            self.cos, self.sin = self._tables(self.cos.device)
        return self


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys `(B, T, H, E)` by the tables of `RotaryEmbedding`, in float32; keeps their dtype."""
    half = x.size(-1) // 2
    # A roll by half the width swaps the two halves, so each element meets the other one of its pair.
    return torch.addcmul(x * cos, x.roll(half, -1), sin).to(x.dtype)


def fused_product(x: Tensor, *projections: nn.Module) -> Tensor:
    """`torch.cat([projection(x) for projection in projections], -1)`, as one matrix product where that is the same.

    The weights stay separate parameters, and each call concatenates them: that copy costs little compared to the
    product, unless there are only a few rows, as in generation. Then each is called on its own, and also if any is not
    a plain `nn.Linear`: one that was replaced, that has hooks, its own forward, or another kind of weight, such as a
    quantised one. So it is with hooks on all modules. A scheduler of out-of-order backprop takes them together.
    """
    if (scheduled := scheduling.product(x, projections)) is not None:
        return scheduled
    few_rows = not torch.is_grad_enabled() and x.numel() < _MANY_ROWS * x.size(-1)
    if few_rows or not all(_is_plain(projection) for projection in projections):
        return torch.cat([projection(x) for projection in projections], -1)
    return F.linear(x, torch.cat([cast(nn.Linear, projection).weight for projection in projections]))


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module does nothing but `x @ weight.T`."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if type(module) is not nn.Linear or any(own) or any(_HOOKS_OF_ALL_MODULES) or "forward" in module.__dict__:
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return type(weight) in (nn.Parameter, Tensor) and bias is None


# The hooks that a profiler or a counter registers for every module at once. torch changes these dicts in place.
_HOOKS_OF_ALL_MODULES = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads; a position sees itself and the past."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_size = config.n_head, config.kv_heads, config.head_size
        kv_width = self.n_kv_head * self.head_size
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.qk_norm = config.qk_norm
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        bias: Tensor | None = None,
        past: tuple[Tensor, Tensor, int] | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `(B, T, D)`.
            rotary: cosine and sine tables for T positions, from `RotaryEmbedding`.
            bias: broadcastable to `(B, H, T, S)`, added to the scores: 0 where a query may see one of the S keys
                (last), -inf elsewhere, causality included. `None` is plain causal attention, which is faster.
            past: this layer's part of a `KeyValueCache` and how many positions are in it, P. The keys and values of x
                are written behind them. S = P + T; without it, S = T.

        Returns:
            `(B, T, D)`.
        """
        batch, length, width = x.shape
        # One product for all heads, then (B, T, H + 2 K, E).
        product = fused_product(x, self.q_proj, self.k_proj, self.v_proj)
        heads = product.view(batch, length, self.n_head + 2 * self.n_kv_head, self.head_size)
        # Queries and keys get the same norm and the same rotation, so they stay together until both are done.
        query_key, value = torch.split(heads, [self.n_head + self.n_kv_head, self.n_kv_head], 2)
        if self.qk_norm:
            query_key = unit_rms(query_key)
        query, key = torch.split(apply_rotary(query_key, *rotary), [self.n_head, self.n_kv_head], 2)
        # torch wants the heads before the positions: (B, H, T, E).
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if past is not None:
            keys, values, known = past
            keys[:, :, known : known + length] = key
            values[:, :, known : known + length] = value
            key, value = keys[:, :, : known + length], values[:, :, : known + length]
        causal = bias is None
        if length == 1:  # sees every key there is; a branch, since a compiler's symbolic comparison is no bool
            causal = False
        if bias is not None and length > 1 and self.n_kv_head != self.n_head:
            # Of torch's attention kernels, the quick ones take a mask or grouped heads, but not both; the other one
            # keeps all scores. So each key/value head is repeated for its queries.
            key, value = (heads.repeat_interleave(self.n_head // self.n_kv_head, 1) for heads in (key, value))
        if bias is not None:
            bias = bias.to(query.dtype)  # the model's forward has guessed it; a layer may have been replaced
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=key.size(1) != query.size(1),
        )
        # Put the heads side by side again: (B, T, D).
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class NGramEmbedding(nn.Module):
    """For each position, the sum of an embedding for each run of 2 … n tokens that ends there.

    There is one table for each length, and the hash of a run selects its row. Positions before the first token, padding
    and tokens of other documents enter the hash as 0.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.buckets = config.ngram_buckets
        lengths = range(2, config.ngram_order + 1)
        self.tables = nn.ModuleList(nn.Embedding(config.ngram_buckets, config.d_model) for _ in lengths)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """`(B, T)` to `(B, T, D)`; arguments as in `ReferenceTransformer.forward`."""
        # 0 stands for "no token here", so token ids start at 1.
        known = input_ids.long() + 1
        if attention_mask is not None:
            known = known * attention_mask.bool()
        run = known
        embedded: list[Tensor] = []
        for distance, table in enumerate(self.tables, 1):
            # Extend the run at every position by the token `distance` positions before it, and look its hash up.
            earlier = _shifted(known, distance)
            if document_ids is not None:
                earlier = earlier * (_shifted(document_ids, distance) == document_ids)
            run = (run * _HASH_FACTOR + earlier) % _HASH_MODULUS
            embedded.append(table(run % self.buckets))
        return reduce(torch.add, embedded)


def _shifted(x: Tensor, distance: int) -> Tensor:
    """The value `distance` positions earlier, `(B, T)`; 0 before the first position."""
    return F.pad(x, (distance, 0))[:, : x.size(1)]


class SwiGLU(nn.Module):
    """Gated feed-forward: `down(silu(gate(x)) * up(x))`, `(..., D)` to `(..., D)` through width F."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.hidden_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.hidden_size, bias=False)
        self.down_proj = nn.Linear(config.hidden_size, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused_product(x, self.gate_proj, self.up_proj).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class TransformerBlock(nn.Module):
    """One pre-norm layer: attention, then SwiGLU, each added to the residual stream.

    Attributes:
        gradient_checkpointing: whether training drops the activations inside the block and computes them again in the
            backward pass, with the same random numbers (Chen et al. 2016).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model)
        self.attn = CausalSelfAttention(config)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        bias: Tensor | None = None,
        past: tuple[Tensor, Tensor, int] | None = None,
    ) -> Tensor:
        """`(B, T, D)` to `(B, T, D)`; arguments as in `CausalSelfAttention.forward`."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._layer, x, rotary, bias, past, use_reentrant=False)
            return recomputed
        return self._layer(x, rotary, bias, past)

    def _layer(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        bias: Tensor | None,
        past: tuple[Tensor, Tensor, int] | None,
    ) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), rotary, bias, past))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class ReferenceTransformer(nn.Module):
    """A small Llama-like language model.

    It takes one `GPTConfig`, or its fields as keyword arguments, with `max_seq_len` as another name for `block_size`.
    Weights start from normal(0, 0.02), drawn from torch's global generator; norms start from one.
    The embedding is `transformer["wte"]`, the blocks are `transformer["h"]`, the head is `lm_head`.

    Raises:
        TypeError: an unknown argument, or a config together with arguments.
        ConfigError: a value is out of range, or `block_size` and `max_seq_len` differ.
    """

    def __init__(self, config: GPTConfig | None = None, **options: Unpack[GPTOptions]) -> None:
        super().__init__()
        self.config = _resolve_config(config, options)
        config = self.config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.d_model),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer)),
                "norm": RMSNorm(config.d_model),
            }
        )
        if config.ngram_order > 1:
            self.transformer["ngrams"] = NGramEmbedding(config)
        self.rotary = RotaryEmbedding(config.head_size, config.block_size, config.rope_base)
        # A tied head takes the embedding's weight. On the meta device, its own weight costs no time and no memory.
        head_device = torch.device("meta") if config.tie_weights else None
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False, device=head_device)
        self._tie()
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, mean=0.0, std=INIT_STD)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> ModelOutput:
        """Predict the next token at every position.

        Args:
            input_ids: integer `(B, T)`, T at most `config.block_size`.
            labels: `(B, T)` or `(B, T - 1)` targets, see `causal_cross_entropy`.
            attention_mask: `(B, T)`, true where there is a real token. Padding on the right needs no mask: with causal
                attention, no real token sees it.
            document_ids: integer `(B, T)`; a position sees only positions with the same id. So several documents in one
                sequence give the same result as each one alone. Rotary positions are relative, so they need not start
                over with each document.
            cache: from `make_cache`; the tokens come after those that are in it, and are added to it. The logits are
                those of the last position, `(B, 1, V)`. Takes no labels and no documents. A mask may hide padding on
                the left, in the call that fills an empty cache.

        Raises:
            ValueError: a shape does not fit, or the sequence is too long.
        """
        if cache is not None:
            if labels is not None or document_ids is not None:
                raise ValueError("a cache is for generation: it takes neither labels nor document_ids")
            return {"logits": self._continue(input_ids, attention_mask, cache), "loss": None}
        self._check_input(input_ids, attention_mask, document_ids)
        rotary = self.rotary(input_ids.size(1))
        # Embed: (B, T) to (B, T, D).
        x = self.transformer["wte"](input_ids)
        bias = _bias(_allowed(attention_mask, document_ids), x)
        if self.config.ngram_order > 1:
            x = x + self.transformer["ngrams"](input_ids, attention_mask, document_ids)
        x = self.transformer["drop"](x)
        # All blocks share the rotary tables and the mask.
        for block in self.blocks:
            x = block(x, rotary, bias)
        # To the vocabulary: (B, T, D) to (B, T, V).
        logits: Tensor = self.lm_head(self.transformer["norm"](x))
        return {"logits": logits, "loss": None if labels is None else causal_cross_entropy(logits, labels)}

    def make_cache(self, batch_size: int, length: int) -> KeyValueCache:
        """An empty cache for `batch_size` sequences of at most `length` tokens, on the model's device."""
        weight = self.lm_head.weight
        keys = torch.zeros(
            (2, self.config.n_layer, batch_size, self.config.kv_heads, length, self.config.head_size),
            dtype=weight.dtype,
            device=weight.device,
        )
        return KeyValueCache(
            keys[0], keys[1], torch.zeros((batch_size, length), dtype=torch.int64, device=weight.device)
        )

    def _continue(self, input_ids: Tensor, attention_mask: Tensor | None, cache: KeyValueCache) -> Tensor:
        """The logits `(B, 1, V)` of the last of some tokens that follow those of the cache."""
        known, length = cache.length, input_ids.size(1)
        longest = min(self.config.block_size, cache.ids.size(1))
        if input_ids.ndim != 2 or input_ids.size(0) != cache.ids.size(0) or known + length > longest:
            raise ValueError(
                f"input_ids of shape {tuple(input_ids.shape)} do not fit behind {known} tokens in a cache for "
                f"{tuple(cache.ids.shape)} and max_seq_len {self.config.block_size}"
            )
        cache.ids[:, known : known + length] = input_ids
        if attention_mask is not None:
            if known:
                raise ValueError("a mask is for the call that fills an empty cache")
            cache.mask = torch.ones_like(cache.ids, dtype=torch.bool)
            cache.mask[:, :length] = attention_mask.bool()
        mask = None if cache.mask is None else cache.mask[:, : known + length]
        allowed = None
        if mask is not None or (known and length > 1):
            seen = _allowed(torch.ones_like(cache.ids[:, : known + length]) if mask is None else mask, None)
            allowed = None if seen is None else seen[:, :, known:]

        x = self.transformer["wte"](input_ids)
        if self.config.ngram_order > 1:
            # The runs that end here begin up to n - 1 tokens before.
            first = max(0, known + 1 - self.config.ngram_order)
            runs = self.transformer["ngrams"](
                cache.ids[:, first : known + length], None if mask is None else mask[:, first:], None
            )
            x = x + runs[:, known - first :]
        x = self.transformer["drop"](x)
        rotary, bias = self.rotary(length, known), _bias(allowed, x)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, bias, (cache.keys[layer], cache.values[layer], known))
        cache.length = known + length
        logits: Tensor = self.lm_head(self.transformer["norm"](x[:, -1:]))
        return logits

    @property
    def supports_merged_microbatches(self) -> bool:
        """Whether no sample of a batch depends on another one or on random numbers: true without dropout."""
        return self.config.dropout == 0.0

    @property
    def blocks(self) -> nn.ModuleList:
        """The `TransformerBlock`s, first to last."""
        return cast(nn.ModuleList, self.transformer["h"])

    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """Let every block recompute its activations in the backward pass, or keep them."""
        for block in self.blocks:
            cast(TransformerBlock, block).gradient_checkpointing = enabled

    def num_parameters(self, trainable_only: bool = False) -> int:
        """Number of weights; tied weights count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable_only)

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations to train on one token, forward and backward: 6·N + 12·L·D·T.

        N counts the weights of all matrix products: the head, tied or not, but not the embedding lookup. As in
        appendix B of the PaLM paper (Chowdhery et al. 2022), attention counts as if it were not causal, and
        recomputation counts nothing.
        """
        linears = (module for module in self.modules() if isinstance(module, nn.Linear))
        matrix_weights = sum(linear.weight.numel() for linear in linears)
        return 6 * matrix_weights + 12 * self.config.n_layer * self.config.d_model * sequence_length

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module.load_state_dict`. A tied model stays tied, and refuses the state of an untied one."""
        head, embedding = (state_dict.get(name) for name in ("lm_head.weight", "transformer.wte.weight"))
        if self.config.tie_weights and _differ(head, embedding):
            raise RuntimeError(
                "lm_head.weight and transformer.wte.weight differ in this state: it belongs to a model with "
                "tie_weights=False and cannot be loaded into one with tie_weights=True"
            )
        result = super().load_state_dict(state_dict, strict, assign)
        self._tie()
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ReferenceTransformer:
        # A move off the meta device makes new parameters, one for each name, so tie them again.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def _tie(self) -> None:
        if self.config.tie_weights:
            self.lm_head.weight = cast(nn.Parameter, self.transformer["wte"].weight)

    def _check_input(self, input_ids: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None) -> None:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must have shape (B, T), not {tuple(input_ids.shape)}")
        if input_ids.size(1) > self.config.block_size:
            raise ValueError(f"a sequence of {input_ids.size(1)} tokens exceeds max_seq_len, {self.config.block_size}")
        for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
            if given is not None and given.shape != input_ids.shape:
                raise ValueError(
                    f"{name} of shape {tuple(given.shape)} does not fit input_ids of shape {tuple(input_ids.shape)}"
                )


GPT = ReferenceTransformer


def build_reference_transformer(config: ModelConfig) -> ReferenceTransformer:
    """Build the reference model from the `model` section of a config.

    Raises:
        ConfigError: a size is out of range, or there are keys in `extra`, which this model does not take.
    """
    if config.extra:
        given = ", ".join(f"model.extra.{key}" for key in config.extra)
        raise ConfigError(f"{given}: the reference transformer takes no extra keys")
    model = ReferenceTransformer(
        vocab_size=config.vocab_size,
        block_size=config.max_seq_len,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        d_model=config.d_model,
        d_ff=config.d_ff,
        dropout=config.dropout,
        tie_weights=config.tie_weights,
        rope_base=config.rope_base,
        qk_norm=config.qk_norm,
        ngram_order=config.ngram_order,
        ngram_buckets=config.ngram_buckets,
    )
    model.set_gradient_checkpointing(config.gradient_checkpointing)
    return model


def set_gradient_checkpointing(module: ModuleT, enabled: bool = True) -> ModuleT:
    """Switch activation recomputation on or off with the module's own `set_gradient_checkpointing(enabled)`.

    Returns:
        The module.

    Raises:
        AttributeError: the module has no such method.
    """
    hook = getattr(module, "set_gradient_checkpointing", None)
    if not callable(hook):
        raise AttributeError(f"{type(module).__name__} has no method set_gradient_checkpointing(enabled)")
    hook(enabled)
    return module


def _resolve_config(config: GPTConfig | None, options: GPTOptions) -> GPTConfig:
    if config is not None:
        if not isinstance(config, GPTConfig):
            raise TypeError(f"the model takes one GPTConfig or keyword arguments, not a {type(config).__name__}")
        if options:
            raise TypeError(f"a GPTConfig is complete: remove the other arguments ({', '.join(options)})")
        return config
    fields: dict[str, Any] = dict(options)
    if "max_seq_len" in fields:
        length = fields.pop("max_seq_len")
        if fields.setdefault("block_size", length) != length:
            raise ConfigError(f"block_size {fields['block_size']} and max_seq_len {length} mean the same: give one")
    known = [field.name for field in dataclasses.fields(GPTConfig)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise TypeError(f"unknown argument {', '.join(unknown)}; the model takes {', '.join(known)}, max_seq_len")
    return GPTConfig(**fields)


def _allowed(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Which key each query may see, bool `(B, 1, T, T)`; None for all of the past.

    A query sees the past keys that are real tokens of its own document, and always its own key. Without its own key, a
    padding position would see nothing, and a softmax over nothing is NaN.
    """
    limits = []
    if attention_mask is not None:
        limits.append(attention_mask.bool()[:, None, None, :])
    if document_ids is not None:
        limits.append(document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if not limits:
        return None
    length = limits[0].size(-1)
    # Row: query, column: key. The lower triangle is the past, its diagonal the query's own key.
    past = torch.ones(length, length, dtype=torch.bool, device=limits[0].device).tril()
    itself = past & past.triu()
    return reduce(torch.logical_and, limits, past) | itself


def _bias(allowed: Tensor | None, like: Tensor) -> Tensor | None:
    """What attention adds to its scores, from `_allowed`: 0 or -inf, in the dtype that queries will have.

    Made once for all layers: from bools, torch would make it again in each. `like` has the device and the dtype of the
    model's activations outside autocast.
    """
    if allowed is None:
        return None
    kind, dtype = like.device.type, like.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return torch.zeros(allowed.shape, dtype=dtype, device=like.device).masked_fill(~allowed, -torch.inf)


def _differ(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether both are there and differ. Tied tensors of one storage are not compared."""
    if first is None or second is None or first is second:
        return False
    return first.data_ptr() != second.data_ptr() and not torch.equal(first, second)
