"""What the commands that read a configuration have in common: `CONFIG [section.key=value …]`."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.config import SpeedtronicConfig

_YAML = {".yaml", ".yml"}
_ITS_FOLDER = "the folder itself"  # in place of a run's folder, which need not be text that a configuration can hold
_MOST_LEVELS = 4  # of folders between a checkpoint and the folder of its run
# What is trained already is not trained otherwise: these alone say where it is, and how its model is built.
_KEYS_OF_A_TRAINED_RUN = ("run.name", "run.output_dir", "checkpoint.directory", "plugins", "model.", "data.block_size")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


class CommandParser(argparse.ArgumentParser):
    """A parser whose positional words may stand before, between and behind the options, and that suggests.

    argparse itself gives a list of positionals only the words up to the first option. Pass it to
    `add_subparsers(parser_class=CommandParser)`.
    """

    def parse_known_args(  # type: ignore[override]  # argparse overloads it on the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        namespace, rest = super().parse_known_args(args, namespace)
        if "words" in namespace:
            namespace.words = [*namespace.words, *(word for word in rest if not word.startswith("-"))]
            rest = [word for word in rest if word.startswith("-")]
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        unknown = [word for word in rest if word.startswith("-")]
        if unknown and not has_commands:
            self.error(self._no_such_option(unknown[0], args or (), vars(namespace).get("settable", ())))
        return namespace, rest

    def _no_such_option(self, word: str, args: Sequence[str], settable: tuple[str, ...]) -> str:
        """What is said about an unknown option: the option that was meant, or the key of the configuration.

        Args:
            word: the option.
            args: of the command.
            settable: the beginnings of the keys whose value has an effect on the command.
        """
        name, equals, value = word.partition("=")
        options = [option for action in self._actions for option in action.option_strings]
        if close := difflib.get_close_matches(name, options, n=1, cutoff=0.75):
            return f"no such option: {name}; did you mean {close[0]}?"
        key = _key_of(name)
        if key is None or not key.startswith(settable):
            return f"no such option: {name}"
        if not equals:
            behind = args[args.index(word) + 1 :] if word in args else ()
            value = behind[0] if behind and not behind[0].startswith("--") else ""
        from speedtronic.config.secrets import may_be_shown

        shown = value if value and may_be_shown(tuple(key.split("."))) else "VALUE"
        return f"no such option: {name}; to set a key of the configuration, write {key}={shown}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            choices = [str(choice) for choice in action.choices or ()]
            close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
            if not close:
                raise
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}; did you mean {close[0]}? (choose from {', '.join(choices)})"
            ) from None


def _key_of(option: str) -> str | None:
    """The key of the configuration that an option such as `--lr` or `--optimizer.lr` means."""
    from speedtronic.config.problems import COMMON_NAMES
    from speedtronic.config.root import SpeedtronicConfig

    name = option.lstrip("-").replace("-", "_")
    known = SpeedtronicConfig.known_keys
    keys = [f"{section}.{key}" if section else key for section, names in known.items() for key in names]
    if name in keys:
        return name
    named_so = [key for key in keys if key.rpartition(".")[2] == name]
    return COMMON_NAMES.get(name) or (named_so[0] if len(named_so) == 1 else None)


def split_words(words: Sequence[str], what: str) -> tuple[str, list[str]]:
    """The path or address that words begin with, and the `section.key=value` behind it.

    Raises:
        ConfigError: they begin with none; the message asks for `what`.
    """
    if not words or _OVERRIDE.match(words[0]):
        raise ConfigError(f"no {what} is named; write its path behind the command")
    return words[0], list(words[1:])


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `CONFIG | --config CONFIG` and `section.key=value …`, which `load_from_arguments` reads."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG [section.key=value ...]",
        help="the configuration file, or the folder of a run that has one; then values that go before the file's",
    )
    parser.add_argument("--config", metavar="CONFIG", help="the configuration file, instead of the first word")
    parser.set_defaults(settable=("",))


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
    if args.config is not None:
        file, overrides = args.config, args.words
    else:
        file, overrides = split_words(args.words, "configuration file")
    return load_run(Path(file), [*overrides, *extra])


@dataclass(frozen=True)
class NamedRun:
    """A run that the command line names by its configuration or by its folder.

    Attributes:
        config: its configuration, with the overrides of the command line.
        output: its folder, `run.output_dir`.
        folder: that of the configuration's file, from which its plugins may be imported.
        secrets: the keys that its folder does not keep, and that have no value now.
    """

    config: SpeedtronicConfig
    output: Path
    folder: Path
    secrets: tuple[str, ...] = ()


def find_run(source: Path, overrides: Sequence[str] = ()) -> NamedRun:
    """Load the configuration of a run: a file, or the folder of a run, which then is its `run.output_dir`.

    Without `run.output_dir` a run lies in `runs/{run.name}`, so that no two runs share a folder by chance.

    Raises:
        ConfigError: the configuration is wrong, or there is none.
    """
    from speedtronic.config import load_config
    from speedtronic.config.run_folder import RUN_CONFIG, config_in, is_of_a_run, load_config_in, redacted_keys

    if source.name == RUN_CONFIG and is_of_a_run(source):
        source = source.parent
    file = config_in(source) if source.is_dir() else None
    if file is not None:
        config = load_config_in(file, [f"run.output_dir={_ITS_FOLDER}", *overrides])
        moved = config.run.output_dir != _ITS_FOLDER
        output = Path(config.run.output_dir) if moved else source
        return NamedRun(config, output, source.resolve(), redacted_keys(file, config))

    config = load_config(source, overrides)
    output = Path(config.run.output_dir)
    if "output_dir" not in config.run.model_fields_set:
        name = config.run.name
        if Path(name).name != name or name in {".", ".."}:
            raise ConfigError(f"run.name: {name!r} cannot be the name of a folder; set run.output_dir")
        output = Path("runs", name)
    return NamedRun(config, output, source.resolve().parent)


def load_run(source: Path, overrides: Sequence[str] = ()) -> tuple[SpeedtronicConfig, Path]:
    """Load the configuration of a run that is named as for `find_run`, its `run.output_dir` included.

    Returns:
        The configuration, and the folder of its file, from which its plugins may be imported.

    Raises:
        ConfigError: as `find_run`, or the folder of the run lacks a secret of its configuration.
    """
    found = find_run(source, overrides)
    if found.secrets:
        raise ConfigError(
            f"{source}: the folder of a run keeps no secrets; give them again ({', '.join(found.secrets)}), or name "
            "the configuration that the run was started with"
        )
    found.config.run.output_dir = str(found.output)
    return found.config, found.folder


def load_config_of_run(source: Path, overrides: Sequence[str] = ()) -> NamedRun:
    """`find_run`, where the user could have named something else instead.

    Raises:
        ConfigError: the configuration is wrong, or the file is not a configuration.
    """
    try:
        return find_run(source, overrides)
    except ConfigError as error:
        if source.suffix in _YAML or source.is_dir() or not source.exists() or (overrides and _loads(source)):
            raise
        raise ConfigError(f"{source}: not a configuration; name the folder of a run or its YAML\n{error}") from error


def _loads(source: Path) -> bool:
    try:
        find_run(source)
    except ConfigError:
        return False
    return True


# ---------------------------------------------------------------------- the checkpoints of a run


def add_run_arguments(parser: argparse.ArgumentParser, *, best: bool) -> None:
    """Add `RUN [section.key=value …]`, which `find_checkpoints` reads, and `--best` where a checkpoint is chosen."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN [section.key=value ...]",
        help="a run's output folder, its checkpoints folder, one checkpoint, or the run's YAML; then values that go "
        "before those of its configuration",
    )
    parser.set_defaults(settable=_KEYS_OF_A_TRAINED_RUN)
    if best:
        parser.add_argument(
            "--best", action="store_true", help="take the checkpoint that is the best by eval.monitor, not the newest"
        )


@dataclass(frozen=True)
class FoundCheckpoints:
    """Where the checkpoints of a run are.

    Attributes:
        path: their folder, or the one checkpoint that was named.
        config: of the run; of the overrides alone, where the run left none.
        has_config: whether the run left one.
        folder: from which its plugins may be imported.
        overrides: those of the command line.
        secrets: as for `NamedRun`.
    """

    path: Path
    config: SpeedtronicConfig
    folder: Path
    overrides: list[str]
    secrets: tuple[str, ...] = ()
    has_config: bool = True


def find_checkpoints(args: argparse.Namespace) -> FoundCheckpoints:
    """Find the checkpoints that the arguments name.

    Raises:
        ConfigError: they name none, or the configuration is wrong.
    """
    from speedtronic.config import load_config
    from speedtronic.config.run_folder import config_in

    named, overrides = split_words(args.words, "run")
    source = Path(named)
    if not source.is_dir() or config_in(source) is not None:
        run = load_config_of_run(source, overrides)
        return FoundCheckpoints(
            run.output / run.config.checkpoint.directory, run.config, run.folder, overrides, run.secrets
        )

    # A folder of checkpoints, or one of them: the run's configuration lies above it.
    for above in list(source.absolute().parents)[:_MOST_LEVELS]:
        if config_in(above) is not None:
            with suppress(ConfigError):  # it is needed for a custom model only, which says so
                run = find_run(above, overrides)
                if above / run.config.checkpoint.directory in (source.absolute(), source.absolute().parent):
                    return FoundCheckpoints(source, run.config, run.folder, overrides, run.secrets)
    config = load_config({}, overrides)
    inside = source / config.checkpoint.directory
    path = inside if inside.is_dir() else source
    return FoundCheckpoints(path, config, Path.cwd(), overrides, has_config=False)
