"""What `checkpoints publish` and `diloco publish` have in common: the model card, and the way to the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from speedtronic.cli import output
from speedtronic.errors import ConfigError, MissingExtraError

CARD = "README.md"
_PICTURE = "loss.png"
_HUB = "hf://"


def add_publish_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--public` and `--message`."""
    parser.add_argument(
        "--public", action="store_true", help="make a new repository public (default: private; one that is there stays)"
    )
    parser.add_argument("--message", help="of the commit (default: what is published)")


def take_address(words: list[str]) -> str:
    """Take the address of the Hub out of the words of a command.

    Raises:
        ConfigError: there is not exactly one, or it is none of a repository.
    """
    from speedtronic.checkpoint.export.hub import repository_of

    found = [word for word in words if word.startswith(_HUB) and not word.startswith(f"{_HUB}buckets/")]
    if len(found) != 1:
        raise ConfigError("name one repository of the Hub to publish to, such as hf://namespace/name")
    words.remove(found[0])
    repository_of(found[0])
    return found[0]


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for what is published, which is removed afterwards."""
    with TemporaryDirectory(prefix="speedtronic-publish-") as folder:
        yield Path(folder) / "model"


def write_card(folder: Path, title: str, facts: Mapping[str, object], config: Mapping[str, Any] | None) -> None:
    """Write a model card: how the model was trained, and its configuration, in which secrets are hidden already."""
    lines = ["---", "library_name: speedtronic", "tags:", "- speedtronic", "---", "", f"# {title}", ""]
    lines += ["Trained with Speedtronic.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {str(value).replace('|', ' ')} |" for name, value in facts.items() if value is not None]
    if (folder / _PICTURE).is_file():
        lines += ["", f"![loss]({_PICTURE})"]
    if config is not None:
        from speedtronic.config.text import write_yaml

        lines += ["", "## Configuration", "", "```yaml", write_yaml(dict(config)).rstrip(), "```"]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_losses(run: Path, folder: Path) -> None:
    """Draw what a run has logged, if it has and if that can be drawn here; else say why not."""
    from speedtronic import runs
    from speedtronic.errors import SpeedtronicError

    try:
        import matplotlib

        matplotlib.use("agg")
        axes = runs.load(run).plot()
    except (ImportError, MissingExtraError):
        output.warn("the card has no picture of the loss: install speedtronic[plot]")
    except (SpeedtronicError, KeyError, OSError) as error:
        output.warn(f"the card has no picture of the loss: {error}")
    else:
        figure = axes.get_figure(root=True)
        assert figure is not None, "`plot` makes one"
        figure.savefig(folder / _PICTURE, dpi=120)


def publish(args: argparse.Namespace, folder: Path, address: str, message: str) -> None:
    """Put a folder into a repository of the Hub, and say where it is."""
    from speedtronic.checkpoint.export.hub import publish_to_hub

    commit = publish_to_hub(folder, address, private=not args.public, message=args.message or message, warn=output.warn)
    output.write(f"published: {address}: {message}, {commit}\n")
