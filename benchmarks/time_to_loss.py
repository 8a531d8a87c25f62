"""How long training takes to reach a validation loss, against a small GPT script written by hand.

    python benchmarks/time_to_loss.py --text FILE [--target 1.88] [--seeds 3] [--plot FILE.svg] [--json] [key=value ...]

Both train at character level on the first nine tenths of the text, and are evaluated on the whole of the last tenth, in
blocks of 64 characters. The baseline is the CPU recipe of nanoGPT (github.com/karpathy/nanoGPT, README and
config/train_shakespeare_char.py) written out anew. Ours is `examples/shakespeare_char.yaml`, with the overrides given.

Every training is a process of its own, so that each starts cold: the clock runs from the start of the process, with
its imports, reading the text, building and compiling, and stands still during evaluations. The two alternate, seed by
seed; the figure is the median of the ratios. Where the baseline ends above the target, its whole time stands for the
longer one that it would take, and the ratio is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

STARTED_AT = time.time()
EXAMPLE = Path(__file__).parents[1] / "examples" / "shakespeare_char.yaml"
# The example trains further than to the target; these make its schedule end there, and look often.
SHORT = ["run.max_steps=120", "eval.every_steps=10"]
BLOCK = 64

Point = tuple[int, float, float]
"""Steps, seconds of training so far, and the validation loss there."""


class Clock:
    """Seconds since the process began, without those of evaluations."""

    def __init__(self) -> None:
        self.paused = 0.0

    def __call__(self) -> float:
        return time.time() - STARTED_AT - self.paused


# ---------------------------------------------------------------------- the baseline, by hand


def baseline(text: Path, seed: int, target: float, *, steps: int = 2000, every: int = 50) -> Iterator[Point]:
    """12 sequences of 64 characters, 4 layers of 4 heads, width 128, AdamW 1e-3, cosine to 1e-4 over 2000 steps."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    clock = Clock()
    layers, heads, width = 4, 4, 128

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            parts = self.qkv(self.norm_1(x)).split(width, dim=2)
            query, key, value = (part.view(batch, length, heads, width // heads).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))

    class Model(nn.Module):
        def __init__(self, vocabulary: int) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(BLOCK, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width, bias=False)
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    shrunk = name.endswith(("out.weight", "narrow.weight"))
                    nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if shrunk else 0.02)

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions.weight[: ids.size(1)]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.tokens.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def learning_rate(step: int) -> float:
        if step < 100:
            return 1e-3 * (step + 1) / 101
        return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / (steps - 100))) * (1e-3 - 1e-4)

    torch.manual_seed(seed)
    characters = text.read_text(encoding="utf-8")
    places = {character: place for place, character in enumerate(sorted(set(characters)))}
    ids = torch.tensor([places[character] for character in characters])
    cut = len(ids) * 9 // 10
    training, held_out = ids[:cut], ids[cut:]
    whole = (len(held_out) - 1) // BLOCK * BLOCK
    questions, answers = held_out[:whole].view(-1, BLOCK), held_out[1 : whole + 1].view(-1, BLOCK)
    model = Model(len(places))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

    @torch.no_grad()
    def validation_loss() -> float:
        began = time.time()
        parts = zip(questions.split(128), answers.split(128), strict=True)
        total = sum(float(model(question, answer)) * len(question) for question, answer in parts)
        clock.paused += time.time() - began
        return total / len(questions)

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(len(training) - BLOCK, (12,))
        batch = torch.stack([training[start : start + BLOCK] for start in starts])
        targets = torch.stack([training[start + 1 : start + BLOCK + 1] for start in starts])
        model(batch, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % every == 0:
            seconds, loss = clock(), validation_loss()
            yield step + 1, seconds, loss
            if loss <= target:
                return


# ---------------------------------------------------------------------- ours


def ours(args: argparse.Namespace) -> Iterator[Point]:
    """The example's configuration, trained as `speedtronic train` trains it."""
    from speedtronic import load_config, train_from_config

    with tempfile.TemporaryDirectory() as folder:
        place = [f"data.text_path={args.text}", f"run.seed={args.seed}", f"run.output_dir={folder}"]
        quiet = ["logging.level=WARNING", "logging.progress=off"]
        train_from_config(load_config(EXAMPLE, [*place, *quiet, *SHORT, *args.overrides]))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    evaluating = 0.0
    for event in (line for line in lines if line["event"] == "eval"):
        evaluating += event["duration_s"]
        at = datetime.fromisoformat(event["time"]).timestamp()
        yield event["step"], at - STARTED_AT - evaluating, event["loss"]


# ---------------------------------------------------------------------- measuring


def reached(points: list[Point], target: float) -> Point | None:
    """The first point at or below the target."""
    return next((point for point in points if point[2] <= target), None)


def measure(contender: str, args: argparse.Namespace, seed: int) -> list[Point]:
    """Train in a process of its own, and return its points."""
    command = [sys.executable, __file__, "--text", str(args.text), "--target", str(args.target)]
    command += ["--only", contender, "--seed", str(seed), *args.overrides]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [tuple(json.loads(line)) for line in output.splitlines()]


def plot(curves: dict[str, list[list[Point]]], target: float, path: Path) -> None:
    """Draw validation loss over seconds of training as an SVG."""
    width, height, left, bottom = 720, 400, 50, 40
    points = [point for runs in curves.values() for run in runs for point in run]
    last = max(seconds for _, seconds, _ in points)
    low, high = min(1.8, *(loss for *_, loss in points)), min(3.0, max(loss for *_, loss in points))

    def place(seconds: float, loss: float) -> str:
        x = left + seconds / last * (width - left - 10)
        y = 10 + (high - min(loss, high)) / (high - low) * (height - bottom - 10)
        return f"{x:.1f},{y:.1f}"

    colours = {"by hand": "#888888", "speedtronic": "#d6336c"}
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    start, end = place(0, target).split(","), place(last, target).split(",")
    parts.append(f'<path d="M{start[0]},{start[1]}H{end[0]}" stroke="#444" stroke-dasharray="4 4"/>')
    parts.append(f'<text x="{left + 4}" y="{float(start[1]) - 4:.1f}" font-size="12">validation loss {target}</text>')
    for name, runs in curves.items():
        for run in runs:
            path_ = " ".join(place(seconds, loss) for _, seconds, loss in run)
            parts.append(f'<polyline points="{path_}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
    for number, (name, colour) in enumerate(colours.items()):
        parts.append(f'<text x="{width - 140}" y="{30 + 18 * number}" font-size="14" fill="{colour}">{name}</text>')
    for tick in range(6):
        seconds, loss = last * tick / 5, low + (high - low) * tick / 5
        x, y = place(seconds, low).split(",")[0], place(0, loss).split(",")[1]
        parts.append(f'<text x="{x}" y="{height - 12}" font-size="12" text-anchor="middle">{seconds:.0f} s</text>')
        parts.append(f'<text x="{left - 8}" y="{y}" font-size="12" text-anchor="end">{loss:.2f}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, required=True, help="a text of about a megabyte")
    parser.add_argument("--target", type=float, default=1.88, help="validation loss in nats per character")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--json", action="store_true", help="one line for a program")
    parser.add_argument(
        "--only", choices=("by hand", "speedtronic"), help="one run: a line [step, seconds, loss] each look"
    )
    parser.add_argument("--seed", type=int, default=1, help="of --only")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="in place of the example's values")
    args = parser.parse_args()
    if args.only is not None:
        one = baseline(args.text, args.seed, args.target) if args.only == "by hand" else ours(args)
        for point in one:
            print(json.dumps(point), flush=True)
        return
    curves: dict[str, list[list[Point]]] = {"by hand": [], "speedtronic": []}
    for seed in range(1, args.seeds + 1):
        for contender, runs in curves.items():
            runs.append(measure(contender, args, seed))
    report(curves, args)
    if args.plot is not None:
        plot(curves, args.target, args.plot)


def report(curves: dict[str, list[list[Point]]], args: argparse.Namespace) -> None:
    """Print where each run reached the target, and the median of the ratios."""
    pairs = list(zip(curves["by hand"], curves["speedtronic"], strict=True))
    ratios = [ratio(hand, own, args.target) for hand, own in pairs]
    if args.json:
        print(json.dumps({"benchmark": "time_to_loss", "target": args.target, "ratios": ratios, **curves}))
        return
    print(f"validation loss {args.target}: steps and seconds of training, seed by seed")
    for name, runs in curves.items():
        print(f"  {name:12} {', '.join(described(run, args.target) for run in runs)}")
    print(f"  speedtronic ÷ by hand: {', '.join(f'{r:.3f}' for r in ratios)}; median {statistics.median(ratios):.3f}")


def ratio(hand: list[Point], own: list[Point], target: float) -> float:
    """Ours over the baseline's time; an upper bound where the baseline ended above the target."""
    crossing = reached(own, target)
    return math.inf if crossing is None else crossing[1] / (reached(hand, target) or hand[-1])[1]


def described(run: list[Point], target: float) -> str:
    steps, seconds, loss = reached(run, target) or run[-1]
    return f"{steps} steps {seconds:.1f} s ({loss:.4f}{'' if loss <= target else ', above it'})"


if __name__ == "__main__":
    main()
