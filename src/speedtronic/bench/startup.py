"""How soon a command answers, and how soon a run has made its first steps. Whole processes are measured."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from speedtronic.bench import startup_by_hand as by_hand
from speedtronic.bench.figures import Clock, Figure, Settings, interleaved, ratios, seconds_of

SMOKE = f"""
run: {{max_steps: {by_hand.STEPS}, output_dir: run}}
model:
  vocab_size: {by_hand.VOCABULARY}
  max_seq_len: {by_hand.LENGTH}
  n_layer: {by_hand.LAYERS}
  n_head: {by_hand.HEADS}
  d_model: {by_hand.WIDTH}
data:
  num_tokens: 4096
  micro_batch_size: {by_hand.MICRO_BATCH}
  target_batch_size: {by_hand.MICRO_BATCH * by_hand.MICRO_BATCHES}
scheduler: {{warmup_steps: 1}}
"""
# Each with what it is compared to, and the goal.
COMMANDS: dict[str, tuple[list[str], str, float]] = {
    "--help": (["--help"], "import torch", 0.25),
    "validate": (["validate", "smoke.yaml"], "import torch", 0.25),
    "schema": (["schema"], "import torch", 0.25),
    "train, 4 steps": (["train", "smoke.yaml", "--overwrite"], "the same by hand", 1.1),
}


def startup(settings: Settings) -> Iterator[Figure]:
    """The time of commands over `import torch`, and of a short training over the same by hand."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "smoke.yaml").write_text(SMOKE, encoding="utf-8")

        def process(*arguments: str) -> Clock:
            command = [sys.executable, *arguments]
            quietly = partial(subprocess.run, command, cwd=folder, check=True, capture_output=True)
            return partial(seconds_of, quietly)

        contenders = {
            "import torch": process("-c", "import torch"),
            "the same by hand": process("-P", by_hand.__file__),  # as a file: it must not pay for our package
            **{name: process("-m", "speedtronic", *words) for name, (words, _, _) in COMMANDS.items()},
        }
        interleaved(contenders, 1)  # fills the page cache
        seconds = interleaved(contenders, settings.rounds_or(9))
    for name, (_, base, goal) in COMMANDS.items():
        yield Figure(name=f"{name} ÷ {base}", rounds=ratios(seconds[name], seconds[base]), at_most=goal)
