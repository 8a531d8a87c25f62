"""`speedtronic train`: train from a configuration file."""

from __future__ import annotations

import argparse
import json

from speedtronic.cli.arguments import add_config_arguments, load_from_arguments


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a configuration file",
        description="Train a model from a configuration file. Ctrl-C finishes the step and saves a checkpoint.",
    )
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the newest sound checkpoint")
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda, cuda:1, mps (run.device)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="run.max_steps")
    parser.add_argument("--output-dir", metavar="DIR", help="run.output_dir")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options = {"run.device": args.device, "run.max_steps": args.max_steps, "run.output_dir": args.output_dir}
    # JSON is YAML in which a folder named 2024 is still text.
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items() if value is not None]
    config, folder = load_from_arguments(args, extra=overrides)

    # torch is imported only now: a mistake in the file is reported at once.
    from speedtronic.runtime import import_plugins, train_from_config

    import_plugins(config.plugins, folder)
    result = train_from_config(config, resume=args.resume)
    if result.interrupted_by is not None:
        return 128 + result.interrupted_by
    return 1 if result.save_error is not None else 0
