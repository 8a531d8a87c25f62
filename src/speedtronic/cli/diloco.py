"""`speedtronic diloco master | status | pull`: training over a store that all nodes share."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_config_of_run, load_from_arguments
from speedtronic.cli.output import printable
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.distributed.status import NodeStatus
    from speedtronic.distributed.stores import Store

_SIGNAL_INTERVAL = 0.2  # seconds between two looks for a signal
_STOP_TIMEOUT = 10.0  # seconds that a running request gets to end
# A person waits for the answer: a store that does not give it within some seconds is down.
_RETRIES: Mapping[str, Any] = {"initial": 0.5, "maximum": 4.0, "attempts": 4}

_FIELDS = """\
fields of the JSON object:
  url                the store, without secrets
  version            of the global weights: how many outer steps there were
  time               when that version was made (UTC)
  rounds             how many rounds the versions add up to
  weights_bytes      size of the weights
  outstanding        deltas that wait for the master
  outstanding_bytes  their size
  nodes              an array; each has a name and its sessions, one for each start of the node, the newest last

fields of a session:
  session            its name
  seq                its last delta that a version has dealt with; 0 when none
  step               optimizer steps of the node that the versions contain, of its earlier sessions too
  samples, tokens    what the node had trained on by then, counted alike
  seen, version      when the master last dealt with one of its deltas (UTC), and in which version; null when never
  versions_behind    versions since then
  rounds_behind      rounds since then
  bytes              size of all its deltas so far
  rejected, reason   how many were refused, and why the last one was, or null
  outstanding, outstanding_bytes  those that wait for the master
"""
_HEADINGS = ("NODE", "SEEN", "STEP", "TOKENS", "ROUNDS BEHIND", "SENT", "WAITING", "REJECTED", "STARTS")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diloco", help="average the weights of many nodes, and see what they do")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_master(actions)
    _add_status(actions)
    _add_pull(actions)


# ---------------------------------------------------------------------- master


def _add_master(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "master",
        help="average what the nodes send, and train nothing",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Publish the model's initial weights where the store has none, and from then on average what the\n"
        "nodes send and publish it. It needs neither data nor an accelerator. All of its state is in the store: a\n"
        "master that ended or was killed at any moment, on this machine or another, continues where it stopped.\n"
        "Ctrl-C, SIGTERM or SIGHUP ends it.",
        epilog="exit code: 128 + n ended by signal n, 1 the store does not answer at the start, 2 it cannot be used,\n"
        "or holds another model, or bad use",
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run_master)


def run_master(args: argparse.Namespace) -> int:
    config, folder = load_from_arguments(args)
    if config.distributed.repo_id is None:
        raise ConfigError("distributed.repo_id: needed; name a store, such as dir:///path or s3://bucket/prefix")
    config.distributed.enabled = True  # asked for by the command, so that what is not built is refused

    # torch is imported only now: a mistake in the file is reported at once.
    from speedtronic.checkpoint import RunLock
    from speedtronic.config.checks import refuse_what_is_not_built
    from speedtronic.distributed.coordinator import build_master, say_through
    from speedtronic.distributed.stores.open import connect
    from speedtronic.runtime import build_initial_model, build_logger, import_plugins
    from speedtronic.trainer.signals import SignalWatch

    refuse_what_is_not_built(config)
    import_plugins(config.plugins, folder)
    # Two masters of one store do each other no harm, but their log files would mingle.
    writes_logs = config.logging.file is not None or config.logging.json_file is not None
    lock = RunLock(Path(config.run.output_dir)) if writes_logs else nullcontext()
    with lock, build_logger(config) as logger:
        stopping = threading.Event()
        store = connect(config.distributed, stopping=stopping)
        model = build_initial_model(config, logger)
        master = build_master(config.distributed, store, model, say_through(logger), stopping=stopping)
        master.sync_once()  # a store that cannot be used, or holds another model, ends the command
        with SignalWatch() as watch:
            master.start()
            logger.info(
                f"at version {master.outer_step}, averaging what the nodes put into {store.url}; Ctrl-C ends it"
            )
            while watch.received is None:
                time.sleep(_SIGNAL_INTERVAL)
            master.stop(_STOP_TIMEOUT)
        logger.info(f"ended by {watch.received.name} at version {master.outer_step}, which is in {store.url}")
    return 128 + watch.received


# ---------------------------------------------------------------------- the store to look at


def _add_store(parser: argparse.ArgumentParser) -> None:
    """Add `STORE [--option KEY=VALUE …]`, which `_opened_store` reads."""
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
def _opened_store(args: argparse.Namespace) -> Iterator[Store]:
    """The store that the arguments name. It retries a few times, for a few seconds.

    Raises:
        ConfigError: they name none, or an option is not one.
        StoreError: it cannot be opened.
    """
    from speedtronic.distributed.stores import RetryingStore, open_store

    url, configured = _address(args.store)
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


def _address(word: str) -> tuple[str, Mapping[str, Any]]:
    """The address and the options of the store that a word means."""
    if "://" in word:
        return word, {}
    path = Path(word)
    if path.is_file():
        section = load_config_of_run(path).config.distributed
        if section.repo_id is None:
            raise ConfigError(f"{word}: it names no store; set distributed.repo_id")
        return section.repo_id, section.store_options
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
        help="show the version, the nodes and what waits",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show what a store holds: its version, and for each node when it was last heard of, how far it\n"
        "is, how old its last delta is in rounds, what it sent, what was refused, and what waits for the master.\n"
        "Neither weights nor deltas are downloaded.",
        epilog="exit code: 0 done, 1 the store does not answer, 2 it cannot be used or has no version, or bad use\n\n"
        + _FIELDS,
    )
    _add_store(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run_status)


def run_status(args: argparse.Namespace) -> int:
    from speedtronic.distributed.status import store_status
    from speedtronic.metrics.lines import short_bytes

    with _opened_store(args) as store:
        status = store_status(store)
    if args.json:  # see `_FIELDS`
        report = {
            "url": status.url,
            "version": status.version,
            "time": status.time,
            "rounds": status.rounds,
            "weights_bytes": status.weights_bytes,
            "outstanding": status.outstanding,
            "outstanding_bytes": status.outstanding_bytes,
            "nodes": [asdict(node) for node in status.nodes],
        }
        output.write(json.dumps(report, indent=2) + "\n")
        return 0

    now = datetime.now(UTC)
    waiting = f"{status.outstanding} waiting ({short_bytes(status.outstanding_bytes)})"
    output.write(
        f"{status.url}: version {status.version}, {_since(status.time, now)} old, "
        f"weights {short_bytes(status.weights_bytes)}, {waiting if status.outstanding else 'nothing waiting'}\n"
    )
    if status.nodes:
        output.write_table(_HEADINGS, [_as_row(node, now) for node in status.nodes])
    return 0


def _as_row(node: NodeStatus, now: datetime) -> tuple[str, ...]:
    from speedtronic.metrics.lines import short_bytes, short_number

    last = max(node.sessions, key=lambda session: session.version or 0)  # None and 0: no version knows it yet
    rejected = str(sum(session.rejected for session in node.sessions))
    reasons = [session.reason for session in node.sessions if session.reason is not None]
    return (
        node.name,
        "-" if last.seen is None else f"{_since(last.seen, now)} ago",
        str(max(session.step for session in node.sessions)),
        short_number(max(session.tokens for session in node.sessions)),
        "-" if last.rounds_behind is None else f"{last.rounds_behind:.3g}",
        short_bytes(sum(session.bytes for session in node.sessions)),
        str(sum(session.outstanding for session in node.sessions)),
        f"{rejected}: {printable(reasons[-1])}" if reasons else rejected,
        str(len(node.sessions)),
    )


def _since(time: str, now: datetime) -> str:
    """How long ago a time is that a master wrote down, by this machine's clock."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return "?"
    return output.age((now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds())


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
