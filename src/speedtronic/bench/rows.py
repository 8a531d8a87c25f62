"""The rows of `speedtronic bench`. Each is measured in a process of its own, and one that fails ends no other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# The names are needed for `--help`, which answers without pydantic.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from speedtronic.bench.figures import Figure, Outcome, Settings


class Row(NamedTuple):
    """A group of figures that are measured together.

    Attributes:
        about: what is measured.
        function: the module of this package and the function that measure it.
    """

    about: str
    function: str


ROWS = {
    "choices": Row("speed of choices in a loop by hand ÷ the plain loop", "loops:choices_by_hand"),
    "overhead": Row("fit ÷ the same steps by hand, each step logged", "loops:overhead"),
    "compiled": Row("fit ÷ a loop by hand, both with compile + fused", "loops:compiled"),
    "tune": Row("fit with tune ÷ the plain loop by hand", "loops:tuned"),
    "tune-bf16": Row("the same where the configuration allows bf16", "loops:tuned_bf16"),
    "metrics": Row("memory of the metrics of a step", "loops:metrics_memory"),
    "startup": Row("commands ÷ import torch, a short training ÷ the same by hand", "startup:startup"),
    "checkpoint": Row("how long a save blocks the loop ÷ torch.save", "checkpointing:blocked"),
    "checkpoint-steps": Row("a step while a checkpoint is written ÷ one without", "checkpointing:slowdown"),
    "muon": Row("a step of Muon ÷ torch's, ÷ the formula in fp32", "optimizer_step:muon"),
    "cautious": Row("a step of cautious AdamW ÷ fused AdamW", "optimizer_step:cautious"),
    "optimizer-memory": Row("memory of optimizer steps, in copies of the weights", "optimizer_step:memory"),
    "data": Row("batches of shards ÷ batches of streamed text", "data:shards_beside_text"),
    "generation": Row("tokens a second ÷ Hugging Face's generate", "writing:generation"),
    "time-to-loss": Row("time to a validation loss of 1.88 ÷ nanoGPT's recipe", "scripts:time_to_loss"),
    "diloco": Row("requests of idle looks, memory of a round", "scripts:diloco"),
    "peers": Row("fit ÷ Lightning, ÷ the Hugging Face Trainer", "scripts:peers"),
    "card": Row("what needs a CUDA card", "scripts:card"),
}


def measure_here(name: str, settings: Settings) -> Outcome:
    """Measure one row in this process."""
    from speedtronic.bench.figures import LeftOutError, Outcome

    module, function = ROWS[name].function.split(":")
    measure: Callable[[Settings], Iterator[Figure]] = getattr(import_module(f"speedtronic.bench.{module}"), function)
    try:
        return Outcome(figures=tuple(measure(settings)))
    except LeftOutError as reason:
        return Outcome(left_out=str(reason))


def measure(name: str, settings: Settings) -> Outcome:
    """Measure one row in a process of its own: threads, compilers and memory of one do not reach the next."""
    from speedtronic.bench.figures import Outcome

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "speedtronic.bench", name, settings.model_dump_json(), str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return Outcome.model_validate_json(file.read_text(encoding="utf-8"))
    sys.stderr.write(done.stderr)
    lines = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
    return Outcome(failed=lines[-1])
