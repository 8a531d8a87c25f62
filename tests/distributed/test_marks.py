"""How marks move, without a store."""

from __future__ import annotations

from typing import Any

import pytest

from speedtronic.distributed.delta import DeltaHeader, Predecessor
from speedtronic.distributed.marks import (
    MOST_NODES,
    RECENT_ROUNDS,
    Marks,
    Settled,
    most_tokens,
    recent_marks,
    rounded,
    seconds_of_a_delta,
    taking_part,
    usual_norm,
)
from speedtronic.distributed.protocol import PROTOCOL, DeltaId, Manifest
from speedtronic.distributed.records import (
    MOST_OPEN,
    Blob,
    NodeMark,
    Outer,
    Position,
    Rejection,
    SessionMark,
    session_name,
)

HASH = "0" * 64
MARK = NodeMark(
    closed_below=0,
    sessions={},
    tokens_per_step=100.0,
    steps=10,
    seconds=5.0,
    norm=1.0,
    version=1,
    rounds=1.0,
    time=0,
    bytes=0,
    rejected=0,
    reason=None,
)


def a_head(nodes: dict[str, NodeMark] | None = None, *, version: int = 0, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": version,
        "parent": HASH if version else None,
        "nonce": "n",
        "time": "2026-01-01T00:00:00+00:00",
        "store": "0" * 32,
        "schema_id": HASH,
        "weights": Blob(path="w/00000000-n.safetensors", size=8, sha256=HASH),
        "momentum": None,
        "outer": Outer(name="nesterov", scalars={}),
        "nodes": nodes or {},
        "horizon": 0,
        "applied": (),
        "rejected": (),
        "fraction": 0.0,
        "rounds": float(version),
    }
    return Manifest(**fields | changes)


def named(number: int, nonce: str = "00000000") -> str:
    return session_name(number, nonce)


def a_header(
    node: str, session: str, seq: int, *, base: int = 0, after: tuple[str, int] | None = None, step: int | None = None
) -> DeltaHeader:
    return DeltaHeader(
        node=node,
        session=session,
        seq=seq,
        base_version=base,
        steps=10,
        samples=1000,
        tokens=1000,
        seconds=5.0,
        position=Position(step or 10 * seq, 1000 * seq, 1000 * seq),
        schema_id=HASH,
        codec="fp32",
        time="",
        predecessor=Predecessor(session=after[0], last=after[1]) if after is not None else None,
    )


def entered(*arguments: Any, **options: Any) -> Settled:
    header = a_header(*arguments, **options)
    return Settled(header.id, header, 100, None, tokens_per_step=100.0, norm=1.0)


def refused(node: str, session: str, seq: int, reason: str = "stale") -> Settled:
    return Settled(DeltaId(node, session, seq), None, 100, reason)


def after(head: Manifest, *settled: Settled, rounds: float | None = None, waiting: tuple[str, ...] = ()) -> Manifest:
    """The version that comes of it, read back from its bytes."""
    marks = Marks(head, {}, 60)
    for one in settled:
        if one.reason is None:
            assert one.header is not None
            assert marks.obstacle(one.header) is None
        assert marks.is_next(one.delta)
        marks.settle(one)
    rounds = head.rounds + 1 if rounds is None else rounds
    nodes, horizon = marks.complete(rounds, waiting)
    following = a_head(nodes, version=head.version + 1, horizon=horizon, rounds=rounds, rejected=tuple(marks.rejected))
    return Manifest.from_bytes(following.to_bytes())


# --- Sessions open and close


def test_an_admitted_delta_opens_its_session() -> None:
    head = after(a_head(), entered("a", named(3), 1))
    mark = head.nodes["a"]
    assert mark.sessions == {named(3): SessionMark(seq=1, last=None, position=(10, 1000, 1000))}
    assert (mark.closed_below, mark.version, mark.rounds, mark.time, mark.bytes) == (0, 1, 1.0, 60, 100)
    assert (mark.tokens_per_step, mark.steps, mark.seconds, mark.norm) == (100.0, 10, 5.0, 1.0)
    assert (mark.rejected, mark.reason, head.rejected) == (0, None, ())


def test_a_refusal_of_a_session_that_is_not_open_leaves_nothing() -> None:
    assert after(a_head(), refused("a", named(1), 1)).nodes == {}
    one = after(a_head(), entered("a", named(1), 1))
    two = after(one, refused("a", named(2), 1))
    assert (two.nodes, two.rejected) == (one.nodes, ())


def test_a_refusal_of_an_open_session_advances_its_mark_and_nothing_else() -> None:
    one = after(a_head(), entered("a", named(1), 1))
    two = after(one, refused("a", named(1), 2, reason="x" * 300))
    mark = two.nodes["a"]
    assert mark.sessions[named(1)] == SessionMark(seq=2, last=None, position=(10, 1000, 1000))
    assert (mark.version, mark.rounds, mark.rejected, mark.reason) == (1, 1.0, 1, "x" * 100)
    assert two.rejected == (Rejection(name=DeltaId("a", named(1), 2).name, reason="x" * 100),)


def test_refusals_before_the_delta_that_opens_a_session_are_in_its_mark() -> None:
    head = after(a_head(), refused("a", named(1), 1), refused("a", named(1), 2, "norm"), entered("a", named(1), 3))
    mark = head.nodes["a"]
    assert (mark.sessions[named(1)].seq, mark.rejected, mark.reason, mark.bytes) == (3, 2, "norm", 300)
    assert [one.reason for one in head.rejected] == ["stale", "norm"]


def test_a_session_that_names_the_one_before_closes_it() -> None:
    one = after(a_head(), entered("a", named(1), 1), entered("a", named(1), 2))
    two = after(one, entered("a", named(2), 1, after=(named(1), 2)))
    mark = two.nodes["a"]
    assert (list(mark.sessions), mark.closed_below) == ([named(2)], 2)
    assert two.has_processed(DeltaId("a", named(1), 1))
    assert two.has_processed(DeltaId("a", named(1), 9)), "nothing of it enters any more"
    assert two.has_processed(DeltaId("a", named(1, "ffffffff"), 1))


def test_a_session_stays_open_until_its_last_delta_is_processed() -> None:
    one = after(a_head(), entered("a", named(1), 1))
    two = after(one, entered("a", named(2), 1, after=(named(1), 3)))
    assert two.session("a", named(1)) == SessionMark(seq=1, last=3, position=(10, 1000, 1000))
    three = after(two, entered("a", named(1), 2))
    assert list(three.nodes["a"].sessions) == [named(1), named(2)]
    four = after(three, refused("a", named(1), 3))
    assert (list(four.nodes["a"].sessions), four.nodes["a"].closed_below) == ([named(2)], 2)


def test_a_session_before_that_nothing_opened_is_open_for_what_may_still_come() -> None:
    one = after(a_head(), entered("a", named(2), 1, after=(named(1), 2)))
    assert one.session("a", named(1)) == SessionMark(seq=0, last=2, position=(0, 0, 0))
    assert not one.has_processed(DeltaId("a", named(1), 1))
    two = after(one, entered("a", named(1), 1), entered("a", named(1), 2))
    assert (list(two.nodes["a"].sessions), two.nodes["a"].closed_below) == ([named(2)], 2)


def test_a_session_before_that_sent_nothing_is_not_opened() -> None:
    head = after(a_head(), entered("a", named(2), 1, after=(named(1), 0)))
    assert list(head.nodes["a"].sessions) == [named(2)]


def test_a_session_before_that_is_closed_stays_so() -> None:
    one = after(a_head(), entered("a", named(1), 1), entered("a", named(2), 1, after=(named(1), 1)))
    two = after(one, entered("a", named(3), 1, after=(named(1), 5)))
    assert list(two.nodes["a"].sessions) == [named(2), named(3)]


def test_a_chain_of_sessions_that_comes_backwards_folds() -> None:
    head = after(
        a_head(),
        entered("a", named(3), 1, after=(named(2), 1)),
        entered("a", named(2), 1, after=(named(1), 1)),
        entered("a", named(1), 1),
    )
    mark = head.nodes["a"]
    assert (list(mark.sessions), mark.closed_below) == ([named(3)], 3)


def test_the_first_session_after_protocol_1_closes_the_one_before() -> None:
    old = "20250101T000000Z-0badcafe"
    one = after(a_head(), entered("a", old, 1), entered("a", named(1), 1, after=(old, 1)))
    mark = one.nodes["a"]
    assert (list(mark.sessions), mark.closed_below) == ([named(1)], 1)
    assert one.has_processed(DeltaId("a", old, 2))


def test_of_too_many_open_sessions_the_lowest_are_closed() -> None:
    head = a_head()
    for number in range(1, MOST_OPEN + 4):
        head = after(head, entered("a", named(number), 1))
    mark = head.nodes["a"]
    assert list(mark.sessions) == [named(number) for number in range(4, MOST_OPEN + 4)]
    assert mark.closed_below == 4


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (a_header("a", named(1005), 1), None),
        (a_header("a", named(1006), 1), "number 1006"),
        (a_header("b", named(1001), 1), "number 1001"),
        (a_header("a", named(7), 1, after=(named(7, "ffffffff"), 1)), "no smaller number"),
        (a_header("a", named(7), 1, after=(named(8), 1)), "no smaller number"),
        (a_header("a", named(7), 1, after=("old", 1)), None),
    ],
)
def test_what_cannot_be_the_next_session_of_a_node_opens_none(header: DeltaHeader, reason: str | None) -> None:
    head = after(a_head(), entered("a", named(5), 1))
    obstacle = Marks(head, {}, 0).obstacle(header)
    assert (obstacle is None) == (reason is None)
    assert reason is None or (obstacle is not None and reason in obstacle)


# --- Nodes that are forgotten


def many(count: int, **changes: Any) -> dict[str, NodeMark]:
    session = {named(1): SessionMark(seq=1, last=None, position=(10, 10, 10))}
    mark = MARK.model_copy(update={"sessions": session, **changes})
    return {f"n{number:04}": mark for number in range(count)}


def test_of_very_many_nodes_those_that_were_idle_for_longest_are_forgotten() -> None:
    recent = {f"r{number}": mark for number, mark in enumerate(many(3, version=94, rounds=94.0).values())}
    older = {f"m{number}": mark for number, mark in enumerate(many(3, version=2, rounds=2.0).values())}
    head = a_head(many(MOST_NODES) | recent | older, version=98)
    after_ = after(head, entered("new", named(1), 1, base=98), waiting=("n0000",))
    assert after_.horizon == 99
    assert {"n0000", "new", *recent, *older} <= after_.nodes.keys(), "who waits, who is new, who was there later"
    assert len(after_.nodes) == 750
    assert after(after_, entered("new", named(1), 2)).horizon == 99


def test_nodes_that_take_part_are_never_forgotten() -> None:
    head = a_head(many(MOST_NODES + 50, version=98, rounds=98.0), version=98)
    after_ = after(head, entered("new", named(1), 1, base=98))
    assert (len(after_.nodes), after_.horizon) == (MOST_NODES + 51, 0)


def test_what_a_forgotten_node_sent_long_ago_does_not_enter_again() -> None:
    head = a_head(version=9, horizon=9)
    late = a_header("a", named(1), 1, base=8)
    assert "from before its node was forgotten" in (Marks(head, {}, 0).obstacle(late) or "")
    assert Marks(head, {}, 0).obstacle(a_header("a", named(1), 2, base=9)) is None

    # Nor through a later session, which names the old one.
    one = after(head, entered("a", named(2), 1, base=9, after=(named(1), 3)))
    marks = Marks(one, {}, 0)
    for seq in (1, 2):
        assert "forgotten" in (marks.obstacle(a_header("a", named(1), seq, base=8)) or "")
        marks.settle(refused("a", named(1), seq))
    assert marks.obstacle(a_header("a", named(1), 3, base=9)) is None


# --- How large manifests become


@pytest.mark.parametrize("sessions", [2000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_any_number_of_made_up_sessions_leaves_a_small_manifest(sessions: int) -> None:
    head = a_head()
    for start in range(1, sessions + 1, 1000):
        head = after(head, *(entered("a", named(number), 1) for number in range(start, start + 1000)))
    assert head.nodes["a"].closed_below == sessions + 1 - MOST_OPEN
    assert len(head.to_bytes()) < 3000


@pytest.mark.parametrize("days", [2, pytest.param(75, marks=pytest.mark.slow)])
def test_a_hundred_nodes_that_restart_four_times_a_day_leave_a_small_manifest(days: int) -> None:
    head = a_head()
    for number in range(1, 4 * days + 1):
        before = (named(number - 1), 1) if number > 1 else None
        head = after(head, *(entered(f"node-{node:03}", named(number), 1, after=before) for node in range(100)))
    assert {len(mark.sessions) for mark in head.nodes.values()} == {1}
    assert len(head.to_bytes()) < 40_000


def test_a_manifest_of_a_thousand_nodes_has_less_than_512_kb_whatever_their_sessions() -> None:
    sessions = {
        named(10**7 + number, "abcdef01"): SessionMark(seq=10**6, last=10**6 + 1, position=(10**7, 10**10, 10**12))
        for number in range(MOST_OPEN)
    }
    numbers = {"tokens_per_step": 1234567.0, "seconds": 12345.67, "norm": 1.234567e-05, "rounds": 12345.67}
    counts = {"version": 10**6, "time": 1_800_000_000, "bytes": 10**15, "rejected": 10**5, "reason": "r" * 60}
    mark = MARK.model_copy(update={"sessions": sessions, **numbers, **counts})
    head = a_head({f"node-{number:07}": mark for number in range(1000)}, version=10**6)
    after_ = after(head, refused("node-0000000", named(10**7 + MOST_OPEN - 1, "abcdef01"), 10**6 + 1))
    assert {len(mark.sessions) for mark in after_.nodes.values()} <= {1, 2}
    assert len(after_.nodes) == 1000
    assert len(after_.to_bytes()) < 512_000


def test_the_numbers_in_marks_have_seven_digits() -> None:
    assert [rounded(value) for value in (1 / 3, 123456789.0, 2.0**64, 0.0, 5.0)] == [
        0.3333333,
        123456800.0,
        1.844674e19,
        0.0,
        5.0,
    ]
    mark = after(a_head(), entered("a", named(1), 1), rounds=1 / 3).nodes["a"]
    assert mark.rounds == 0.3333333


# --- What marks tell of a round


def test_nodes_of_the_last_five_rounds_are_recent() -> None:
    marks = {f"at-{rounds}": MARK.model_copy(update={"rounds": rounds}) for rounds in (4.9, 5.0, 5.1, 10.0)}
    assert list(recent_marks(a_head(marks, version=10))) == ["at-5.1", "at-10.0"]
    assert RECENT_ROUNDS == 5


def test_a_node_takes_part_if_it_had_a_turn_in_ten_times_as_many_versions_as_nodes() -> None:
    def taking(*versions: int, head: int = 100) -> int:
        marks = {
            f"n{number}": MARK.model_copy(update={"version": one, "rounds": float(head)})
            for number, one in enumerate(versions)
        }
        return len(taking_part(a_head(marks, version=head)))

    assert taking(91) == 1
    assert taking(90) == 0
    assert taking(100, 81) == 2
    assert taking(100, 80) == 1
    assert taking(*range(1, 101)) == 100, "a hundred that take turns"
    assert taking(100, 99, *[50] * 1000) == 2, "a crowd that came once"
    assert taking(100, 99, *[71] * 1000) == 1002, "as it has just come"


def test_the_usual_norm_grows_with_the_steps_or_with_their_root_whichever_is_more() -> None:
    def of(norm: float, steps: int) -> NodeMark:
        return MARK.model_copy(update={"norm": norm, "steps": steps})

    assert usual_norm([of(2.0, 4)], 16) == 8.0
    assert usual_norm([of(2.0, 4)], 1) == 1.0
    assert usual_norm([of(1.0, 1), of(2.0, 1), of(9.0, 1), of(10.0, 1)], 1) == 2.0, "the lower median"
    assert usual_norm([], 1) is None
    assert usual_norm([of(0.0, 4), MARK.model_copy(update={"norm": None}), of(1.0, 0)], 1) is None
    assert usual_norm([of(0.0, 4), of(3.0, 1)], 1) == 3.0, "a norm of zero tells nothing"


def test_the_most_tokens_are_four_times_the_median() -> None:
    assert most_tokens([1.0, 10.0, 1e9, 20.0]) == 40.0
    assert most_tokens([]) == float("inf")


def test_a_whole_delta_takes_the_median_of_seconds_per_step_times_the_steps() -> None:
    def of(seconds: float, steps: int) -> NodeMark:
        return MARK.model_copy(update={"seconds": seconds, "steps": steps})

    marks = [of(5.0, 10), of(1.0, 1), of(80.0, 40)]  # 0.5, 1 and 2 seconds a step
    assert seconds_of_a_delta(marks, 100) == 100.0
    assert seconds_of_a_delta(marks, None) == 10.0, "the median of the steps is 10"
    assert seconds_of_a_delta([of(7.0, 0)], 100) == 7.0, "of a store of protocol 1"
    assert seconds_of_a_delta([of(7.0, 0)], None) == 7.0
    assert seconds_of_a_delta([], 100) is None
