"""What is trained: the model, its text, and the configurations of the three nodes and of one process alone."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture_diloco.places import Place

SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
SUBSTITUTE_SIZE = 1_100_000  # characters

NODES = ("anna", "berta", "carla")
MASTER = NODES[0]

BATCH, CONTEXT = 12, 64


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        steps: of each node.
        inner_steps: of those, between two exchanges.
        pace: the least seconds that a step of a node takes.
        every_steps: of a node, between two checkpoints.
    """

    steps: int = 1000
    inner_steps: int = 20
    pace: float = 0.04
    every_steps: int = 20


def text_at(given: Path | None, folder: Path) -> Path:
    """The text: the given one, tiny Shakespeare where it lies, or else what Python's own library makes up."""
    if given is not None or SHAKESPEARE.exists():
        return given or SHAKESPEARE
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    characters = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
    substitute = folder / "python-library.txt"
    substitute.write_bytes(characters[:SUBSTITUTE_SIZE].encode("ascii", "replace"))
    return substitute


def together(folder: Path, text: Path, size: Size, seed: int, place: Place) -> dict[str, Any]:
    """The configuration that all nodes share; each adds its name, its role and its folder."""
    common = _training(text, size.steps, BATCH, seed)
    common["checkpoint"] = {"every_steps": size.every_steps, "keep_last": 2}
    common["plugins"] = ["tests.torture_diloco.machine"]
    common["distributed"] = {
        "enabled": True,
        "role": "worker",
        "repo_id": place.url,
        "store_options": dict(place.options),
        "state_dir": str(folder / "state"),
        "expected_nodes": len(NODES),
        "inner_steps": size.inner_steps,
        "poll_interval": place.poll_interval,
        "retry_initial": 0.2,
        "retry_max": 2.0,
    }
    return common


def alone(folder: Path, text: Path, seed: int, *, steps: int, batch: int) -> dict[str, Any]:
    """The configuration of one process that trains the same model on the same text."""
    config = _training(text, steps, batch, seed)
    config["run"]["output_dir"] = str(folder)
    config["checkpoint"] = {"every_steps": steps, "keep_last": 1}
    return config


def _training(text: Path, steps: int, batch: int, seed: int) -> dict[str, Any]:
    return {
        "run": {"max_steps": steps, "seed": seed, "threads": 1},
        "model": {
            "vocab_size": 128,
            "max_seq_len": CONTEXT,
            "n_layer": 2,
            "n_head": 4,
            "d_model": 64,
            "qk_norm": True,
        },
        "data": {
            "text_path": str(text),
            "tokenizer": "chars",
            "validation_fraction": 0.1,
            "micro_batch_size": BATCH,
            "target_batch_size": batch,
            "shuffle": True,
        },
        "optimizer": {
            "name": "muon",
            "lr": 2e-2,
            "muon_lr": 1e-2,
            "muon_momentum": 0.9,
            "muon_coefficients": "polar_express",
            "muon_ns_steps": 3,
            "betas": [0.8, 0.95],
            "weight_decay": 0.0,
            "fused": True,
        },
        "scheduler": {"name": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0},
        "eval": {"every_steps": None, "at_end": False},
        "logging": {"every_steps": 1, "json_file": "metrics.jsonl", "progress": "off"},
    }


def write(config: Mapping[str, Any], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return file


def held_out_loss(config_file: Path, weights: Path) -> float:
    """Nats per character over the whole tenth of the text that nobody was trained on."""
    import torch

    from speedtronic.checkpoint.initial_weights import load_initial_weights
    from speedtronic.config import load_config
    from speedtronic.data import build_data
    from speedtronic.evaluation import HeldOutLoss
    from speedtronic.precision import resolve_precision
    from speedtronic.registry import build_model

    config = load_config(config_file).validate()
    model = build_model(config.model)
    load_initial_weights(model, weights)
    validation = build_data(config, pin_memory=False).validation
    assert validation is not None, "a tenth is held out"
    cpu = torch.device("cpu")
    precision = resolve_precision(config.precision, cpu)
    result = HeldOutLoss(lambda: validation, device=cpu, precision=precision)(model)
    assert result is not None, "nothing asks it to stop"
    return float(result["loss"])
