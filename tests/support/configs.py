"""A configuration that trains in milliseconds, and its variations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "run": {"max_steps": 4},
    "model": {"vocab_size": 64, "max_seq_len": 16, "n_layer": 1, "n_head": 2, "d_model": 16},
    "data": {"num_tokens": 640, "micro_batch_size": 2, "target_batch_size": 2},
    "scheduler": {"warmup_steps": 2},
}


def tiny(output: Path | str, **sections: Any) -> dict[str, Any]:
    """`TINY` in an output folder, with the keys of `sections` on top of it."""
    merged: dict[str, Any] = {name: dict(keys) for name, keys in TINY.items()}
    merged["run"]["output_dir"] = str(output)
    for name, keys in sections.items():
        merged[name] = {**merged.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return merged
