"""What the `diloco` commands that look at a store have in common: which store is meant, and how it is asked."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli.arguments import load_config_of_run
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.distributed.stores import Store

# A person waits for the answer: a store that does not give it within some seconds is down.
_RETRIES: Mapping[str, Any] = {"initial": 0.5, "maximum": 4.0, "attempts": 4}


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `STORE [--option KEY=VALUE …]`, which `opened_store` reads."""
    parser.add_argument(
        "store",
        metavar="STORE",
        help="its address (dir:///path, s3://bucket/prefix, …), its folder, or the YAML of a run that uses it",
    )
    parser.add_argument(
        "--option",
        action="append",
        metavar="KEY=VALUE",
        help="what the store needs (distributed.store_options): endpoint, profile, region, …; may be repeated",
    )


@contextmanager
def opened_store(args: argparse.Namespace) -> Iterator[Store]:
    """The store that the arguments name, with some patience for what can pass.

    Raises:
        ConfigError: they name none, or an option is not one.
        StoreError: it cannot be opened.
    """
    from speedtronic.distributed.stores import RetryingStore, open_store

    url, options = _address(args.store)
    store = RetryingStore(open_store(url, **{**options, **_options(args.option or [])}), **_RETRIES)
    try:
        yield store
    finally:
        store.close()


def _address(word: str) -> tuple[str, Mapping[str, Any]]:
    """The address and the options of the store that a word means."""
    if "://" in word:
        return word, {}
    path = Path(word)
    if path.is_file():
        section = load_config_of_run(path).distributed
        if section.repo_id is None:
            raise ConfigError(f"{word}: it names no store; set distributed.repo_id")
        return section.repo_id, section.store_options
    if path.is_dir():
        return f"dir://{path.resolve()}", {}
    raise ConfigError(
        f"{word}: no folder and no file is there, and an address has :// in it, such as dir:///path or s3://bucket/prefix"
    )


def _options(words: list[str]) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"--option {key}: write KEY=VALUE")
        options[key] = {"true": True, "false": False}.get(value, value)
    return options
