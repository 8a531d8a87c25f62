"""The reference transformer, its loss, and helpers for any model: evaluation mode, gradient checkpointing."""

from __future__ import annotations

from speedtronic.model.loss import IGNORE_INDEX, causal_cross_entropy, causal_cross_entropy_sum
from speedtronic.model.modes import evaluation_mode
from speedtronic.model.transformer import (
    GPT,
    CausalSelfAttention,
    GPTConfig,
    ModelOutput,
    ReferenceTransformer,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerBlock,
    apply_rotary,
    build_reference_transformer,
    set_gradient_checkpointing,
)

__all__ = [
    "GPT",
    "IGNORE_INDEX",
    "CausalSelfAttention",
    "GPTConfig",
    "ModelOutput",
    "RMSNorm",
    "ReferenceTransformer",
    "RotaryEmbedding",
    "SwiGLU",
    "TransformerBlock",
    "apply_rotary",
    "build_reference_transformer",
    "causal_cross_entropy",
    "causal_cross_entropy_sum",
    "evaluation_mode",
    "set_gradient_checkpointing",
]
