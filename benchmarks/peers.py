"""`fit`, plain and with a plan of `tune`, beside Lightning and the Hugging Face Trainer: the same model and batches.

    make bench-peers
    python benchmarks/peers.py [--rounds N] [--quick] [--json]

All train in one process and take turns. The peers keep their defaults, but for what costs time and a loop by hand does
not do: they log, save, show and clip nothing, and their learning rate is constant. Their time runs from one step to
another in the middle of a training, so that starting it is not counted. A figure is a ratio of speeds, ours over theirs
or theirs over that of the loop by hand.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from speedtronic.bench.figures import Figure, Settings, ratios
from speedtronic.bench.loops import SIZES, Run, Size, batches, by_fit, by_hand, by_plan, make_model, measure

BEFORE = 5  # steps of a training before the clock runs
GOALS = {"tiny": 2.8, "small": 1.3}


class Stopwatch:
    """Seconds between two steps of a training."""

    def __init__(self, steps: int) -> None:
        self.last = BEFORE + steps
        self._began = 0.0
        self.seconds = 0.0

    def at(self, step: int) -> None:
        if step == BEFORE and not self._began:
            self._began = time.perf_counter()
        if step == self.last:
            self.seconds = time.perf_counter() - self._began


# ---------------------------------------------------------------------- Lightning


class EndlessBatches(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, size: Size) -> None:
        self._batches = batches(size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.cycle(self._batches)


class Module(lightning.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = make_model(size)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class LightningSteps(lightning.Callback):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._watch.at(trainer.global_step)


def by_lightning(size: Size) -> Run:
    module, data = Module(size), DataLoader(EndlessBatches(size), batch_size=None)

    def run(steps: int) -> float:
        watch = Stopwatch(steps)
        lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=watch.last,
            accumulate_grad_batches=size.accumulation,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[LightningSteps(watch)],
        ).fit(module, data)
        return watch.seconds

    return run


# ---------------------------------------------------------------------- Hugging Face


class HuggingFaceSteps(transformers.TrainerCallback):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_step_end(self, args: Any, state: transformers.TrainerState, control: Any, **_: Any) -> None:
        self._watch.at(state.global_step)


class Plain(nn.Module):
    """Without the model's `config`, which the Hugging Face Trainer would take for one of its own and change."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = make_model(size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.model(input_ids=input_ids, labels=labels)


def by_hugging_face(size: Size, folder: Path) -> Run:
    model = Plain(size)
    samples = [
        {key: rows[place] for key, rows in batch.items()}
        for batch in batches(size)
        for place in range(len(batch["labels"]))
    ]

    def run(steps: int) -> float:
        watch = Stopwatch(steps)
        settings = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=watch.last,
            per_device_train_batch_size=size.micro_batch,
            gradient_accumulation_steps=size.accumulation,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=samples)
        trainer.add_callback(HuggingFaceSteps(watch))
        trainer.train()
        return watch.seconds

    return run


# ---------------------------------------------------------------------- all


def compare(name: str, settings: Settings) -> Iterator[Figure]:
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        makers = {
            "by hand": partial(by_hand, size),
            "Lightning": partial(by_lightning, size),
            "Hugging Face": partial(by_hugging_face, size, place / "hugging_face"),
            "fit": partial(by_fit, size, place, fused=False, compiled=False),
            "fit with tune": partial(by_plan, size, place / "tuned"),
        }
        seconds = measure(size, makers, settings)
    for peer in ("Lightning", "Hugging Face"):
        yield Figure(name=f"{peer} ÷ by hand, {name}", rounds=ratios(seconds["by hand"], seconds[peer]))
        yield Figure(name=f"fit ÷ {peer}, {name}", rounds=ratios(seconds[peer], seconds["fit"]))
        speed = ratios(seconds[peer], seconds["fit with tune"])
        yield Figure(name=f"fit with tune ÷ {peer}, {name}", rounds=speed, at_least=GOALS.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="a line for a program each")
    args = parser.parse_args()
    # Both advise on what is not measured here.
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in ("quick",) if args.quick else ("tiny", "small"):
        with redirect_stdout(sys.stderr):  # where what they print is no line of ours
            figures = list(compare(name, Settings(quick=args.quick, rounds=args.rounds)))
        for figure in figures:
            spread = f"({min(figure.rounds):.2f} … {max(figure.rounds):.2f})"
            print(figure.model_dump_json() if args.json else f"{figure.name:40} {figure.value:6.2f}  {spread}")


if __name__ == "__main__":
    main()
