"""Tiny causal language models of Hugging Face's `transformers`, with random weights."""

from __future__ import annotations

from types import ModuleType
from typing import cast

import torch
from torch import nn

VOCABULARY, LENGTH = 64, 16


def tiny_model(transformers: ModuleType, kind: str, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
        return cast(nn.Module, transformers.GPT2LMHeadModel(config))
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
    )
    return cast(nn.Module, transformers.LlamaForCausalLM(config))
