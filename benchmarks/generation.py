"""How fast a model writes, against Hugging Face's `generate` with its cache on an equal Llama.

    python benchmarks/generation.py [--tokens N] [--rounds N] [--layers N] [--width N] [--json]

Both models have the same weights and get the same prompt of 16 tokens. In each round all contenders write in turn
(A B C A B C …); the figures are medians of the rounds' ratios. The likeliest token is taken each time, so that the
texts can be compared: the program ends with an error where they differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from speedtronic import ReferenceTransformer
from speedtronic.generation import generate_batch, generate_tokens

VOCABULARY, PROMPT, BATCH = 512, list(range(16)), 8


def main() -> None:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    context = len(PROMPT) + arguments.tokens
    model = ReferenceTransformer(
        vocab_size=VOCABULARY, block_size=context, n_layer=arguments.layers, n_head=8, d_model=arguments.width
    ).eval()
    theirs = _equal_llama(model)
    options: dict[str, Any] = {"max_new_tokens": arguments.tokens, "context_length": context, "temperature": 0.0}
    contenders: dict[str, Callable[[], list[int]]] = {
        "speedtronic": lambda: list(generate_tokens(model, PROMPT, **options)),
        "transformers": lambda: theirs(arguments.tokens),
        f"speedtronic, {BATCH} prompts at once": lambda: generate_batch(model, [PROMPT] * BATCH, **options)[-1],
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    texts = [write() for write in contenders.values()]
    if not all(text == texts[0] for text in texts):
        raise SystemExit("the texts differ")
    for _ in range(arguments.rounds):
        for name, write in contenders.items():
            started = time.perf_counter()
            write()
            seconds[name].append(time.perf_counter() - started)
    ratios = {
        name: statistics.median(
            (BATCH if name.endswith("at once") else 1) * base / own
            for base, own in zip(seconds["transformers"], seconds[name], strict=True)
        )
        for name in contenders
    }
    if arguments.json:
        print(json.dumps({"tokens": arguments.tokens, "rounds": arguments.rounds, "speed_over_transformers": ratios}))
        return
    print(f"{arguments.tokens} new tokens, {arguments.layers} layers of {arguments.width}, {arguments.rounds} rounds")
    for name, ratio in ratios.items():
        rate = arguments.tokens / statistics.median(seconds[name])
        print(f"  {name:<34}{ratio:6.2f} x the tokens a second of transformers   ({rate:.0f} a second a text here)")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="that each text gets (default 512)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default 4)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--json", action="store_true", help="print one line that a program can read")
    return parser.parse_args()


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


if __name__ == "__main__":
    main()
