"""What a store holds: its version, what nodes sent, and what still waits. Reads the newest manifest and one listing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from speedtronic.distributed.protocol import (
    DELTAS,
    UNMARKED,
    DeltaId,
    Manifest,
    Mark,
    find_head,
    list_all,
    parse_delta_name,
)
from speedtronic.distributed.requests import Procedure, perform
from speedtronic.distributed.stores.base import Store
from speedtronic.errors import StoreContentError


@dataclass(frozen=True)
class SessionStatus:
    """What a node has sent in one session. A restarted node starts another session.

    Attributes:
        session: its name.
        seq: number of its last delta that a version has processed; 0 if there is none.
        step: optimizer steps of the node that the versions contain, including those of its earlier sessions.
        samples, tokens: what the node had trained on by then, counted in the same way.
        seen: when the master last processed one of its deltas (UTC, ISO 8601, by the master's clock); None if never.
        version: the version that did.
        versions_behind: how many versions there were since then.
        rounds_behind: how many rounds since then. A version counts as the fraction of a round that it is.
        bytes: size of all its deltas so far.
        rejected: how many of its deltas were refused.
        reason: why the last of those was.
        outstanding: how many of its deltas wait in the store for the master.
        outstanding_bytes: their size.
    """

    session: str
    seq: int
    step: int
    samples: int
    tokens: int
    seen: str | None
    version: int | None
    versions_behind: int | None
    rounds_behind: float | None
    bytes: int
    rejected: int
    reason: str | None
    outstanding: int
    outstanding_bytes: int


@dataclass(frozen=True)
class NodeStatus:
    """A node and its sessions, the newest one last."""

    name: str
    sessions: tuple[SessionStatus, ...]


@dataclass(frozen=True)
class StoreStatus:
    """The state of a store.

    Attributes:
        url: the store's address, without secrets.
        version: of the global weights, which is the number of outer steps.
        time: when that version was made (UTC, ISO 8601, by the master's clock).
        rounds: how many rounds the versions add up to.
        weights_bytes: size of the weights.
        nodes: all that have sent something, by name.
    """

    url: str
    version: int
    time: str
    rounds: float
    weights_bytes: int
    nodes: tuple[NodeStatus, ...]

    @property
    def outstanding(self) -> int:
        """How many deltas wait for the master."""
        return sum(session.outstanding for session in self._sessions())

    @property
    def outstanding_bytes(self) -> int:
        return sum(session.outstanding_bytes for session in self._sessions())

    def _sessions(self) -> Iterator[SessionStatus]:
        return (session for node in self.nodes for session in node.sessions)


def store_status(store: Store) -> StoreStatus:
    """Look at a store. No weights and no deltas are downloaded.

    Raises:
        StoreContentError: there is no version yet, or it cannot be read.
        StoreError: the store could not be asked.
    """
    return perform(_status(store.url), store)


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


def _status(url: str) -> Procedure[StoreStatus]:
    head = yield from newest_manifest(url)

    # The deltas that wait for the master. Those that the head has processed are about to be deleted.
    waiting: dict[DeltaId, int] = {}
    for entry in (yield from list_all(DELTAS)):
        delta = parse_delta_name(entry.name)
        if delta is not None and not head.has_processed(delta):
            waiting[delta] = max(entry.size, waiting.get(delta, 0))  # of several copies all but one are torn

    sizes: dict[str, list[int]] = defaultdict(list)
    for delta, size in waiting.items():
        sizes[delta.session_key].append(size)
    nodes: dict[str, list[SessionStatus]] = defaultdict(list)
    for key in sorted(head.marks.keys() | sizes.keys()):
        node, _, session = key.partition("/")
        nodes[node].append(_session(head, session, head.marks.get(key), sizes[key]))

    def oldest_first(session: SessionStatus) -> tuple[bool, int, str]:
        # A session that no version knows yet is the newest.
        return session.version is None, session.version or 0, session.session

    return StoreStatus(
        url=url,
        version=head.version,
        time=head.time,
        rounds=head.rounds,
        weights_bytes=head.weights.size,
        nodes=tuple(NodeStatus(name, tuple(sorted(sessions, key=oldest_first))) for name, sessions in nodes.items()),
    )


def _session(head: Manifest, session: str, marked: Mark | None, waiting: Sequence[int]) -> SessionStatus:
    mark = marked or UNMARKED
    return SessionStatus(
        session=session,
        seq=mark.seq,
        step=mark.step,
        samples=mark.samples,
        tokens=mark.tokens,
        seen=mark.time if marked else None,
        version=mark.version if marked else None,
        versions_behind=head.version - mark.version if marked else None,
        rounds_behind=head.rounds - mark.rounds if marked else None,
        bytes=mark.bytes + sum(waiting),
        rejected=mark.rejected,
        reason=mark.reason,
        outstanding=len(waiting),
        outstanding_bytes=sum(waiting),
    )
