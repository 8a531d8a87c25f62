"""How the marks of a manifest move: sessions open, are processed and are closed. Nothing is read or written here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from speedtronic.distributed.delta import DeltaHeader, Predecessor
from speedtronic.distributed.protocol import DeltaId, Manifest
from speedtronic.distributed.records import MOST_OPEN, NodeMark, Rejection, SessionMark, session_number

RECENT_ROUNDS = 5  # a node that was in one of the last five rounds may take part
TURNS = 10  # of k nodes, each takes part in one of 10·k versions
MOST_NODES = 1000  # in a manifest, unless more take part
CLIPPED = 3.0  # times the median norm; what is larger is scaled down to it
REFUSED = 100.0  # times the median norm
MOST_TOKENS = 4.0  # times the median; what claims more counts as this
_NODES_LEFT = 750  # where some must be dropped, many are: each time, `horizon` refuses what is on its way
_MOST_SESSIONS = 2048  # open ones of all nodes, as far as each has more than two
_FARTHEST = 1000  # sessions that a node may have opened without a delta
_LONGEST_REASON = 100  # characters
_REMEMBERED = 16  # refusals of a session that nothing opened

_NOWHERE = (0, 0, 0)
_UNKNOWN = NodeMark(
    closed_below=0,
    sessions={},
    tokens_per_step=0.0,
    steps=0,
    seconds=0.0,
    norm=None,
    version=0,
    rounds=0.0,
    time=0,
    bytes=0,
    rejected=0,
    reason=None,
)

SessionKey = tuple[str, str]  # node and session


class Settled(NamedTuple):
    """A delta that was processed.

    Attributes:
        delta: its identity. All before it in its session are processed with it.
        header: what it says of itself; None where it could not be read, or must not count.
        size: in bytes.
        reason: why it was refused; None if it entered.
        tokens_per_step, norm: as they entered.
        again: the version from which on it may be judged otherwise; None if never.
    """

    delta: DeltaId
    header: DeltaHeader | None
    size: int
    reason: str | None
    tokens_per_step: float = 0.0
    norm: float = 0.0
    again: int | None = None


# --- What the marks tell of a round


def recent_marks(head: Manifest) -> dict[str, NodeMark]:
    """The marks of the nodes of which a delta entered in one of the last rounds."""
    return {node: mark for node, mark in head.nodes.items() if head.rounds - mark.rounds < RECENT_ROUNDS}


def taking_part(head: Manifest) -> set[str]:
    """The nodes of which a whole round has deltas.

    Each was in one of the last rounds, and the k-th of them, from the newest, in one of the last `TURNS`·k versions.
    The rounds alone would keep nodes that came once: while these are expected, a version is a small part of a round.
    """
    nodes: set[str] = set()
    for version, node in sorted(((mark.version, node) for node, mark in recent_marks(head).items()), reverse=True):
        if head.version - version >= TURNS * (len(nodes) + 1):
            break  # those that are left are no newer
        nodes.add(node)
    return nodes


def usual_norm(marks: Iterable[NodeMark], steps: int) -> float | None:
    """What the norm of a delta of so many inner steps can be expected to be; None if nothing is known.

    A norm grows with the steps if all go the same way, and with their square root if they go any way. Of the two
    medians the larger one counts, since nodes may run unequal numbers of steps.
    """
    known = [(mark.norm, mark.steps) for mark in marks if mark.norm and mark.steps]
    if not known:
        return None
    straight = statistics.median_low(norm / count for norm, count in known) * steps
    random = statistics.median_low(norm / math.sqrt(count) for norm, count in known) * math.sqrt(steps)
    return max(straight, random)


def most_tokens(claims: Collection[float]) -> float:
    """The most tokens of an inner step that a node is believed, given those of others."""
    return MOST_TOKENS * statistics.median_low(claims) if claims else math.inf


def seconds_of_a_delta(marks: Collection[NodeMark], inner_steps: int | None) -> float | None:
    """The median of how long nodes take for a whole delta; None if that is not known.

    Args:
        inner_steps: of a whole delta; None for the median of the last deltas' steps.
    """
    if inner_steps is None:
        counts = [mark.steps for mark in marks if mark.steps]
        inner_steps = statistics.median_low(counts) if counts else 1
    seconds = [mark.seconds / mark.steps * inner_steps if mark.steps else mark.seconds for mark in marks]
    return statistics.median(seconds) if seconds else None


def rounded(value: float) -> float:
    """Seven digits: a manifest has many numbers."""
    return float(f"{value:.7g}")


# --- What a round does to the marks


class Marks:
    """The marks of a version that is put together.

    Args:
        head: the version on which it builds.
        refused: refusals of sessions that no version knows, in the order of their numbers. A later delta may open the
            session; it then takes them into its mark.
        time: of the new version, in seconds since 1970.

    Attributes:
        refused: the same, with those that were added.
        rejected: what the manifest says of refusals.
        moved: nodes whose marks have moved.
    """

    def __init__(self, head: Manifest, refused: Mapping[SessionKey, Sequence[Settled]], time: int) -> None:
        self.refused = {session: tuple(ones) for session, ones in refused.items()}
        self.rejected: list[Rejection] = []
        self.moved: set[str] = set()
        self._head = head
        self._time = time
        self._nodes = dict(head.nodes)
        self._entered: set[str] = set()

    def is_next(self, delta: DeltaId) -> bool:
        """Whether a delta comes after all that is processed of its session."""
        mark = self._nodes.get(delta.node, _UNKNOWN)
        if mark.has_closed(delta.session):
            return False
        known = mark.sessions.get(delta.session)
        refused = self.refused.get((delta.node, delta.session))
        processed = known.seq if known is not None else refused[-1].delta.seq if refused else 0
        return delta.seq == processed + 1

    def is_open(self, delta: DeltaId) -> bool:
        """Whether a delta's session is open, or closed again."""
        mark = self._nodes.get(delta.node, _UNKNOWN)
        return delta.session in mark.sessions or mark.has_closed(delta.session)

    def obstacle(self, header: DeltaHeader) -> str | None:
        """Why a delta may not enter, by what is known of its node's sessions; None if it may."""
        mark = self._nodes.get(header.node, _UNKNOWN)
        known = mark.sessions.get(header.session)
        # Until a delta of it has entered, a session may be one that was forgotten, with deltas that entered long ago.
        if known is not None and known.position != _NOWHERE:
            return None
        if header.base_version < self._head.horizon:
            return f"it is based on version {header.base_version}, from before its node was forgotten"
        if known is not None:
            return None
        number = session_number(header.session)
        largest = max([mark.closed_below, *map(session_number, mark.sessions)])
        if number > largest + _FARTHEST:
            return f"its session has number {number}, and the last known one of its node {largest}"
        before = header.predecessor
        if before is not None and session_number(before.session) >= number:
            return f"it names {before.session} as the session before it, which has no smaller number"
        return None

    def settle(self, one: Settled) -> None:
        """Note that a delta is processed."""
        node, session, seq = one.delta
        mark = self._nodes.get(node, _UNKNOWN)
        known = mark.sessions.get(session)
        if one.reason is not None and known is None:
            # Whoever can write could make up such sessions: they leave nothing in the manifest.
            self.refused[node, session] = (*self.refused.get((node, session), ()), one)[-_REMEMBERED:]
            return
        settled = (*self.refused.pop((node, session), ()), one)
        refusals = [(of.delta.name, of.reason[:_LONGEST_REASON]) for of in settled if of.reason is not None]
        self.rejected += [Rejection(name=name, reason=reason) for name, reason in refusals]

        position = known.position if known is not None else _NOWHERE
        sessions = dict(mark.sessions)
        changes: dict[str, Any] = {
            "time": self._time,
            "bytes": mark.bytes + sum(of.size for of in settled),
            "rejected": mark.rejected + len(refusals),
            "reason": refusals[-1][1] if refusals else mark.reason,
        }
        if one.reason is None:
            assert one.header is not None, "it was admitted"
            self._entered.add(node)
            changes |= {
                "tokens_per_step": rounded(one.tokens_per_step),
                "steps": one.header.steps,
                "seconds": rounded(one.header.seconds),
                "norm": rounded(one.norm),
                "version": self._head.version + 1,
            }
            if position == _NOWHERE and one.header.predecessor is not None:
                _finish(sessions, one.header.predecessor, mark.closed_below)
        if one.header is not None:
            position = one.header.position
        sessions[session] = SessionMark(seq=seq, last=known.last if known is not None else None, position=position)
        self._nodes[node] = _folded(mark.model_copy(update=changes), sessions, MOST_OPEN)
        self.moved.add(node)

    def complete(self, rounds: float, waiting: Collection[str]) -> tuple[dict[str, NodeMark], int]:
        """The marks of the new version, and its horizon.

        Args:
            rounds: of the new version.
            waiting: nodes of which deltas wait. They are not dropped.
        """
        for node in self._entered:
            self._nodes[node] = self._nodes[node].model_copy(update={"rounds": rounded(rounds)})

        # Of very many nodes, those that were idle for longest are forgotten.
        horizon = self._head.horizon
        if len(self._nodes) > MOST_NODES:
            idle = [
                (mark.version, node)
                for node, mark in self._nodes.items()
                if rounds - mark.rounds >= RECENT_ROUNDS and node not in waiting
            ]
            for _, node in sorted(idle)[: len(self._nodes) - _NODES_LEFT]:
                del self._nodes[node]
                horizon = self._head.version + 1
        most_open = max(2, min(MOST_OPEN, _MOST_SESSIONS // max(1, len(self._nodes))))
        nodes = {
            node: mark if len(mark.sessions) <= most_open else _folded(mark, dict(mark.sessions), most_open)
            for node, mark in self._nodes.items()
        }
        return nodes, horizon


def _finish(sessions: dict[str, SessionMark], before: Predecessor, closed_below: int) -> None:
    """Note how far the session before another one went."""
    known = sessions.get(before.session)
    if known is not None:
        sessions[before.session] = known.model_copy(update={"last": max(before.last, known.last or 0)})
    elif before.last > 0 and session_number(before.session) >= closed_below:
        # Its deltas may still come. It is open until they have, or are given up.
        sessions[before.session] = SessionMark(seq=0, last=before.last, position=_NOWHERE)


def _folded(mark: NodeMark, sessions: dict[str, SessionMark], most: int) -> NodeMark:
    """A mark with some sessions; those that are complete are closed, and the lowest of too many."""
    done = [name for name, session in sessions.items() if session.last is not None and session.seq >= session.last]
    left = sorted(sessions.keys() - set(done), key=lambda name: (session_number(name), name))
    closed = {*done, *left[: max(0, len(left) - most)]}
    return mark.model_copy(
        update={
            "sessions": {name: session for name, session in sessions.items() if name not in closed},
            "closed_below": max([mark.closed_below, *(session_number(name) + 1 for name in closed)]),
        }
    )
