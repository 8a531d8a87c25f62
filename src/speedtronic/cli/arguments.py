"""What the commands that read a configuration have in common: `CONFIG [section.key=value …]`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.config import SpeedtronicConfig

_YAML = {".yaml", ".yml"}
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


class CommandParser(argparse.ArgumentParser):
    """A parser whose positional words may stand before, between and behind the options.

    argparse itself gives a list of positionals only the words up to the first option. Pass it to
    `add_subparsers(parser_class=CommandParser)`.
    """

    def parse_known_args(  # type: ignore[override]  # argparse overloads it on the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        namespace, rest = super().parse_known_args(args, namespace)
        if "words" not in namespace:
            return namespace, rest
        namespace.words = [*namespace.words, *(word for word in rest if not word.startswith("-"))]
        return namespace, [word for word in rest if word.startswith("-")]


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `CONFIG | --config CONFIG` and `section.key=value …`, which `load_from_arguments` reads."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG [section.key=value ...]",
        help="the configuration file, then values that go before the file's",
    )
    parser.add_argument("--config", metavar="CONFIG", help="the configuration file, instead of the first word")


def load_from_arguments(args: argparse.Namespace, extra: Sequence[str] = ()) -> tuple[SpeedtronicConfig, Path]:
    """Load the configuration that the arguments name.

    Args:
        args: what a parser with `add_config_arguments` returned.
        extra: further `section.key=value` overrides, which go before those in `args`.

    Returns:
        The configuration, and the folder of its file, from which its plugins may be imported.

    Raises:
        ConfigError: no file is named, or the configuration is wrong.
    """
    from speedtronic.config import load_config

    if args.config is not None:
        file, overrides = Path(args.config), args.words
    elif args.words and not _OVERRIDE.match(args.words[0]):
        file, overrides = Path(args.words[0]), args.words[1:]
    else:
        raise ConfigError("no configuration file is named; write its path behind the command")
    return load_config(file, [*overrides, *extra]), file.resolve().parent


def load_config_of_run(source: Path) -> SpeedtronicConfig:
    """Load the configuration of a run, where the user could have named the run's folder instead.

    Raises:
        ConfigError: the configuration is wrong, or the file is not a configuration.
    """
    from speedtronic.config import load_config

    try:
        return load_config(source)
    except ConfigError as error:
        if source.suffix in _YAML or not source.exists():
            raise
        raise ConfigError(f"{source}: not a configuration; name the folder of a run or its YAML\n{error}") from error
