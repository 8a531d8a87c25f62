"""`speedtronic diloco status`: what a store holds, and who sent it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output
from speedtronic.cli.checkpoints_found import printable
from speedtronic.cli.diloco_store import add_store_arguments, opened_store
from speedtronic.cli.tables import age, write_table

if TYPE_CHECKING:
    from speedtronic.distributed.status import NodeStatus, StoreStatus

FIELDS = """\
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


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "status",
        help="show the version, the nodes and what waits",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show what a store holds: its version, and for each node when it was last heard of, how far it\n"
        "is, how old its last delta is in rounds, what it sent, what was refused, and what waits for the master.\n"
        "Neither weights nor deltas are downloaded.",
        epilog="exit code: 0 done, 1 the store does not answer, 2 it cannot be used or has no version, or bad use\n\n"
        + FIELDS,
    )
    add_store_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from speedtronic.distributed.status import store_status

    with opened_store(args) as store:
        status = store_status(store)
    if args.json:
        output.write(json.dumps(_as_object(status), indent=2) + "\n")
        return 0
    now = datetime.now(UTC)
    output.write(_summary(status, now))
    if status.nodes:
        write_table(_HEADINGS, [_as_row(node, now) for node in status.nodes])
    return 0


def _as_object(status: StoreStatus) -> dict[str, Any]:
    """A status as JSON has it: see `FIELDS`."""
    return {
        "url": status.url,
        "version": status.version,
        "time": status.time,
        "rounds": status.rounds,
        "weights_bytes": status.weights_bytes,
        "outstanding": status.outstanding,
        "outstanding_bytes": status.outstanding_bytes,
        "nodes": [asdict(node) for node in status.nodes],
    }


def _summary(status: StoreStatus, now: datetime) -> str:
    from speedtronic.metrics.lines import short_bytes

    waiting = f"{status.outstanding} waiting ({short_bytes(status.outstanding_bytes)})"
    return (
        f"{status.url}: version {status.version}, {_since(status.time, now)} old, "
        f"weights {short_bytes(status.weights_bytes)}, {waiting if status.outstanding else 'nothing waiting'}\n"
    )


_HEADINGS = ("NODE", "SEEN", "STEP", "TOKENS", "ROUNDS BEHIND", "SENT", "WAITING", "REJECTED", "STARTS")


def _as_row(node: NodeStatus, now: datetime) -> tuple[str, ...]:
    from speedtronic.metrics.lines import short_bytes, short_number

    last = max(node.sessions, key=lambda session: session.version or 0)  # None and 0: no version knows it yet
    return (
        node.name,
        "-" if last.seen is None else f"{_since(last.seen, now)} ago",
        str(max(session.step for session in node.sessions)),
        short_number(max(session.tokens for session in node.sessions)),
        "-" if last.rounds_behind is None else f"{last.rounds_behind:.3g}",
        short_bytes(sum(session.bytes for session in node.sessions)),
        str(sum(session.outstanding for session in node.sessions)),
        _rejected(node),
        str(len(node.sessions)),
    )


def _rejected(node: NodeStatus) -> str:
    count = sum(session.rejected for session in node.sessions)
    reasons = [session.reason for session in node.sessions if session.reason is not None]
    return f"{count}: {printable(reasons[-1])}" if reasons else str(count)


def _since(time: str, now: datetime) -> str:
    """The age of what a master wrote down, by this machine's clock."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return "?"
    return age((now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds())
