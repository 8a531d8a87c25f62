"""How fast a model writes, beside Hugging Face's `generate` with its cache on an equal Llama."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from speedtronic import ReferenceTransformer
from speedtronic.bench.figures import Figure, LeftOutError, Settings, interleaved, ratios, seconds_of
from speedtronic.generation import generate_batch, generate_tokens

VOCABULARY, PROMPT, BATCH = 512, list(range(16)), 8


def generation(settings: Settings) -> Iterator[Figure]:
    """The rate of tokens of a text over that of `transformers`, which has the same weights and writes the same text."""
    if find_spec("transformers") is None:
        raise LeftOutError("needs transformers: pip install transformers")
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    tokens, layers, width = (8, 1, 32) if settings.quick else (512, 4, 256)
    context = len(PROMPT) + tokens
    model = ReferenceTransformer(
        vocab_size=VOCABULARY, block_size=context, n_layer=layers, n_head=8, d_model=width
    ).eval()
    options: dict[str, Any] = {"max_new_tokens": tokens, "context_length": context, "temperature": 0.0}
    writers: dict[str, Callable[[], list[int]]] = {
        "transformers": partial(_equal_llama(model), tokens),
        "one text": lambda: list(generate_tokens(model, PROMPT, **options)),
        f"{BATCH} texts at once": lambda: generate_batch(model, [PROMPT] * BATCH, **options)[-1],
    }
    written = {name: write() for name, write in writers.items()}
    if not all(text == written["transformers"] for text in written.values()):
        raise RuntimeError("the texts differ, so their times cannot be compared")
    clocks = {name: partial(seconds_of, write) for name, write in writers.items()}
    seconds = interleaved(clocks, settings.rounds_or(5))
    yield Figure(name="one text", rounds=ratios(seconds["transformers"], seconds["one text"]), at_least=0.8)
    at_once = ratios([BATCH * each for each in seconds["transformers"]], seconds[f"{BATCH} texts at once"])
    yield Figure(name=f"{BATCH} texts at once", rounds=at_once)


def _equal_llama(model: ReferenceTransformer) -> Callable[[int], list[int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from speedtronic.checkpoint.export.llama import to_llama

    shape = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            intermediate_size=shape.hidden_size,
            num_hidden_layers=shape.n_layer,
            num_attention_heads=shape.n_head,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.block_size,
            rms_norm_eps=1e-5,
            rope_theta=shape.rope_base,
            tie_word_embeddings=True,
        )
    ).eval()
    state = model.state_dict()
    names = to_llama(state)
    llama.load_state_dict({names[name]: tensor for name, tensor in state.items() if name in names}, strict=False)
    llama.tie_weights()

    def write(tokens: int) -> list[int]:
        ids = torch.tensor([PROMPT])
        out = llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=True,
        )
        return [int(token) for token in out[0, len(PROMPT) :]]

    return write
