"""`speedtronic generate`: let a trained model write."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from speedtronic.cli import output
from speedtronic.cli.arguments import NamedRun, add_run_arguments, find_checkpoints, load_config_of_run, split_words
from speedtronic.errors import ConfigError, DataError

SAMPLE_SEPARATOR = "\n---\n"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="let a trained model continue a text",
        description="Continue a text with a trained model. The text appears as it is made, and ends after "
        "--max-tokens or where the model ends its document. Where the run kept an average of the weights "
        "(optimizer.ema), the average writes. With --weights, the run is a YAML or a run's folder that names the model "
        "and the data, whose tokenizer is used; a run's checkpoints are not needed.",
    )
    add_run_arguments(parser, best=True)
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="take the weights from a .safetensors file, such as `speedtronic diloco pull` writes",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", default="", metavar="TEXT", help="the text to continue (default: start a new document)"
    )
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a UTF-8 file with the text to continue")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="new tokens (default: 200)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 is always the likeliest token (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens that sum to P")
    parser.add_argument("--seed", type=int, metavar="S", help="the same text again; sample i uses S + i")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts to write (default: 1)")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda, cuda:1, mps (default: auto)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from speedtronic.data.tokenizers.huggingface import JsonTokenizer
    from speedtronic.generation import check_seed, generator_from_weights, load_generator
    from speedtronic.precision import resolve_device, use_device
    from speedtronic.runtime import import_plugins

    if args.num_samples < 1:
        raise ConfigError(f"--num-samples must be at least 1, not {args.num_samples}")
    if args.seed is not None:
        check_seed(args.seed)
        check_seed(args.seed + args.num_samples - 1)
    prompt = args.prompt if args.prompt_file is None else _read_prompt(args.prompt_file)

    if args.weights is None and args.words and args.words[0].endswith(".safetensors"):
        file = args.words[0]
        raise ConfigError(
            f"{file}: a file of weights does not say what model they are of; add it: CONFIG --weights {file}"
        )
    device = resolve_device(args.device)
    use_device(device)
    found = find_checkpoints(args) if args.weights is None else _find_model(args)
    if hidden := [key for key in found.secrets if key.startswith("model.extra.")]:
        output.warn(f"the folder of a run keeps no secrets, so {', '.join(hidden)} is null")
    import_plugins(found.config.plugins, found.folder)
    if isinstance(found, NamedRun):
        generator = generator_from_weights(found.config, args.weights, device=device, warn=output.warn)
    else:
        generator = load_generator(
            found.path, extra=found.config.model.extra, overrides=found.overrides, best=args.best, device=device
        )

    special = generator.tokenizer.special_tokens if isinstance(generator.tokenizer, JsonTokenizer) else ()
    if spelled := [token for token in special if token in prompt]:
        output.warn(
            f"the prompt spells {', '.join(spelled)}, which the model reads here as ordinary text, not as a special "
            "token; to write with a chat template, export the model with `speedtronic checkpoints export --format "
            "huggingface` and use transformers"
        )

    for sample in range(args.num_samples):
        if sample:
            _write(SAMPLE_SEPARATOR)
        pieces = generator.stream(
            prompt,
            max_new_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=None if args.seed is None else args.seed + sample,
        )
        _write(prompt)
        for piece in pieces:
            _write(piece)
        _write("\n")
    return 0


def _find_model(args: argparse.Namespace) -> NamedRun:
    """The run whose model `--weights` are for."""
    if args.best:
        raise ConfigError(
            "--best: chooses among the checkpoints of a run, and --weights names the weights; leave it out"
        )
    source, overrides = split_words(args.words, "run")
    return load_config_of_run(Path(source), overrides)


def _read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--prompt-file {path}: not UTF-8 at byte {error.start}") from error


def _write(text: str) -> None:
    """Show text of a model, which may be any character: an escape sequence must not steer the terminal."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    output.write(text)
