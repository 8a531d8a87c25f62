"""`speedtronic train`: train from a configuration file."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_from_arguments
from speedtronic.cli.former_run import find_former_run, set_aside
from speedtronic.errors import ConfigError, RunFolderError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a configuration file",
        description="Train a model from a configuration file. Ctrl-C finishes the step and saves a checkpoint. A "
        "folder holds one run: where there is one, say --resume or --overwrite. Without run.output_dir the folder is "
        "runs/NAME. Under torchrun its processes train one model together.",
    )
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the newest sound checkpoint")
    parser.add_argument(
        "--overwrite", action="store_true", help="move the run that is in the folder to DIR.old-1, and start anew"
    )
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda, cuda:1, mps (run.device)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="run.max_steps")
    parser.add_argument("--output-dir", metavar="DIR", help="run.output_dir")
    parser.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="trace N steps after the first ones into trace.json in the run's folder, and say what takes their time",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, take a few updates, say what time, memory and disk the run needs, and write nothing",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.resume and args.overwrite:
        raise ConfigError("--resume continues the run in the folder, and --overwrite starts another: choose one")
    if args.dry_run and (args.overwrite or args.profile is not None):
        raise ConfigError("--dry-run writes nothing, so it goes with neither --overwrite nor --profile")
    if args.profile is not None and args.profile < 1:
        raise ConfigError(f"--profile is a number of steps, at least 1, not {args.profile}")
    options = {"run.device": args.device, "run.max_steps": args.max_steps, "run.output_dir": args.output_dir}
    overrides = [
        # JSON is YAML in which a folder named 2024 is still text.
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in options.items()
        if value is not None
    ]
    config, plugins_folder = load_from_arguments(args, extra=overrides)

    from speedtronic.config.checks import refuse_what_cannot_be_trained
    from speedtronic.config.run_folder import run_folder
    from speedtronic.durable.lock import RunLock
    from speedtronic.parallel.launch import launched

    refuse_what_cannot_be_trained(config)
    launch = launched() if config.parallel.strategy != "none" else None
    leads = launch is None or launch.rank == 0
    if args.dry_run:
        if launch is not None:
            raise ConfigError("--dry-run measures one process: start it without torchrun")
        from speedtronic.cli.dry_run import dry_run
        from speedtronic.runtime import import_plugins

        import_plugins(config.plugins, plugins_folder)
        return dry_run(config, resume=args.resume or bool(config.checkpoint.resume))
    folder = run_folder(config)
    # Of several ranks, rank 0 holds the folder, and looks what is in it. It never meets the others if it refuses.
    with RunLock(folder) if folder is not None and leads else nullcontext():
        former = None
        if folder is not None and leads and not args.resume and (args.overwrite or not config.checkpoint.resume):
            former = find_former_run(config, folder)
        if former is not None and not args.overwrite:
            raise RunFolderError(
                f"{config.run.output_dir} holds a run already ({former}): continue it with --resume, move it aside "
                "with --overwrite, or choose another folder with --output-dir"
            )

        # torch is imported only now: a mistake in the file or the folder is reported at once.
        from speedtronic.runtime import import_plugins, train_from_config

        import_plugins(config.plugins, plugins_folder)
        if former is not None:
            output.write(f"the run in {config.run.output_dir} was moved to {set_aside(former)}\n")
        result = train_from_config(config, resume=args.resume, profile_steps=args.profile)

    if result.interrupted_by is not None and not leads:
        return 128 + result.interrupted_by
    if result.interrupted_by is not None:
        how = f"to continue: {shlex.join(_continue_command(args))}"
        if not config.checkpoint.enabled:
            how = "nothing was saved to continue from, because checkpoint.enabled is false"
        try:
            output.write(f"{how}\n")
        except (BrokenPipeError, output.OutputError):  # whoever listened is gone; the exit code still tells
            output.abandon()
        return 128 + result.interrupted_by
    return 1 if result.save_error is not None else 0


def _continue_command(args: argparse.Namespace) -> list[str]:
    """The words that continue this run."""
    from speedtronic.config.secrets import REDACTED, is_secret

    words = [*_own_command(), "train"]
    if args.config is not None:
        words += ["--config", args.config]
    for word in args.words:
        key, equals, _ = word.partition("=")
        words.append(f"{key}={REDACTED}" if equals and is_secret(key.rpartition(".")[2]) else word)
    options = {"--device": args.device, "--max-steps": args.max_steps, "--output-dir": args.output_dir}
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    return [*words, "--resume"]


def _own_command() -> list[str]:
    """How this program was started."""
    from speedtronic.parallel.launch import launched

    if (launch := launched()) is not None:
        # What several machines were told of each other does not stand in the environment.
        count = ["--nproc-per-node", str(launch.size)] if launch.local_size == launch.size else ["..."]
        return ["torchrun", *count, "-m", "speedtronic"]
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return [sys.executable, "-m", "speedtronic"]
    found = shutil.which("speedtronic")
    is_found = found is None or started.name != "speedtronic" or Path(found).resolve() == started.resolve()
    return ["speedtronic" if is_found else sys.argv[0]]
