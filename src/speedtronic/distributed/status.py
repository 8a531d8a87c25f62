"""What a store holds: its version, what nodes sent, what still waits, and who seems to be running."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from speedtronic.distributed.protocol import (
    DELTAS,
    DeltaId,
    Manifest,
    find_head,
    list_all,
    parse_delta_name,
    read_manifest,
)
from speedtronic.distributed.records import NodeMark, Position, SessionMark, seconds_of
from speedtronic.distributed.requests import Procedure, perform
from speedtronic.distributed.stores.base import Store
from speedtronic.errors import StoreContentError

# What is known of a machine from how long it was silent, compared with how long it usually is.
Health = Literal["running", "late", "gone", "unknown"]
# Of a master, silence does not tell that it is gone: it writes nothing about deltas that it cannot take.
MasterHealth = Literal["running", "late", "silent", "unknown"]

_LATE, _GONE = 3.0, 10.0  # times the usual silence
_SHORTEST_SILENCE = 60.0  # seconds; a shorter one says nothing, however fast the machines are
_PACE_OVER = 5  # versions


@dataclass(frozen=True)
class SessionStatus:
    """A session of a node of which deltas may still come. A restarted node starts another session.

    Attributes:
        session: its name.
        known: whether a version knows it. One that no version knows has only deltas that wait, or were refused.
        seq: number of its last delta that a version has processed; 0 if there is none.
        last: number of the last one that it has sent, as the session after it says; None until then.
        step: optimizer steps of the node that the versions contain, including those of its earlier sessions.
        samples, tokens: what the node had trained on by then, counted in the same way.
        outstanding: how many of its deltas wait in the store for the master.
        outstanding_bytes: their size.
    """

    session: str
    known: bool
    seq: int
    last: int | None
    step: int
    samples: int
    tokens: int
    outstanding: int
    outstanding_bytes: int


@dataclass(frozen=True)
class NodeStatus:
    """A node.

    Attributes:
        name: of the node.
        health: whether it runs, as far as its last delta tells: `late` after three times as long as a delta of it and
            a version take, `gone` after ten times; `unknown` while no version has a delta of it.
        seen: when the master last processed one of its deltas, in seconds since 1970 (UTC), by the master's clock; None
            if never.
        silent: seconds since then, by this machine's clock; None if never.
        version: the version in which a delta of it entered last; None if there is none.
        versions_behind: how many versions there were since then.
        rounds_behind: how many rounds since then. A version counts as the fraction of a round that it is.
        steps: inner steps of its last delta.
        seconds: how long those took.
        tokens_per_step: tokens (of data without them, samples) of one.
        step, samples, tokens: how far the versions contain its training, over all its sessions.
        bytes: size of all its deltas so far, with those that wait.
        rejected: how many of its deltas were refused.
        reason: why the last of those was.
        outstanding: how many of its deltas wait in the store for the master.
        outstanding_bytes: their size.
        sessions: those that are open, and those that no version knows, the newest last.
    """

    name: str
    health: Health
    seen: int | None
    silent: float | None
    version: int | None
    versions_behind: int | None
    rounds_behind: float | None
    steps: int
    seconds: float
    tokens_per_step: float
    step: int
    samples: int
    tokens: int
    bytes: int
    rejected: int
    reason: str | None
    outstanding: int
    outstanding_bytes: int
    sessions: tuple[SessionStatus, ...]


@dataclass(frozen=True)
class StoreStatus:
    """The state of a store.

    Attributes:
        url: the store's address, without secrets.
        id: the store's identity; None while it is of protocol 1.
        protocol: of its newest version.
        version: of the global weights, which is the number of outer steps.
        time: when that version was made (UTC, ISO 8601, by the master's clock).
        age: seconds since then, by this machine's clock.
        pace: seconds between the last versions; None while there is only one.
        master: whether a master runs: `late` if deltas wait and there was no version for three times as long as usual,
            `silent` after ten times: it is gone, or takes none of these deltas; `unknown` if nothing waits, or the
            usual time is not known.
        rounds: how many rounds the versions add up to.
        weights_bytes: size of the weights.
        nodes: all that have sent something, by name.
    """

    url: str
    id: str | None
    protocol: int
    version: int
    time: str
    age: float
    pace: float | None
    master: MasterHealth
    rounds: float
    weights_bytes: int
    nodes: tuple[NodeStatus, ...]

    @property
    def outstanding(self) -> int:
        """How many deltas wait for the master."""
        return sum(node.outstanding for node in self.nodes)

    @property
    def outstanding_bytes(self) -> int:
        return sum(node.outstanding_bytes for node in self.nodes)

    @property
    def unknown_sessions(self) -> int:
        """How many sessions wait of which no version knows anything: new nodes, restarted ones, or garbage."""
        return sum(not session.known for node in self.nodes for session in node.sessions)


def store_status(store: Store, *, now: float) -> StoreStatus:
    """Look at a store. No weights and no deltas are downloaded.

    Args:
        now: seconds since 1970 (UTC). How long somebody was silent is told by this clock and the master's, so a
            difference between the two shows there.

    Raises:
        StoreContentError: there is no version yet, or it cannot be read.
        StoreError: the store could not be asked.
    """
    return perform(_look(store.url, now), store)


def newest_manifest(url: str) -> Procedure[Manifest]:
    """The head of the store at `url`.

    Raises:
        StoreContentError: there is none, or it cannot be read.
    """
    try:
        head = yield from find_head(None)
    except StoreContentError as error:
        raise StoreContentError(f"{url}: {error}") from None
    if head is None:
        raise StoreContentError(
            f"{url}: there is no version in it: no master has published yet, or the address is another one; "
            "start a master with `speedtronic diloco master CONFIG`"
        )
    return head


def _look(url: str, now: float) -> Procedure[StoreStatus]:
    head = yield from newest_manifest(url)
    earlier = (yield from read_manifest(max(0, head.version - _PACE_OVER))) if head.version else None

    # The deltas that wait for the master. Those that the head has processed are about to be deleted.
    waiting: dict[DeltaId, int] = {}
    for entry in (yield from list_all(DELTAS)):
        delta = parse_delta_name(entry.name)
        if delta is not None and not head.has_processed(delta):
            waiting[delta] = max(entry.size, waiting.get(delta, 0))  # of several copies all but one are torn
    return status_of(url, head, earlier, waiting, now)


def status_of(
    url: str, head: Manifest, earlier: Manifest | None, waiting: Mapping[DeltaId, int], now: float
) -> StoreStatus:
    """The status of a store with these contents.

    Args:
        earlier: a version before the head, which tells the pace.
        waiting: size in bytes of each delta that waits.
        now: seconds since 1970.
    """
    age = max(0.0, now - seconds_of(head.time))
    pace = None
    if earlier is not None and earlier.version < head.version:
        passed = seconds_of(head.time) - seconds_of(earlier.time)
        pace = max(0.0, passed / (head.version - earlier.version))
    sizes: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for delta, size in waiting.items():
        sizes[delta.node][delta.session].append(size)

    # Before the second version, the nodes tell how long a version takes.
    usual = pace
    if usual is None and head.nodes:
        usual = statistics.median(mark.seconds for mark in head.nodes.values())
    of_master = _health(age, usual) if waiting else "unknown"
    return StoreStatus(
        url=url,
        id=head.store,
        protocol=head.protocol,
        version=head.version,
        time=head.time,
        age=age,
        pace=pace,
        master="silent" if of_master == "gone" else of_master,
        rounds=head.rounds,
        weights_bytes=head.weights.size,
        nodes=tuple(
            _node(name, head, head.nodes.get(name), sizes[name], pace or 0.0, now)
            for name in sorted(head.nodes.keys() | sizes.keys())
        ),
    )


def _health(silent: float, usual: float | None) -> Health:
    if usual is None:
        return "unknown"
    usual = max(usual, _SHORTEST_SILENCE)
    return "running" if silent <= _LATE * usual else "late" if silent <= _GONE * usual else "gone"


def _node(
    name: str,
    head: Manifest,
    mark: NodeMark | None,
    waiting: Mapping[str, Sequence[int]],
    pace: float,
    now: float,
) -> NodeStatus:
    open_sessions = mark.sessions if mark is not None else {}
    # A session that no version knows is the newest; of the others, the one that is furthest.
    order = sorted(
        open_sessions.keys() | waiting.keys(),
        key=lambda session: (session not in open_sessions, open_sessions.get(session, _NEW).position, session),
    )
    sessions = tuple(_session(session, open_sessions.get(session), waiting.get(session, ())) for session in order)
    outstanding_bytes = sum(session.outstanding_bytes for session in sessions)
    position = mark.position if mark is not None else Position(0, 0, 0)
    silent = max(0.0, now - mark.time) if mark is not None else None
    return NodeStatus(
        name=name,
        health=_health(silent, mark.seconds + pace) if mark is not None and silent is not None else "unknown",
        seen=mark.time if mark is not None else None,
        silent=silent,
        version=mark.version if mark is not None else None,
        versions_behind=head.version - mark.version if mark is not None else None,
        rounds_behind=max(0.0, head.rounds - mark.rounds) if mark is not None else None,
        steps=mark.steps if mark is not None else 0,
        seconds=mark.seconds if mark is not None else 0.0,
        tokens_per_step=mark.tokens_per_step if mark is not None else 0.0,
        step=position.step,
        samples=position.samples,
        tokens=position.tokens,
        bytes=(mark.bytes if mark is not None else 0) + outstanding_bytes,
        rejected=mark.rejected if mark is not None else 0,
        reason=mark.reason if mark is not None else None,
        outstanding=sum(session.outstanding for session in sessions),
        outstanding_bytes=outstanding_bytes,
        sessions=sessions,
    )


_NEW = SessionMark(seq=0, last=None, position=(0, 0, 0))


def _session(session: str, known: SessionMark | None, waiting: Sequence[int]) -> SessionStatus:
    mark = known or _NEW
    step, samples, tokens = mark.position
    return SessionStatus(
        session=session,
        known=known is not None,
        seq=mark.seq,
        last=mark.last,
        step=step,
        samples=samples,
        tokens=tokens,
        outstanding=len(waiting),
        outstanding_bytes=sum(waiting),
    )
