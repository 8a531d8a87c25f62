"""What nodes cannot do to a round: by garbage, by claims, by diverging, by being more or fewer than expected."""

from __future__ import annotations

import pytest
import torch

from speedtronic.distributed.marks import TURNS
from speedtronic.distributed.master import HINTED_VERSIONS, Master, MasterSettings
from speedtronic.distributed.protocol import DeltaId
from speedtronic.distributed.records import session_name
from speedtronic.distributed.requests import perform
from speedtronic.distributed.stores.memory import MemoryStore
from tests.support.masters import (
    INITIAL,
    Clock,
    Heard,
    Watched,
    head_of,
    history_of,
    names,
    new_master,
    send,
    weights_of,
)

NAN = [float("nan")] * 3


def started(settings: MasterSettings, clock: Clock | None = None, heard: Heard | None = None) -> tuple[Watched, Master]:
    store, master = Watched(), new_master(settings, clock=clock, heard=heard)
    perform(master.poll(), store)
    return store, master


def weight_of(store: Watched | MemoryStore) -> torch.Tensor:
    return weights_of(store, head_of(store))["weight"]


# --- Only admitted deltas count


def test_garbage_makes_no_quorum() -> None:
    store, master = started(MasterSettings(expected_nodes=4, quorum=2))
    send(store.inner, "a", 1, [1.0] * 3)
    for number in range(20):
        send(store.inner, f"junk{number}", 1, NAN)
    for _ in range(5):
        assert perform(master.poll(), store) == 0
    assert head_of(store).version == 0
    assert names(store, "in/") == [DeltaId("a", "s", 1).name]
    assert store.counts()["get", DeltaId("junk7", "s", 1).name] == 2, "its header, and once as a whole"

    send(store.inner, "b", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 2
    assert head_of(store).nodes.keys() == {"a", "b"}


def test_garbage_makes_no_quorum_larger() -> None:
    store, master = started(MasterSettings(quorum=None))
    for node in "ab":
        send(store.inner, node, 1, [1.0] * 3)
    assert perform(master.poll(), store) == 2
    for number in range(20):
        send(store.inner, f"junk{number}", 1, NAN)
    send(store.inner, "a", 2, [1.0] * 3, base_version=1)
    assert perform(master.poll(), store) == 1
    assert head_of(store).fraction == 0.5, "of two nodes"


def test_the_grace_time_of_garbage_is_not_that_of_a_delta() -> None:
    clock = Clock()
    store, master = started(MasterSettings(expected_nodes=4, quorum=2, grace=10.0), clock)
    send(store.inner, "junk", 1, NAN)
    perform(master.poll(), store)
    clock.seconds = 9.0
    send(store.inner, "a", 1, [1.0] * 3)
    perform(master.poll(), store)
    clock.seconds = 10.0
    assert perform(master.poll(), store) == 0
    assert head_of(store).version == 0
    clock.seconds = 19.0
    assert perform(master.poll(), store) == 1


def test_a_refusal_of_an_open_session_is_said_though_there_is_no_quorum() -> None:
    store, master = started(MasterSettings(expected_nodes=2, quorum=2))
    for node in "ab":
        send(store.inner, node, 1, [1.0] * 3)
    assert perform(master.poll(), store) == 2
    refused, waits = (
        send(store.inner, "a", 2, NAN, base_version=1),
        send(store.inner, "b", 2, [1.0] * 3, base_version=1),
    )
    assert perform(master.poll(), store) == 0
    head = head_of(store)
    assert (head.version, head.fraction, head.applied) == (2, 0.0, ())
    assert [one.name for one in head.rejected] == [refused.name]
    assert names(store, "in/") == [waits.name]
    assert perform(master.poll(), store) == 0
    assert head_of(store).version == 2, "once"
    send(store.inner, "a", 3, [1.0] * 3, base_version=2)
    assert perform(master.poll(), store) == 2
    assert head_of(store).fraction == 1.0


def test_what_comes_after_a_delta_that_waits_is_refused_with_it_and_not_before() -> None:
    store, master = started(MasterSettings(expected_nodes=2, quorum=2))
    for node in "ab":
        send(store.inner, node, 1, [1.0] * 3)
    perform(master.poll(), store)
    send(store.inner, "a", 2, [1.0] * 3, base_version=1)
    last = send(store.inner, "a", 3, NAN, base_version=1)
    send(store.inner, "junk", 1, NAN)
    for _ in range(3):
        assert perform(master.poll(), store) == 0
    assert head_of(store).version == 1
    send(store.inner, "b", 2, [1.0] * 3, base_version=1)
    assert perform(master.poll(), store) == 2
    assert [one.name for one in head_of(store).rejected] == [last.name]


# --- Norms


def rounds_of(norms: list[float], settings: MasterSettings | None = None) -> tuple[Watched, Heard]:
    """One node whose deltas have these norms."""
    heard = Heard()
    store, master = started(settings or MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1), heard=heard)
    for seq, norm in enumerate(norms, start=1):
        send(store.inner, "a", seq, [norm, 0.0, 0.0], base_version=head_of(store).version)
        perform(master.poll(), store)
    return store, heard


def test_a_norm_of_up_to_three_times_the_usual_counts_in_full() -> None:
    store, heard = rounds_of([1.0, 3.0])
    assert weight_of(store)[0].item() == INITIAL["weight"][0].item() - 4.0
    assert head_of(store).nodes["a"].norm == 3.0
    assert "norm" not in heard.words


def test_a_larger_norm_counts_as_three_times_the_usual() -> None:
    store, heard = rounds_of([1.0, 99.0, 100.0])
    assert weight_of(store)[0].item() == pytest.approx(INITIAL["weight"][0].item() - 1.0 - 3.0 - 9.0)
    assert head_of(store).nodes["a"].norm == 9.0, "as it was added up"
    assert heard.words.count("norm of 99, more than 3 times the usual 1: it counts as 3 times") == 1
    assert heard.words.count("norm of") == 1, "once a node"


def test_a_norm_of_more_than_a_hundred_times_the_usual_is_refused() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=2, quorum=1))
    for node in "ab":
        send(store.inner, node, 1, [1.0, 0.0, 0.0])
    assert perform(master.poll(), store) == 2
    before = weight_of(store)
    send(store.inner, "a", 2, [101.0, 0.0, 0.0], base_version=1)
    assert perform(master.poll(), store) == 0
    head = head_of(store)
    assert head.rejected[0].reason == "its norm is 101, more than 100 times the usual 1"
    assert (head.nodes["a"].norm, head.nodes["a"].seconds) == (1.0, 5.0), "of its last admitted delta"
    assert torch.equal(weight_of(store), before)


def test_where_most_nodes_are_beyond_the_usual_the_usual_has_changed() -> None:
    settings = MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=4, quorum=1)
    store, master = started(settings)
    for node in "abcd":
        send(store.inner, node, 1, [1e-3, 0.0, 0.0])
    perform(master.poll(), store)
    entered = []
    for seq in range(1, 10):
        for node in "abcd":
            send(store.inner, node, seq, [1.0, 0.0, 0.0], session=session_name(1, "0000000b"), base_version=seq)
        entered.append(perform(master.poll(), store))
    assert entered == [2] + [4] * 8
    assert head_of(store).nodes["a"].norm == 1.0


def test_a_node_that_diverges_moves_the_others_by_three_of_their_steps() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=4, quorum=4))
    for node in "abcd":
        send(store.inner, node, 1, [1.0, 0.0, 0.0])
    perform(master.poll(), store)
    before = weight_of(store)[0].item()
    for node, norm in zip("abcd", [1.0, 1.0, 1.0, 50.0], strict=True):
        send(store.inner, node, 2, [norm, 0.0, 0.0], base_version=1)
    assert perform(master.poll(), store) == 4
    assert weight_of(store)[0].item() == pytest.approx(before - (1 + 1 + 1 + 3) / 4)


def test_a_delta_of_more_steps_may_be_as_much_larger() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1))
    send(store.inner, "a", 1, [1.0, 0.0, 0.0], steps=10, tokens=1000)
    perform(master.poll(), store)
    send(store.inner, "a", 2, [12.0, 0.0, 0.0], steps=40, tokens=4000, base_version=1)
    perform(master.poll(), store)
    assert head_of(store).nodes["a"].norm == 12.0
    send(store.inner, "a", 3, [12.0, 0.0, 0.0], steps=10, tokens=1000, base_version=2)
    perform(master.poll(), store)
    assert head_of(store).nodes["a"].norm == pytest.approx(12.0), "at most half of the steps' ratio: by the root"


def test_buffers_are_not_scaled_with_a_norm() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1))
    send(store.inner, "a", 1, [1.0, 0.0, 0.0])
    perform(master.poll(), store)
    buffers = {"running": torch.tensor([50.0, 10.0]), "count": torch.tensor(1)}
    send(store.inner, "a", 2, [30.0, 0.0, 0.0], base_version=1, buffers=buffers)
    perform(master.poll(), store)
    assert torch.equal(weights_of(store, head_of(store))["running"], buffers["running"])


# --- Claims of tokens


def test_in_the_first_round_no_claim_carries_it() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=3, quorum=3))
    for node, tokens in (("a", 1000), ("b", 1000), ("c", 10**15)):
        send(store.inner, node, 1, [float(node == "c"), 0.0, 0.0], tokens=tokens)
    assert perform(master.poll(), store) == 3
    moved = INITIAL["weight"][0].item() - weight_of(store)[0].item()
    assert moved == pytest.approx(4 / 6), "it counts as four of the others"
    assert head_of(store).nodes["c"].tokens_per_step == 400.0


def test_later_a_claim_is_compared_with_the_last_rounds() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=2, quorum=2))
    for node in "ab":
        send(store.inner, node, 1, [0.0] * 3, tokens=1000)
    perform(master.poll(), store)
    store.requests.clear()
    for node, tokens in (("a", 1000), ("b", 10**15)):
        send(store.inner, node, 2, [float(node == "b"), 0.0, 0.0], tokens=tokens, base_version=1)
    perform(master.poll(), store)
    assert INITIAL["weight"][0].item() - weight_of(store)[0].item() == pytest.approx(4 / 5)
    assert store.counts()["get", DeltaId("b", "s", 2).name] == 1


def test_a_single_node_is_compared_with_nobody() -> None:
    store, master = started(MasterSettings(expected_nodes=1))
    delta = send(store.inner, "a", 1, [0.0] * 3, tokens=10**9)
    perform(master.poll(), store)
    assert head_of(store).nodes["a"].tokens_per_step == 10**8
    assert store.counts()["get", delta.name] == 1


# --- How many nodes take part


def fractions_of(nodes: str, versions: int, settings: MasterSettings) -> tuple[list[float], Heard]:
    heard, clock = Heard(), Clock()
    store, master = started(settings, clock, heard)
    for seq in range(1, versions + 1):
        for node in nodes:
            send(store.inner, node, seq, [1.0] * 3, base_version=seq - 1)
        perform(master.poll(), store)
        clock.seconds += 1000.0
        perform(master.poll(), store)
        assert head_of(store).version == seq
    return [version.fraction for version in history_of(store)[1:]], heard


def test_fewer_nodes_than_expected_make_whole_rounds_after_five_versions() -> None:
    fractions, heard = fractions_of("ab", 12, MasterSettings(expected_nodes=8))
    assert fractions == [0.25] * HINTED_VERSIONS + [1.0] * 7
    assert heard.words.count("distributed.expected_nodes is 8, and 2 nodes take part; these count") == 1


def test_more_nodes_than_expected_are_all_needed_for_a_whole_round() -> None:
    store, master = started(MasterSettings(expected_nodes=1))
    for seq in range(1, 6):
        for node in "abcd":
            send(store.inner, node, seq, [1.0] * 3, base_version=seq - 1)
        perform(master.poll(), store)
    send(store.inner, "a", 6, [1.0] * 3, base_version=5)
    assert perform(master.poll(), store) == 0, "half of four are a quorum now"
    send(store.inner, "b", 6, [1.0] * 3, base_version=5)
    assert perform(master.poll(), store) == 2
    assert head_of(store).fraction == 0.5


def test_nodes_that_came_once_are_soon_no_longer_expected() -> None:
    """Two stay of thirty: with fractions of a thirtieth, five rounds would be 75 versions."""
    store, master = started(MasterSettings(quorum=1))
    for number in range(30):
        send(store.inner, f"n{number:02}", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 30
    for seq in range(2, 35):
        for node in ("n00", "n01"):
            send(store.inner, node, seq, [1.0] * 3, base_version=seq - 1)
        assert perform(master.poll(), store) == 2
    fractions = [version.fraction for version in history_of(store)[1:]]
    crowd = 3 * TURNS  # versions, after which there was a turn of a third node
    assert fractions == [1.0] + [2 / 30] * crowd + [1.0] * (33 - crowd)


def test_as_many_nodes_as_expected_are_no_reason_for_a_warning() -> None:
    _, heard = fractions_of("ab", 12, MasterSettings(expected_nodes=2))
    assert "expected_nodes" not in heard.words


def test_a_quorum_of_more_nodes_than_take_part_becomes_theirs_after_five_versions() -> None:
    clock = Clock()
    store, master = started(MasterSettings(expected_nodes=8, quorum=4, grace=100.0), clock)
    for seq in range(1, 6):
        for node in "ab":
            send(store.inner, node, seq, [1.0] * 3, base_version=seq - 1)
        assert perform(master.poll(), store) == 0
        clock.seconds += 100.0
        assert perform(master.poll(), store) == 2
    for node in "ab":
        send(store.inner, node, 6, [1.0] * 3, base_version=5)
    assert perform(master.poll(), store) == 2


def test_synchronous_rounds_wait_for_all_for_ever() -> None:
    store, master = started(MasterSettings(expected_nodes=2, quorum=2))
    for seq in range(1, 8):
        for node in "ab":
            send(store.inner, node, seq, [1.0] * 3, base_version=seq - 1)
        assert perform(master.poll(), store) == 2
    send(store.inner, "a", 8, [1.0] * 3, base_version=7)
    assert perform(master.poll(), store) == 0


# --- Grace


def test_the_grace_time_is_the_median_of_what_a_whole_delta_takes() -> None:
    clock = Clock()
    store, master = started(MasterSettings(expected_nodes=3, inner_steps=100), clock)
    for node, seconds in (("a", 1.0), ("b", 3.0), ("c", 50.0)):
        send(store.inner, node, 1, [1.0] * 3, steps=10, seconds=seconds)
    assert perform(master.poll(), store) == 3
    send(store.inner, "a", 2, [1.0] * 3, steps=1, tokens=100, seconds=0.1, base_version=1)
    assert perform(master.poll(), store) == 0
    clock.seconds = 29.9
    assert perform(master.poll(), store) == 0
    clock.seconds = 30.0
    assert perform(master.poll(), store) == 1, "3 s for 10 steps are 30 s for 100"


# --- Garbage in numbers


def test_hundreds_of_made_up_sessions_with_garbage_leave_nothing_behind() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1))
    for number in range(300):
        send(store.inner, f"n{number % 7}", 1, NAN, session=session_name(number + 1, "00000bad"))
    good = send(store.inner, "a", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert (head.applied, head.rejected, list(head.nodes)) == ((good.name,), (), ["a"])
    assert names(store, "in/") == []


def test_nodes_of_deltas_beyond_what_a_version_takes_count_for_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtronic.distributed.master._MOST_IN_A_VERSION", 3)
    store, master = started(MasterSettings(expected_nodes=4, quorum=3))
    for seq in (1, 2, 3):
        for node in "ab":
            send(store.inner, node, seq, [1.0] * 3)
    send(store.inner, "c", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 3
