"""`speedtronic diloco master | status | pull | publish | cost`: training over a store that all nodes share."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output
from speedtronic.cli.arguments import load_config_of_run, split_words
from speedtronic.cli.diloco_cost import add_cost_parser
from speedtronic.cli.diloco_master import add_master_parser
from speedtronic.cli.output import printable
from speedtronic.cli.publishing import add_publish_arguments, new_folder, publish, take_address, write_card
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.distributed.status import NodeStatus, StoreStatus
    from speedtronic.distributed.stores import Store

# A person waits for the answer: a store that does not give it within some seconds is down.
_RETRIES: Mapping[str, Any] = {"initial": 0.5, "maximum": 4.0, "attempts": 4}

_FIELDS = """\
fields of the JSON object:
  url                the store, without secrets
  id                 its identity; null while it is of an older protocol
  protocol           of its newest version
  version            of the global weights: how many outer steps there were
  time, age          when that version was made (UTC), and how many seconds ago
  pace               seconds between the last versions; null while there is only one
  master             running, late, silent or unknown: see below
  rounds             how many rounds the versions add up to
  weights_bytes      size of the weights
  outstanding        deltas that wait for the master
  outstanding_bytes  their size
  unknown_sessions   starts of nodes of which only deltas that wait are known
  nodes              an array, by name

fields of a node:
  name, health       its name; running, late, gone or unknown
  seen, silent       when a version last dealt with a delta of it (seconds since 1970), and how many seconds ago
  version            the version in which a delta of it entered last
  versions_behind, rounds_behind  versions and rounds since then; null when there was none
  steps, seconds     optimizer steps of that delta, and how long they took
  tokens_per_step    tokens of one of them
  step               optimizer steps of the node that the versions contain, over all its starts
  samples, tokens    what the node had trained on by then, counted alike
  bytes              size of all its deltas so far, with those that wait
  rejected, reason   how many were refused, and why the last one was, or null
  outstanding, outstanding_bytes  those that wait for the master
  sessions           an array: the starts of the node of which deltas may still come, the newest last

fields of a session:
  session            its name
  known              whether a version knows it
  seq                its last delta that a version has dealt with; 0 when none
  last               the last delta that it has sent; null until the next start of the node says so
  step, samples, tokens           as for a node
  outstanding, outstanding_bytes  as for a node
"""
_HEADINGS = ("NODE", "STATE", "SEEN", "STEP", "TOKENS", "ROUNDS BEHIND", "SENT", "WAITING", "REJECTED")
_WORDS = """
STATE          How long no version has had a delta of the node, compared with how long it takes to make one (at least
               a minute). running: up to 3 times as long; late: up to 10 times; gone: longer. A node that has ended is
               gone after a while; one without a delta in a version is unknown. Clocks: this machine's and the master's.
SEEN           how long ago that was
STEP, TOKENS   how much of the node's training the versions contain
ROUNDS BEHIND  Rounds since its last delta entered. A round is one delta of every node. A version that has a part of
               that counts as this part, its fraction. The age of a delta in rounds, when it enters, is its staleness.
WAITING        deltas that are in the store and in no version yet
"""
_MASTER_STATES = """\
The master is seen by its work alone. While deltas wait, it is running, late or silent by the age of the newest version,
compared with how long a version usually takes (3 and 10 times, as for nodes). A silent one has ended, or it takes none
of these deltas, which are too old or refused: its log says why. While nothing waits, it is unknown.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diloco", help="average the weights of many nodes, and see what they do")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_master_parser(actions)
    _add_status(actions)
    _add_pull(actions)
    _add_publish(actions)
    add_cost_parser(actions)


# ---------------------------------------------------------------------- the store to look at


def _add_store(parser: argparse.ArgumentParser) -> None:
    """Add `STORE [section.key=value …] [--option KEY=VALUE …]`, which `_opened_store` reads."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="STORE [section.key=value ...]",
        help="its address (dir:///path, s3://bucket/prefix, …) or its folder; or a run that uses it: the YAML or the "
        "run's folder, and then values that go before its own",
    )
    parser.add_argument(
        "--option",
        action="append",
        metavar="KEY=VALUE",
        help="what the store needs (distributed.store_options): endpoint, profile, region, …; may be repeated",
    )


@contextmanager
def _opened_store(args: argparse.Namespace) -> Iterator[Store]:
    """The store that the arguments name. It retries a few times, for a few seconds.

    Raises:
        ConfigError: they name none, or an option is not one.
        StoreError: it cannot be opened.
    """
    from speedtronic.distributed.stores import RetryingStore, open_store

    url, configured = _address(*split_words(args.words, "store"))
    options: dict[str, Any] = dict(configured)
    for word in args.option or []:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"--option {key}: write KEY=VALUE")
        options[key] = {"true": True, "false": False}.get(value, value)
    store = RetryingStore(open_store(url, **options), **_RETRIES)
    try:
        yield store
    finally:
        store.close()


def _address(word: str, overrides: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The address and the options of the store that a word means."""
    from speedtronic.config.run_folder import config_in

    path = Path(word)
    is_address = "://" in word
    if not is_address and (path.is_file() or (path.is_dir() and config_in(path) is not None)):
        run = load_config_of_run(path, overrides)
        section = run.config.distributed
        if section.repo_id is None:
            raise ConfigError(f"{word}: it names no store; set distributed.repo_id")
        if hidden := [key for key in run.secrets if key.startswith("distributed.store_options.")]:
            raise ConfigError(
                f"{word}: the folder of a run keeps no secrets; give them again ({', '.join(hidden)}), or name the "
                "configuration that the run was started with"
            )
        return section.repo_id, section.store_options
    if overrides:
        raise ConfigError(
            f"{overrides[0]}: goes with the YAML or the folder of a run, and {word} is neither; --option sets what a "
            "store needs"
        )
    if is_address:
        return word, {}
    if path.is_dir():
        return f"dir://{path.resolve()}", {}
    raise ConfigError(
        f"{word}: there is no such folder or file, and an address contains ://, such as dir:///path or "
        "s3://bucket/prefix"
    )


# ---------------------------------------------------------------------- status


def _add_status(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "status",
        help="show the version, the nodes, who seems to run, and what waits",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show what a store holds: its version, whether a master seems to run, and for each node whether\n"
        "it seems to run, how far it is, how old its last delta is in rounds, what it sent, what was refused, and\n"
        "what waits for the master. Neither weights nor deltas are downloaded.",
        epilog="exit code: 0 done, 1 the store does not answer, 2 it cannot be used or has no version, or bad use\n\n"
        + _FIELDS
        + _WORDS
        + "\n"
        + _MASTER_STATES,
    )
    _add_store(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run_status)


_now = time.time  # seconds since 1970


def run_status(args: argparse.Namespace) -> int:
    from speedtronic.distributed.status import store_status
    from speedtronic.metrics.lines import short_bytes

    with _opened_store(args) as store:
        status = store_status(store, now=_now())
    if args.json:  # see `_FIELDS`
        report = {
            **asdict(status),
            "outstanding": status.outstanding,
            "outstanding_bytes": status.outstanding_bytes,
            "unknown_sessions": status.unknown_sessions,
        }
        output.write(json.dumps(report, indent=2) + "\n")
        return 0

    output.write(
        f"{status.url}: version {status.version} ({status.rounds:.4g} rounds), {output.age(status.age)} old, "
        f"weights {short_bytes(status.weights_bytes)}\n"
        f"master: {status.master}: {_told_by(status)}\n"
    )
    if status.nodes:
        output.write_table(_HEADINGS, [_as_row(node) for node in status.nodes])
        output.write(_WORDS)
    return 0


def _told_by(status: StoreStatus) -> str:
    """How it is known whether the master runs."""
    from speedtronic.metrics.lines import short_bytes

    if not status.outstanding:
        return "nothing waits for it, so it has nothing to show"
    verb = "waits" if status.outstanding == 1 else "wait"
    waiting = f"{output.counted(status.outstanding, 'delta')} {verb} ({short_bytes(status.outstanding_bytes)})"
    if status.master == "unknown":
        return f"{waiting}, and how long a version takes is not known yet"
    if status.master == "silent":
        return (
            f"no new version for {output.age(status.age)}, and {waiting}: no master runs, or it takes none of them, "
            "and its log says why; `speedtronic diloco master CONFIG` starts another"
        )
    told = f"{waiting}, and the newest version is {output.age(status.age)} old"
    if status.pace is not None:
        told += f"; the last ones took {output.age(status.pace)} each"
    return told if status.master == "running" else f"{told}; `speedtronic diloco master CONFIG` starts another"


def _as_row(node: NodeStatus) -> tuple[str, ...]:
    from speedtronic.metrics.lines import short_bytes, short_number

    return (
        node.name,
        node.health,
        "-" if node.silent is None else f"{output.age(node.silent)} ago",
        str(node.step),
        short_number(node.tokens),
        "-" if node.rounds_behind is None else f"{round(node.rounds_behind, 2):g}",
        short_bytes(node.bytes),
        str(node.outstanding),
        f"{node.rejected}: {printable(node.reason)}" if node.reason is not None else str(node.rejected),
    )


# ---------------------------------------------------------------------- pull


def _add_pull(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "pull",
        help="write the global weights to a safetensors file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Fetch the global weights, compare their size and checksum with the manifest, and write them to a\n"
        "safetensors file with the model's own names. run.init_from starts a training from it.\n"
        "The file is there in full or not at all.",
        epilog="exit code: 0 done, 1 the store does not answer or the file cannot be written,\n"
        "2 there is no such version, or bad use",
    )
    _add_store(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("model.safetensors"),
        metavar="FILE|DIR",
        help="where to: a file that ends in .safetensors, or a folder (default: model.safetensors)",
    )
    parser.add_argument("--version", type=int, metavar="N", help="of the weights (default: the newest)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.set_defaults(run=run_pull)


def run_pull(args: argparse.Namespace) -> int:
    from speedtronic.distributed.pull import pull, target
    from speedtronic.metrics.lines import short_bytes

    with output.termination_unwinds(), _opened_store(args) as store:
        manifest = pull(store, args.out, version=args.version, replace=args.force)
        size = short_bytes(manifest.weights.size)
        output.write(f"pulled: {target(args.out)}: version {manifest.version} of {store.url}, {size}\n")
    return 0


# ---------------------------------------------------------------------- publish


def _add_publish(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "publish",
        help="put the global weights on the Hugging Face Hub, with a model card",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Fetch the global weights as `pull` does, and put them into a repository of the Hugging Face Hub,\n"
        "in one commit, with a model card: version, nodes, steps and tokens that the weights contain. The repository\n"
        "is made, private, where it is missing. The token comes from HF_TOKEN or from `hf auth login`. With --every,\n"
        "each newer version that is there after so many minutes follows, until Ctrl-C: the Hub refuses more than\n"
        "about 128 commits an hour.",
        epilog="exit code: 0 done, 1 the store or the Hub does not answer, 2 there is no such version, no access, or "
        "bad use",
    )
    _add_store(parser)
    parser.add_argument("--version", type=int, metavar="N", help="of the weights (default: the newest)")
    parser.add_argument("--every", type=float, metavar="MINUTES", help="publish again after so many minutes")
    add_publish_arguments(parser)
    parser.set_defaults(run=run_publish)


_sleep = time.sleep


def run_publish(args: argparse.Namespace) -> int:
    if args.every is not None and (args.version is not None or not args.every >= 1):
        raise ConfigError("--every takes at least 1 minute, and goes without --version")
    address = take_address(args.words)
    from speedtronic.distributed.requests import perform
    from speedtronic.distributed.status import newest_manifest

    with output.termination_unwinds(), _opened_store(args) as store:
        published = _publish_version(args, store, address)
        while args.every is not None:
            _sleep(60 * args.every)
            if perform(newest_manifest(store.url), store).version > published:
                published = _publish_version(args, store, address)
    return 0


def _publish_version(args: argparse.Namespace, store: Store, address: str) -> int:
    """Publish a version, and return its number."""
    from speedtronic.distributed.pull import pull

    with new_folder() as folder:
        manifest = pull(store, folder, version=args.version)
        nodes = manifest.nodes.values()
        facts = {
            "version of the global weights": manifest.version,
            "made": manifest.time,
            "rounds": f"{manifest.rounds:.4g}",
            "nodes": len(manifest.nodes),
            "steps of all nodes": sum(mark.position.step for mark in nodes),
            "tokens of all nodes": sum(mark.position.tokens for mark in nodes),
            "outer optimizer": manifest.outer.name,
            "schema of the model": manifest.schema_id,
        }
        write_card(folder, address.rpartition("/")[2], facts, None)
        publish(args, folder, address, f"version {manifest.version}")
    return manifest.version
