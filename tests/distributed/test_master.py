import itertools
import random
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from speedtronic.distributed import master as master_module
from speedtronic.distributed.delta import LARGEST
from speedtronic.distributed.master import DOUBTFUL_LOOKS, MasterSettings, publish_tensors
from speedtronic.distributed.protocol import (
    DeltaId,
    Manifest,
    copy_name,
    create_identity,
    create_manifest,
    head_name,
    momentum_name,
    read_identity,
    weights_name,
)
from speedtronic.distributed.records import SessionMark
from speedtronic.distributed.requests import Put, answer, perform
from speedtronic.distributed.schema import Schema
from speedtronic.distributed.stores.base import Entry, Listing
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreRefusedError, StoreUnavailableError
from tests.support.masters import (
    INITIAL,
    Clock,
    Fault,
    Heard,
    Killed,
    Watched,
    head_of,
    history_of,
    names,
    new_master,
    packed_delta,
    send,
    steps,
    weights_of,
)

AVERAGING = MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1)


def weight_of(store: MemoryStore | Watched) -> Tensor:
    return weights_of(store, head_of(store))["weight"]


def two_of_two(**more: Any) -> MasterSettings:
    return MasterSettings(expected_nodes=2, quorum=2, **more)


# --- The beginning


def test_the_first_master_publishes_the_initial_weights_as_version_0() -> None:
    store = MemoryStore()
    master = new_master()
    assert perform(master.poll(), store) == 0
    head = head_of(store)
    assert (head.version, head.rounds, head.momentum, head.nodes) == (0, 0.0, None, {})
    for name, value in weights_of(store, head).items():
        torch.testing.assert_close(value, INITIAL[name], rtol=0, atol=0)


def test_a_master_that_comes_later_takes_over_what_is_there() -> None:
    store = MemoryStore()
    perform(new_master().poll(), store)
    later = new_master(initial={name: value + 1 for name, value in INITIAL.items()})
    perform(later.poll(), store)
    assert len(history_of(store)) == 1
    assert torch.equal(later.weights["weight"], INITIAL["weight"])


def test_a_master_logs_the_version_from_which_it_continues() -> None:
    store, heard = MemoryStore(), Heard()
    first = new_master(AVERAGING)
    perform(first.poll(), store)
    send(store, "a", 1, [0.0] * 3)
    perform(first.poll(), store)
    perform(new_master(AVERAGING, heard=heard).poll(), store)
    assert heard.words == "continues from version 1 of the store"


def test_a_manifest_too_large_to_read_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr("speedtronic.distributed.protocol.MANIFEST_LIMIT", 100)
    with pytest.raises(StoreContentError, match="too large"):
        perform(new_master().poll(), store)
    assert names(store, "head/") == []


def test_another_model_is_refused_with_the_remedy() -> None:
    store = MemoryStore()
    perform(new_master().poll(), store)
    other = Schema.of(torch.nn.Linear(2, 2))
    stranger = new_master(schema=other, initial={"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    with pytest.raises(StoreContentError, match=r"another model.*distributed\.repo_id"):
        perform(stranger.poll(), store)
    assert names(store) == [head_name(0), head_of(store).weights.path]


@pytest.mark.parametrize("part", ["weights", "momentum"])
def test_objects_with_other_dtypes_or_shapes_are_named(part: str) -> None:
    store = MemoryStore()
    perform(new_master(AVERAGING).poll(), store)
    send(store, "a", 1, [1.0] * 3)
    perform(new_master(AVERAGING).poll(), store)
    head = head_of(store)
    blob = perform(publish_tensors(weights_name(2, "x"), {"weight": torch.zeros(5)}, head.store), store)
    following = {"version": 2, "parent": head.sha256, "nonce": "x", part: blob}
    assert perform(create_manifest(head.model_copy(update=following), head), store)
    with pytest.raises(StoreContentError, match=blob.path):
        perform(new_master(AVERAGING).poll(), store)


def test_missing_weights_are_named_with_the_remedy() -> None:
    store = MemoryStore()
    perform(new_master().poll(), store)
    store.delete(head_of(store).weights.path)
    with pytest.raises(StoreContentError, match="version 0 .* missing or damaged"):
        perform(new_master().poll(), store)


# --- The update


def test_synchronous_rounds_are_plain_diloco_bit_for_bit() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=4, quorum=4))
    perform(master.poll(), store)
    generator = torch.Generator().manual_seed(0)
    reference = INITIAL["weight"].clone().requires_grad_()
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(1, 6):
        deltas = [torch.rand(3, generator=generator) + 0.5 for _ in range(4)]
        for node, delta in zip("abcd", deltas, strict=True):
            send(store, node, round_, delta.tolist(), base_version=round_ - 1)
        reference.grad = (deltas[0] + deltas[1] + deltas[2] + deltas[3]) / 4
        optimizer.step()
        assert perform(master.poll(), store) == 4
        head = head_of(store)
        assert (head.version, head.fraction, head.rounds) == (round_, 1.0, float(round_))
        assert torch.equal(weight_of(store), reference.detach())


def test_deltas_are_added_in_sorted_order_whatever_the_order_in_which_they_came() -> None:
    values = {"a": [1e8, 0.0, 0.1], "b": [1.0, 0.3, 0.2], "c": [-1e8, 0.7, 0.3]}
    results: list[Tensor] = []
    for order in itertools.permutations(values):
        store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=3, quorum=3))
        perform(master.poll(), store)
        for node in order:
            send(store, node, 1, values[node])
        perform(master.poll(), store)
        results.append(weight_of(store))
    assert all(torch.equal(result, results[0]) for result in results)


def test_late_and_uneven_deltas_weigh_as_the_formula_says() -> None:
    store, master = (
        MemoryStore(),
        new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.5, expected_nodes=3, quorum=2)),
    )
    perform(master.poll(), store)
    send(store, "a", 1, [0.3, 0.0, 0.0], tokens=1000, steps=10)
    send(store, "b", 1, [0.0, 0.6, 0.0], tokens=4000, steps=20)
    perform(master.poll(), store)
    send(store, "c", 1, [0.0, 0.0, 0.9], base_version=0, tokens=500, steps=10)
    send(store, "a", 2, [0.2, 0.2, 0.2], base_version=1, tokens=1000, steps=10)
    perform(master.poll(), store)

    theta, m, rounds = [1.0, 2.0, 3.0], [0.0] * 3, 0.0

    def outer_round(weighted: list[tuple[float, list[float]]], medians: float) -> None:
        nonlocal rounds
        total = sum(w for w, _ in weighted)
        mean = [sum(w * d[i] for w, d in weighted) / total for i in range(3)]
        f = min(1.0, total / (3 * medians))
        for i in range(3):
            m[i] = 0.5**f * m[i] + f * mean[i]
            theta[i] -= f * mean[i] + 0.5 * (1 - 0.5**f) / (1 - 0.5) * m[i]
        rounds += f

    outer_round([(100.0, [0.3, 0.0, 0.0]), (200.0, [0.0, 0.6, 0.0])], medians=150.0)
    age = rounds
    outer_round([(100.0, [0.2] * 3), (50.0 * (1 + age) ** -0.5, [0.0, 0.0, 0.9])], medians=100.0)

    assert head_of(store).rounds == pytest.approx(rounds, rel=1e-12)
    torch.testing.assert_close(weight_of(store), torch.tensor(theta), rtol=1e-6, atol=0)


def test_a_node_of_twice_the_steps_weighs_no_more() -> None:
    store, master = (
        MemoryStore(),
        new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=2, quorum=2)),
    )
    perform(master.poll(), store)
    send(store, "a", 1, [2.0, 0.0, 0.0], steps=10, tokens=1000)
    send(store, "b", 1, [0.0, 2.0, 0.0], steps=20, tokens=2000)
    perform(master.poll(), store)
    assert torch.equal(weight_of(store), torch.tensor([0.0, 1.0, 3.0]))
    assert head_of(store).fraction == 1.0


def test_a_part_of_a_round_moves_its_part() -> None:
    store, master = (
        MemoryStore(),
        new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=4, quorum=1)),
    )
    perform(master.poll(), store)
    send(store, "a", 1, [4.0, 0.0, 0.0])
    perform(master.poll(), store)
    assert head_of(store).fraction == 0.25
    assert torch.equal(weight_of(store), torch.tensor([0.0, 2.0, 3.0]))


def test_deltas_of_one_node_in_one_round_count_as_one_larger_delta() -> None:
    settings = MasterSettings(outer_lr=1.0, outer_momentum=0.5, expected_nodes=2, quorum=2)
    one_by_one, at_once = MemoryStore(), MemoryStore()
    for store, parts in ((one_by_one, [1.0, 2.0, 3.0]), (at_once, [6.0])):
        master = new_master(settings)
        perform(master.poll(), store)
        for seq, part in enumerate(parts, start=1):
            send(store, "a", seq, [part, 0.0, 0.0])
        send(store, "b", 1, [0.0, 2.0, 0.0])
        assert perform(master.poll(), store) == len(parts) + 1
        assert head_of(store).fraction == 1.0
    assert torch.equal(weight_of(one_by_one), weight_of(at_once))
    assert torch.equal(weight_of(at_once), torch.tensor([1.0 - 4.5, 2.0 - 1.5, 3.0])), (
        "Δ̄ = (3, 1, 0), with its Nesterov"
    )


def test_one_round_is_at_most_whole() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    for node in ("a", "b", "c", "d"):
        send(store, node, 1, [2.0, 0.0, 0.0])
    assert perform(master.poll(), store) == 4
    assert head_of(store).fraction == 1.0
    assert torch.equal(weight_of(store), torch.tensor([-1.0, 2.0, 3.0]))


def test_float_buffers_are_averaged_and_integer_buffers_are_taken_from_the_newest() -> None:
    store, master = (
        MemoryStore(),
        new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=4, quorum=2)),
    )
    perform(master.poll(), store)
    send(store, "a", 1, [0.0] * 3, buffers={"running": torch.tensor([4.0, 10.0]), "count": torch.tensor(5)})
    send(store, "b", 1, [0.0] * 3, buffers={"running": torch.tensor([8.0, 10.0]), "count": torch.tensor(9)})
    perform(master.poll(), store)
    weights = weights_of(store, head_of(store))
    assert torch.equal(weights["running"], torch.tensor([3.0, 10.0])), "0.5·0 + 0.5·mean(4, 8)"
    assert weights["count"].item() == 9

    send(store, "a", 2, [0.0] * 3, base_version=1, buffers={"running": weights["running"], "count": torch.tensor(6)})
    send(store, "c", 1, [0.0] * 3, base_version=0, buffers={"running": weights["running"], "count": torch.tensor(1)})
    perform(master.poll(), store)
    assert weights_of(store, head_of(store))["count"].item() == 6, "of the newest base, not the last name"


def test_infinite_values_of_a_mask_stay_what_they_are() -> None:
    mask = torch.tensor([float("-inf"), 1 / 3])
    initial = INITIAL | {"running": mask}
    store, master = MemoryStore(), new_master(AVERAGING, initial=initial)
    perform(master.poll(), store)
    buffers = {"running": mask, "count": torch.tensor(0)}
    send(store, "a", 1, [0.0] * 3, buffers=buffers)
    assert perform(master.poll(), store) == 1
    assert torch.equal(weights_of(store, head_of(store))["running"], mask)


def test_frozen_parameters_stay() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    send(store, "a", 1, [1.0] * 3)
    perform(master.poll(), store)
    assert torch.equal(weights_of(store, head_of(store))["frozen"], INITIAL["frozen"])


def test_bf16_deltas_are_decoded() -> None:
    store, master = (
        MemoryStore(),
        new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1, codec="bf16")),
    )
    perform(master.poll(), store)
    send(store, "a", 1, [0.1, 0.0, 0.0], codec="bf16")
    assert perform(master.poll(), store) == 1
    assert weight_of(store)[0].item() == 1.0 - torch.tensor(0.1).to(torch.bfloat16).float().item()


@pytest.mark.parametrize(
    ("settings", "lr", "momentum"),
    [
        (MasterSettings(), 1.0, 0.5),
        (MasterSettings(expected_nodes=4), 1.0, 0.5),
        (MasterSettings(expected_nodes=4, quorum=3), 1.0, 0.5),
        (MasterSettings(expected_nodes=4, quorum=4), 0.7, 0.9),
        (MasterSettings(expected_nodes=4, quorum=4, outer_lr=0.3, outer_momentum=0.1), 0.3, 0.1),
    ],
)
def test_learning_rate_and_momentum_follow_the_mode_unless_given(
    settings: MasterSettings, lr: float, momentum: float
) -> None:
    assert (settings.lr, settings.momentum) == (lr, momentum)


# --- When a round starts


def test_half_of_the_expected_nodes_are_a_quorum() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=5))
    perform(master.poll(), store)
    for node in "ab":
        send(store, node, 1, [0.0] * 3)
    assert perform(master.poll(), store) == 0
    send(store, "a", 2, [0.0] * 3)
    assert perform(master.poll(), store) == 0, "it is nodes that count, not deltas"
    send(store, "c", 1, [0.0] * 3)
    assert perform(master.poll(), store) == 4


def test_without_quorum_a_round_starts_after_as_long_as_the_fastest_node_takes() -> None:
    clock = Clock()
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=4, poll_interval=60.0), clock=clock)
    perform(master.poll(), store)
    send(store, "a", 1, [0.0] * 3, seconds=20.0)
    assert perform(master.poll(), store) == 0
    clock.seconds = 59.9
    assert perform(master.poll(), store) == 0, "no speed is known: the poll interval"
    clock.seconds = 60.0
    assert perform(master.poll(), store) == 1

    send(store, "b", 1, [0.0] * 3, seconds=5.0, base_version=1)
    clock.seconds = 100.0
    assert perform(master.poll(), store) == 0, "its time begins when it is seen"
    clock.seconds = 119.9
    assert perform(master.poll(), store) == 0
    clock.seconds = 120.0
    assert perform(master.poll(), store) == 1


def test_a_given_grace_time_holds_in_every_mode() -> None:
    clock = Clock()
    store, master = MemoryStore(), new_master(two_of_two(grace=3.0), clock=clock)
    perform(master.poll(), store)
    send(store, "a", 1, [0.0] * 3)
    assert perform(master.poll(), store) == 0
    clock.seconds = 3.0
    assert perform(master.poll(), store) == 1


def test_a_synchronous_round_waits_for_all() -> None:
    clock, heard = Clock(), Heard()
    store, master = MemoryStore(), new_master(two_of_two(), clock=clock, heard=heard)
    perform(master.poll(), store)
    send(store, "a", 1, [0.0] * 3)
    for seconds in (0.0, 1e3, 1e6):
        clock.seconds = seconds
        assert perform(master.poll(), store) == 0
    assert heard.words.count("version 1 waits for deltas of 2 nodes and has those of a;") == 1
    send(store, "b", 1, [0.0] * 3)
    assert perform(master.poll(), store) == 2


def test_without_a_number_the_nodes_of_the_last_five_rounds_are_expected() -> None:
    store, clock = MemoryStore(), Clock()
    master = new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.0, quorum=1), clock=clock)
    perform(master.poll(), store)
    for node in "abcd":
        send(store, node, 1, [0.0] * 3)
    perform(master.poll(), store)
    fractions: list[float] = []
    for seq in range(2, 24):
        send(store, "a", seq, [0.0] * 3, base_version=seq - 1)
        perform(master.poll(), store)
        fractions.append(head_of(store).fraction)
    assert fractions[:20] == [0.25] * 20, "five rounds, each in four parts"
    assert fractions[20:] == [1.0] * 2


def test_a_node_whose_deltas_are_all_refused_is_not_expected() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(quorum=1))
    perform(master.poll(), store)
    send(store, "a", 1, [0.0] * 3)
    send(store, "junk", 1, [float("nan")] * 3)
    assert perform(master.poll(), store) == 1
    assert head_of(store).fraction == 1.0


# --- What is refused


def test_a_stale_delta_of_an_open_session_is_refused_and_advances_the_mark() -> None:
    store, heard = MemoryStore(), Heard()
    master = new_master(MasterSettings(expected_nodes=1, max_staleness=1.5), heard=heard)
    perform(master.poll(), store)
    send(store, "b", 1, [0.0] * 3)
    for seq in (1, 2):
        send(store, "a", seq, [0.0] * 3, base_version=seq - 1)
        perform(master.poll(), store)
    late = send(store, "b", 2, [1.0] * 3, base_version=0, step=77)
    in_time = send(store, "c", 1, [1.0] * 3, base_version=1)
    assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert head.applied == (in_time.name,)
    assert [(one.name, one.reason.split(":")[0]) for one in head.rejected] == [(late.name, "stale")]
    node, session = head.nodes["b"], head.session("b", "s")
    assert session is not None
    assert (session.seq, session.position, node.rejected) == (2, (77, 2000, 2000), 1)
    assert node.reason == head.rejected[0].reason
    assert (node.version, node.rounds) == (1, 1.0), "nothing of it entered since"
    assert late.name not in names(store)
    assert late.name in heard.words


def test_a_refused_delta_of_an_open_session_moves_no_weights_and_is_remembered() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    send(store, "a", 1, [1.0, 0.0, 0.0])
    perform(master.poll(), store)
    before = head_of(store)
    send(store, "a", 2, [float("inf"), 0.0, 0.0])
    assert perform(master.poll(), store) == 0
    head = head_of(store)
    assert (head.version, head.fraction, head.rounds) == (2, 0.0, 1.0)
    assert head.weights == before.weights, "nothing is uploaded for it"
    assert names(store, "in/") == []
    for seq in range(3, 40):
        send(store, "a", seq, [float("inf"), 0.0, 0.0])
        perform(master.poll(), store)
    assert torch.equal(weight_of(store), INITIAL["weight"] - torch.tensor([1.0, 0.0, 0.0])), (
        "what the head names is never pruned, however old"
    )
    send(store, "a", 40, [1.0, 0.0, 0.0])
    assert perform(new_master(AVERAGING).poll(), store) == 1


@pytest.mark.parametrize(
    ("values", "header", "left"),
    [
        ([float("nan")] * 3, {}, False),
        ([1.0] * 3, {"base_version": 9}, True),
        ([1.0] * 3, {"base_version": 2**62}, True),
        ([1.0] * 3, {"protocol": 3}, True),
        ([1.0] * 3, {"predecessor": ("t", 1)}, True),
    ],
)
def test_a_refusal_of_a_session_that_nothing_opened_leaves_nothing_in_the_manifest(
    values: list[float], header: dict[str, Any], left: bool
) -> None:
    store, heard = Watched(), Heard()
    master = new_master(heard=heard)
    perform(master.poll(), store)
    delta = send(store.inner, "a", 1, values, **header)
    for _ in range(5):
        assert perform(master.poll(), store) == 0
    assert head_of(store).version == 0
    assert store.counts()["get", delta.name] == 1, "it is not read again"
    assert heard.words.count(f"refused {delta.name}: ") == 1
    assert (delta.name in names(store)) == left, "what nobody can ever admit is deleted"


def test_a_later_delta_opens_the_session_with_the_refusals_in_its_mark() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    first = send(store, "a", 1, [float("nan")] * 3)
    perform(master.poll(), store)
    second = send(store, "a", 2, [1.0] * 3, base_version=9)
    third = send(store, "a", 3, [1.0] * 3)
    assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert (head.applied, [one.name for one in head.rejected]) == ((third.name,), [first.name, second.name])
    session = head.session("a", "s")
    assert (session and session.seq, head.nodes["a"].rejected) == (3, 2)
    assert names(store, "in/") == []


def test_a_base_that_is_not_known_yet_is_looked_at_again_when_it_is() -> None:
    store, master = Watched(), new_master(AVERAGING)
    perform(master.poll(), store)
    early = send(store.inner, "b", 1, [1.0] * 3, base_version=1)
    for _ in range(3):
        assert perform(master.poll(), store) == 0
    send(store.inner, "a", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 1
    assert perform(master.poll(), store) == 1
    assert head_of(store).applied == (early.name,)
    assert store.counts()["get", early.name] == 2


def test_a_delta_that_is_too_large_is_refused_without_a_download() -> None:
    store, heard = Watched(), Heard()
    master = new_master(heard=heard)
    perform(master.poll(), store)
    name = DeltaId("a", "s", 1).name
    store.inner.put_if_absent(name, bytes(10**6))
    assert perform(master.poll(), store) == 0
    assert ("get", name) not in store.requests
    assert "1000000 bytes" in heard.words
    assert names(store, "in/") == []


@pytest.mark.parametrize("junk", [b"pickled", bytes(10**6), None])
def test_a_delta_beside_what_another_put_in_its_place_enters(junk: bytes | None) -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    delta = DeltaId("a", "s", 1)
    forged = packed_delta(DeltaId("eve", "s", 1), {"weight": torch.zeros(3)})
    store.put_if_absent(delta.name, forged if junk is None else junk)
    store.put_if_absent(copy_name(delta.name, 1), packed_delta(delta, {"weight": torch.ones(3)}))
    assert perform(master.poll(), store) == 1
    assert torch.equal(weight_of(store), INITIAL["weight"] - 1)
    assert names(store, "in/") == []


def test_a_copy_as_protocol_1_named_it_is_read_if_it_is_listed() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    delta = DeltaId("a", "20250101T000000Z-0badcafe", 1)
    data = packed_delta(delta, {"weight": torch.ones(3)}, protocol=1)
    store.put_if_absent(delta.name, data[:-5])
    store.put_if_absent(delta.name.replace(".safetensors", "-1.safetensors"), data)
    assert perform(master.poll(), store) == 1
    assert names(store, "in/") == []


def test_deltas_of_another_codec_are_refused_and_left_for_a_master_that_has_it() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(outer_lr=1.0, codec="bf16", expected_nodes=1))
    perform(master.poll(), store)
    delta = send(store, "a", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 0
    assert names(store, "in/") == [delta.name]
    assert perform(new_master(AVERAGING).poll(), store) == 1


def test_finite_values_with_an_infinite_sum_are_refused() -> None:
    store, master = MemoryStore(), new_master(two_of_two())
    perform(master.poll(), store)
    send(store, "a", 1, [3e38] * 3)
    send(store, "b", 1, [3e38] * 3)
    assert perform(master.poll(), store) == 0
    assert (head_of(store).version, names(store, "in/")) == (0, [])
    assert torch.equal(weight_of(store), INITIAL["weight"])


def test_no_header_makes_a_sum_of_admitted_values_overflow_float32() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=3, quorum=3))
    perform(master.poll(), store)
    send(store, "a", 1, [LARGEST] * 3, tokens=1, steps=2**62)
    for node in "bc":
        send(store, node, 1, [LARGEST] * 3, tokens=2**62, steps=1)
    assert perform(master.poll(), store) == 3
    assert weight_of(store).isfinite().all()
    assert master.outer.tensors()["momentum.weight"].isfinite().all()


def test_a_value_where_the_global_mask_has_none_is_refused() -> None:
    initial = {**INITIAL, "running": torch.tensor([-torch.inf, 10.0])}
    store, heard = MemoryStore(), Heard()
    master = new_master(MasterSettings(expected_nodes=2, quorum=1), initial=initial, heard=heard)
    perform(master.poll(), store)
    buffers = {"running": torch.tensor([0.0, 10.0]), "count": torch.tensor(1)}
    send(store, "a", 1, [1.0] * 3, buffers=buffers)
    send(store, "b", 1, [1.0] * 3, buffers={**buffers, "running": initial["running"].clone()})
    assert perform(master.poll(), store) == 1
    assert f"refused {DeltaId('a', 's', 1).name}: running has values" in heard.words
    assert torch.equal(weights_of(store, head_of(store))["running"], torch.tensor([-torch.inf, 10.0]))


def test_a_version_takes_at_most_as_many_deltas_as_a_manifest_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_module, "_MOST_IN_A_VERSION", 3)
    store, master = MemoryStore(), new_master(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1))
    perform(master.poll(), store)
    sent = [send(store, "a", seq, [1.0] * 3).name for seq in range(1, 6)]
    assert [perform(master.poll(), store) for _ in range(3)] == [3, 2, 0]
    assert [manifest.applied for manifest in history_of(store)] == [(), tuple(sent[:3]), tuple(sent[3:])]


def test_objects_that_are_not_deltas_are_left_alone() -> None:
    store, master = MemoryStore(), new_master()
    perform(master.poll(), store)
    store.put_if_absent("in/readme.txt", b"hello")
    assert perform(master.poll(), store) == 0
    assert names(store, "in/") == ["in/readme.txt"]
    assert head_of(store).version == 0


# --- Torn and missing


def test_a_torn_delta_waits_for_its_copy() -> None:
    store, master = Watched(), new_master(AVERAGING)
    perform(master.poll(), store)
    delta = DeltaId("a", "s", 1)
    data = packed_delta(delta, {"weight": torch.ones(3)})
    store.inner.put_if_absent(delta.name, data[:-5])
    for _ in range(DOUBTFUL_LOOKS - 1):
        assert perform(master.poll(), store) == 0
    assert store.counts()["get", delta.name] == 1, "it is not downloaded again while nothing is new"
    store.inner.put_if_absent(copy_name(delta.name, 1), data)
    assert perform(master.poll(), store) == 1
    assert torch.equal(weight_of(store), INITIAL["weight"] - 1)
    assert names(store, "in/") == [], "both copies are gone"


@pytest.mark.parametrize("part", [0, 7, 100, -1])
def test_a_torn_delta_is_given_up_after_ten_looks(part: int) -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    send(store, "a", 1, [1.0] * 3)
    perform(master.poll(), store)
    delta = DeltaId("a", "s", 2)
    store.put_if_absent(delta.name, packed_delta(delta, {"weight": torch.ones(3)})[:part])
    for _ in range(DOUBTFUL_LOOKS):
        assert head_of(store).version == 1
        perform(master.poll(), store)
    assert [one.name for one in head_of(store).rejected] == [delta.name]
    assert torch.equal(weight_of(store), INITIAL["weight"] - 1)


def test_a_torn_delta_of_a_session_that_nothing_opened_is_left_alone() -> None:
    store, heard = Watched(), Heard()
    master = new_master(AVERAGING, heard=heard)
    perform(master.poll(), store)
    delta = DeltaId("a", "s", 1)
    store.inner.put_if_absent(delta.name, packed_delta(delta, {"weight": torch.ones(3)})[:-1])
    for _ in range(3 * DOUBTFUL_LOOKS):
        perform(master.poll(), store)
    assert (head_of(store).version, names(store, "in/")) == (0, [delta.name])
    assert store.counts()["get", delta.name] == 2, "at first, and when it was given up"
    assert heard.words.count("refused") == 1


def test_a_torn_delta_is_given_up_when_a_later_one_is_there() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    delta = DeltaId("a", "s", 1)
    store.put_if_absent(delta.name, packed_delta(delta, {"weight": torch.ones(3)})[:-1])
    later = send(store, "a", 2, [2.0] * 3)
    assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert ([one.name for one in head.rejected], head.applied) == ([delta.name], (later.name,))


def test_a_torn_delta_does_not_delay_other_sessions() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=2, quorum=1))
    perform(master.poll(), store)
    delta = DeltaId("a", "s", 1)
    store.put_if_absent(delta.name, packed_delta(delta, {"weight": torch.ones(3)})[:-1])
    sound = send(store, "b", 1, [0.0] * 3)
    assert perform(master.poll(), store) == 1
    assert head_of(store).applied == (sound.name,)


class Hiding(Watched):
    """A store whose listings leave some names out."""

    hidden: tuple[str, ...] = ()

    def list_after(self, prefix: str, marker: str = "", **options: Any) -> Listing:
        page = super().list_after(prefix, marker, **options)
        return Listing(tuple(entry for entry in page.entries if entry.name not in self.hidden), page.more)


def test_a_delta_that_a_listing_leaves_out_is_read_by_its_name() -> None:
    store, master = Hiding(), new_master(AVERAGING)
    perform(master.poll(), store)
    first, second = send(store.inner, "a", 1, [1.0, 0.0, 0.0]), send(store.inner, "a", 2, [0.0, 1.0, 0.0])
    store.hidden = (first.name,)
    assert perform(master.poll(), store) == 1
    assert perform(master.poll(), store) == 1
    assert [version.applied for version in history_of(store)[1:]] == [(first.name,), (second.name,)]
    store.hidden = ()
    perform(master.poll(), store)
    assert names(store, "in/") == []


def test_a_gap_of_any_length_is_given_up_as_a_whole() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    send(store, "a", 1, [1.0] * 3)
    last = send(store, "a", 99_999_999, [1.0] * 3, step=20)
    for _ in range(DOUBTFUL_LOOKS + 2):
        perform(master.poll(), store)
    history = history_of(store)
    assert [manifest.nodes["a"].sessions["s"].seq for manifest in history[1:]] == [1, 99_999_998, 99_999_999]
    assert history[2].rejected[0].reason.startswith("missing")
    assert history[3].applied == (last.name,)
    assert names(store, "in/") == []


def test_a_removed_delta_does_not_stop_its_session_for_ever() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    later = send(store, "a", 2, [1.0] * 3)
    for _ in range(DOUBTFUL_LOOKS):
        assert head_of(store).version == 0
        perform(master.poll(), store)
    assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert ([one.reason.split(",")[0] for one in head.rejected], head.applied) == (["missing"], (later.name,))


class Tearing(Watched):
    """Keeps half of the first large object of a kind, and loses the answer."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix: str | None = prefix

    def put_if_absent(self, name: str, data: Any, **options: Any) -> bool:
        if self.prefix is not None and name.startswith(self.prefix):
            self.prefix = None
            self.inner.put_if_absent(name, bytes(data)[: len(data) // 2])
            raise StoreUnavailableError("connection reset")
        return super().put_if_absent(name, data, **options)


class Retrying(Watched):
    """Sends a put again, once, under the same name."""

    def put_if_absent(self, name: str, data: Any, **options: Any) -> bool:
        try:
            return self.inner.put_if_absent(name, data, **options)
        except StoreUnavailableError:
            return self.inner.put_if_absent(name, data, **options)


@pytest.mark.parametrize("prefix", ["w/", "opt/"])
def test_torn_weights_are_never_named(prefix: str) -> None:
    store = MemoryStore()
    perform(new_master(AVERAGING).poll(), store)
    tearing = Tearing(prefix)
    tearing.inner = store
    send(store, "a", 1, [1.0] * 3)
    assert perform(new_master(MasterSettings(expected_nodes=1)).poll(), Retrying(tearing)) == 1
    head = head_of(store)
    assert head.momentum is not None
    named = head.weights if prefix == "w/" else head.momentum
    assert named.path.endswith(".1.safetensors")
    for blob in (head.weights, head.momentum):
        assert store.get(blob.path, limit=blob.size, size=blob.size, sha256=blob.sha256) is not None
    torn = named.path.replace(".1.safetensors", ".safetensors")
    assert torn not in names(store), "swept with the other orphans"


# --- Crashes


def life(run: Any, store: MemoryStore) -> None:
    """Three rounds of two nodes; whenever the master dies, another one takes its place."""
    settings = two_of_two(keep_versions=2)
    master = new_master(settings)
    for round_ in range(1, 4):
        for node, value in (("a", 0.1 * round_), ("b", 0.3)):
            delta = DeltaId(node, "s", round_)
            data = packed_delta(delta, {"weight": torch.tensor([value, 1.0, 2.0])}, base_version=round_ - 1)
            store.put_if_absent(delta.name, data)
        for _ in range(10):
            try:
                run(master.poll(), store)
            except Killed:
                master = new_master(settings)
            except StoreUnavailableError:
                pass
            if store.get(head_name(round_), limit=10**6) is not None:
                break
    perform(master.poll(), store)


def requests_of_a_life() -> int:
    fault = Fault(-1, done=False, kills=False)
    life(fault.run, MemoryStore())
    return fault.count


@pytest.mark.parametrize("kills", [True, False], ids=["killed", "answer lost"])
@pytest.mark.parametrize("done", [True, False], ids=["after", "before"])
def test_a_master_killed_at_any_request_changes_nothing_of_the_history(done: bool, kills: bool) -> None:
    undisturbed = MemoryStore()
    life(lambda procedure, store: perform(procedure, store), undisturbed)
    expected = history_of(undisturbed)
    requests = requests_of_a_life()
    assert requests > 40
    for at in range(requests):
        store = MemoryStore()
        life(Fault(at, done=done, kills=kills).run, store)
        versions = history_of(store)
        assert len(versions) == 4, f"request {at}"
        for one, other in zip(versions, expected, strict=True):
            assert one.applied == other.applied
            assert one.weights.sha256 == other.weights.sha256
            assert (one.momentum and one.momentum.sha256) == (other.momentum and other.momentum.sha256)
            assert (one.nodes, one.rounds, one.outer) == (other.nodes, other.rounds, other.outer)
        assert names(store, "in/") == [], f"request {at}"


def test_a_master_that_could_not_publish_reads_the_store_again() -> None:
    store, master = Watched(), new_master(MasterSettings(expected_nodes=1))
    perform(master.poll(), store)
    send(store.inner, "a", 1, [1.0] * 3)
    store.refused = {"put"}
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            perform(master.poll(), store)
        assert master.head is None
    store.refused = set()
    assert perform(master.poll(), store) == 1
    undisturbed = MemoryStore()
    other = new_master(MasterSettings(expected_nodes=1))
    perform(other.poll(), undisturbed)
    send(undisturbed, "a", 1, [1.0] * 3)
    perform(other.poll(), undisturbed)
    assert head_of(store).weights.sha256 == head_of(undisturbed).weights.sha256
    assert len(names(store, "w/")) == 2


def test_a_store_that_refuses_deletions_stops_no_rounds() -> None:
    class Undeletable(Watched):
        def delete(self, name: str, **options: Any) -> None:
            raise StoreRefusedError("403: no permission to delete")

    store, heard = Undeletable(), Heard()
    master = new_master(AVERAGING, heard=heard)
    perform(master.poll(), store)
    for seq in range(1, 4):
        send(store, "a", seq, [1.0] * 3, base_version=seq - 1)
        assert perform(master.poll(), store) == 1
    assert torch.equal(weight_of(store), INITIAL["weight"] - 3)
    assert heard.words.count("no permission to delete") == 1, "it is said once"


def test_a_failed_clean_up_loses_nothing_and_is_repeated() -> None:
    store, master, heard = Watched(), None, Heard()
    master = new_master(AVERAGING, heard=heard)
    perform(master.poll(), store)
    delta = send(store.inner, "a", 1, [1.0] * 3)
    store.refused = {"delete"}
    assert perform(master.poll(), store) == 1
    assert delta.name in names(store)
    assert "could not be deleted: delete in/a/s/00000001.safetensors: down" in heard.words
    store.refused = set()
    assert perform(master.poll(), store) == 0
    assert names(store, "in/") == []
    assert head_of(store).version == 1


# --- What comes twice or late


def test_a_processed_delta_that_is_sent_again_is_deleted_and_does_not_enter() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    for _ in range(3):
        send(store, "a", 1, [1.0] * 3)
        perform(master.poll(), store)
    assert head_of(store).version == 1
    assert names(store, "in/") == []
    send(store, "a", 1, [1.0] * 3)
    perform(new_master(AVERAGING).poll(), store)
    assert (head_of(store).version, names(store, "in/")) == (1, [])


def test_a_listing_that_still_shows_deleted_deltas_does_no_harm() -> None:
    class Ghosts(Watched):
        ghosts: tuple[Entry, ...] = ()

        def list_after(self, prefix: str, marker: str = "", **options: Any) -> Listing:
            page = super().list_after(prefix, marker, **options)
            return Listing(page.entries + self.ghosts if prefix == "in/" else page.entries, page.more)

    store, master = Ghosts(), new_master(AVERAGING)
    perform(master.poll(), store)
    delta = send(store.inner, "a", 1, [1.0] * 3)
    perform(master.poll(), store)
    store.ghosts = (Entry(delta.name, 500),)
    for _ in range(5):
        assert perform(master.poll(), store) == 0
    assert head_of(store).version == 1


def test_a_master_that_wakes_hours_later_in_any_request_of_a_publication_does_no_harm() -> None:
    for stops_at in itertools.count():
        store = MemoryStore()
        stale = new_master(MasterSettings(expected_nodes=1, keep_versions=2))
        perform(stale.poll(), store)
        send(store, "a", 1, [1.0] * 3)
        procedure = steps(stale.poll(), store)
        if next(itertools.islice(procedure, stops_at, None), None) is None:
            break
        awake = new_master(MasterSettings(expected_nodes=1, keep_versions=2))
        perform(awake.poll(), store)
        for seq in range(2, 8):
            send(store, "a", seq, [1.0] * 3, base_version=min(seq - 1, head_of(store).version))
            perform(awake.poll(), store)
        before = head_of(store)
        list(procedure)
        versions = history_of(store)
        assert versions[-1] == before
        assert sorted(name for version in versions for name in version.applied) == [
            DeltaId("a", "s", seq).name for seq in range(1, 8)
        ]
        assert weights_of(store, before)
        send(store, "a", 8, [1.0] * 3, base_version=before.version)
        assert perform(stale.poll(), store) == 1
        assert torch.equal(stale.weights["weight"], weight_of(store))
        assert len(names(store, "w/")) == 2
        assert len(names(store, "opt/")) == 2


@pytest.mark.slow
def test_two_masters_make_one_linear_history() -> None:
    choices = random.Random(6)
    store = MemoryStore()
    settings = MasterSettings(outer_lr=1.0, outer_momentum=0.5, expected_nodes=2, quorum=1, keep_versions=3)
    sent: dict[str, tuple[float, int]] = {}  # by name, value and base version
    count = dict.fromkeys("ab", 0)
    masters = [new_master(settings), new_master(settings)]
    running = [steps(master.poll(), store) for master in masters]
    version = 0
    while version < 200:
        if names(store, "head/"):
            version = head_of(store).version
            if choices.random() < 0.2 and len(names(store, "in/")) < 4:
                node, value = choices.choice("ab"), 0.5 + choices.random()
                count[node] += 1
                sent[send(store, node, count[node], [value] * 3, base_version=version).name] = value, version
        which = choices.randrange(2)
        for _ in range(choices.randrange(8)):
            if next(running[which], None) is None:
                running[which] = steps(masters[which].poll(), store)
    for master, procedure in zip(masters, running, strict=True):
        list(procedure)
        perform(master.poll(), store)

    history = history_of(store)
    applied = [name for manifest in history for name in manifest.applied]
    assert sorted(applied) == sorted(sent), "each once"
    assert len({manifest.nonce.split("-")[0] for manifest in history}) == 2, "both took part"
    assert torch.equal(masters[0].weights["weight"], masters[1].weights["weight"])
    assert weight_of(store)[0].item() == pytest.approx(replayed(history, sent), rel=1e-4)


def replayed(history: list[Manifest], sent: dict[str, tuple[float, int]]) -> float:
    """The first weight that the update rule gives for the rounds of a history, in float64."""
    theta, m, rounds = 1.0, 0.0, [0.0]
    for manifest in history[1:]:
        values = [sent[name][0] for name in manifest.applied]
        weights = [(1 + rounds[-1] - rounds[sent[name][1]]) ** -0.5 for name in manifest.applied]
        shares: dict[str, list[float]] = {}
        for name, w in zip(manifest.applied, weights, strict=True):
            shares.setdefault(name.split("/")[1], []).append(w)
        share = sum(statistics.fmean(of_node) for of_node in shares.values())
        mean = sum(w * value for w, value in zip(weights, values, strict=True)) / share
        f = min(1.0, share / 2)
        m = 0.5**f * m + f * mean
        theta -= f * mean + 0.5 * (1 - 0.5**f) / (1 - 0.5) * m
        rounds.append(rounds[-1] + f)
    return theta


def test_a_master_behind_a_version_beside_removed_junk_takes_it() -> None:
    store, settings = MemoryStore(), MasterSettings(expected_nodes=1)
    first, second = new_master(settings), new_master(settings)
    perform(first.poll(), store)
    perform(second.poll(), store)
    store.put_if_absent(head_name(1), b"junk")
    send(store, "a", 1, [0.5] * 3)
    assert perform(first.poll(), store) == 1
    store.delete(head_name(1))
    send(store, "a", 2, [0.5] * 3, base_version=1)
    perform(second.poll(), store)  # a delta is missing that the version has taken
    for master in (second, first, new_master(settings)):
        perform(master.poll(), store)
        assert master.head == head_of(store)
    assert [len(manifest.applied) for manifest in history_of(store)] == [0, 1, 1]


# --- Traffic


@pytest.mark.parametrize("versions", [1, 60])
def test_an_idle_look_is_two_requests_whatever_the_history(versions: int) -> None:
    store, master = Watched(), new_master(AVERAGING)
    perform(master.poll(), store)
    for seq in range(1, versions + 1):
        send(store.inner, "a", seq, [0.0] * 3, base_version=seq - 1)
        perform(master.poll(), store)
    perform(master.poll(), store)
    store.requests.clear()
    assert perform(master.poll(), store) == 0
    assert store.requests == [("get", head_name(versions + 1)), ("list", "in/")]


def test_each_delta_is_downloaded_once() -> None:
    store, master = Watched(), new_master(MasterSettings(expected_nodes=3, quorum=3))
    perform(master.poll(), store)
    sent: list[DeltaId] = []
    for round_ in range(1, 6):
        for node in "abc":
            sent.append(send(store.inner, node, round_, [0.0] * 3, base_version=round_ - 1))
            perform(master.poll(), store)
    counts = store.counts()
    assert [counts["get", delta.name] for delta in sent] == [2] * 3 + [1] * 12, "in the first round, headers before"
    assert head_of(store).version == 5


@pytest.mark.slow
def test_after_many_rounds_the_store_holds_what_is_kept() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=2, quorum=2, keep_versions=4))
    perform(master.poll(), store)
    for round_ in range(1, 501):
        for node in "ab":
            send(store, node, round_, [0.001] * 3, base_version=round_ - 1)
        assert perform(master.poll(), store) == 2
    assert len(names(store, "w/")) == 4
    assert len(names(store, "opt/")) == 4
    assert names(store, "in/") == []
    assert len(names(store, "head/")) == 501, "manifests are never deleted"


def test_what_another_master_may_still_name_is_not_an_orphan() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    for name in (weights_name(1, "dead"), momentum_name(1, "dead"), weights_name(2, "live"), momentum_name(2, "live")):
        store.put_if_absent(name, b"")
    send(store, "a", 1, [0.0] * 3)
    perform(master.poll(), store)
    left = names(store, "w/") + names(store, "opt/")
    assert weights_name(1, "dead") not in left
    assert momentum_name(1, "dead") not in left
    assert weights_name(2, "live") in left
    assert momentum_name(2, "live") in left


# --- What is told


def test_the_outer_step_event_has_its_numbers() -> None:
    store, heard = MemoryStore(), Heard()
    master = new_master(MasterSettings(expected_nodes=4, quorum=2), heard=heard)
    perform(master.poll(), store)
    send(store, "a", 1, [0.0] * 3)
    send(store, "a", 2, [0.0] * 3)
    send(store, "b", 1, [0.0] * 3)
    perform(master.poll(), store)
    send(store, "a", 3, [0.0] * 3, base_version=1)
    send(store, "b", 2, [float("nan")] * 3, base_version=1)
    send(store, "c", 1, [0.0] * 3, base_version=1)
    perform(master.poll(), store)
    assert heard.of("outer_step") == [
        {"version": 1, "deltas": 3, "nodes": 2, "fraction": 0.5, "rounds": 0.5, "rejected": 0},
        {"version": 2, "deltas": 2, "nodes": 2, "fraction": 0.5, "rounds": 1.0, "rejected": 1},
    ]


def test_marks_say_how_far_each_session_is_processed() -> None:
    store, master = MemoryStore(), new_master(AVERAGING)
    perform(master.poll(), store)
    size = 0
    for seq in (1, 2):
        delta = send(store, "a", seq, [1.0, 1.0, 0.0], steps=10, tokens=500, seconds=2.5, base_version=seq - 1)
        size += len(store.get(delta.name, limit=10**6) or b"")
        perform(master.poll(), store)
    mark = head_of(store).nodes["a"]
    assert mark.sessions == {"s": SessionMark(seq=2, last=None, position=(20, 1000, 1000))}
    assert (mark.tokens_per_step, mark.steps, mark.seconds, mark.norm) == (50.0, 10, 2.5, 1.414214)
    assert (mark.version, mark.rounds, mark.bytes, mark.rejected, mark.reason) == (2, 2.0, size, 0, None)
    assert (mark.closed_below, mark.time) == (0, 1767225600)


def test_another_outer_optimizer_starts_without_the_former_state() -> None:
    store, heard = MemoryStore(), Heard()
    perform(new_master(AVERAGING).poll(), store)
    send(store, "a", 1, [1.0] * 3)
    perform(new_master(AVERAGING).poll(), store)
    master = new_master(MasterSettings(outer="sgd", outer_lr=1.0, expected_nodes=1), heard=heard)
    send(store, "a", 2, [1.0] * 3, base_version=1)
    assert perform(master.poll(), store) == 1
    assert "sgd starts without the state of nesterov" in heard.words
    assert head_of(store).momentum is None
    assert torch.equal(weight_of(store), INITIAL["weight"] - 2)


def test_a_version_with_an_invalid_outer_state_is_refused_by_name() -> None:
    store, settings = MemoryStore(), MasterSettings(outer="delayed_nesterov", expected_nodes=1)
    perform(new_master(settings).poll(), store)
    send(store, "a", 1, [1.0] * 3)
    perform(new_master(settings).poll(), store)
    head = head_of(store)
    outer = head.outer.model_copy(update={"scalars": {"count": 7.0}})
    following = head.model_copy(update={"version": 2, "parent": head.sha256, "outer": outer})
    store.put_if_absent(head_name(2), following.to_bytes())
    with pytest.raises(StoreContentError, match=r"head/00000002\.json: .*count of 7\.0 rounds"):
        perform(new_master(settings).poll(), store)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_versions": 0},
        {"expected_nodes": 0},
        {"quorum": 0},
        {"quorum": 3, "expected_nodes": 2},
        {"grace": float("nan")},
        {"grace": -1.0},
        {"max_staleness": float("inf")},
        {"poll_interval": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MasterSettings(**wrong)


def test_a_version_without_deltas_keeps_the_state_of_the_outer_optimizer_that_made_it() -> None:
    store = MemoryStore()
    nesterov, sgd = MasterSettings(expected_nodes=1), MasterSettings(outer="sgd", expected_nodes=1)
    first = new_master(nesterov)
    perform(first.poll(), store)
    send(store, "a", 1, [1.0] * 3)
    perform(first.poll(), store)
    made = head_of(store)
    send(store, "a", 2, [float("nan")] * 3, base_version=1)
    perform(new_master(sgd).poll(), store)
    head = head_of(store)
    assert (head.version, head.outer, head.momentum) == (2, made.outer, made.momentum)
    for settings in (sgd, nesterov):
        perform(new_master(settings).poll(), store)


def test_a_manifest_comes_after_what_it_names_and_before_any_deletion() -> None:
    store, master = MemoryStore(), new_master(MasterSettings(expected_nodes=1, keep_versions=1))
    perform(master.poll(), store)
    send(store, "a", 1, [1.0] * 3)
    kinds = [
        (type(effect).__name__, effect.name.split("/")[0])
        for effect in steps(master.poll(), store)
        if isinstance(effect, Put) or type(effect).__name__ == "Delete"
    ]
    assert kinds == [("Put", "w"), ("Put", "opt"), ("Put", "head"), ("Delete", "in"), ("Delete", "w")]


def test_a_master_that_knows_its_store_gives_no_identity_to_the_folder_below_a_mount() -> None:
    """The mount goes away right after the identity was read: what is left looks like a new, empty store."""
    known = "0123456789abcdef" * 2
    there, bare = MemoryStore(), MemoryStore()
    perform(create_identity(known), there)

    def look() -> None:
        looking = new_master(store_id=known).poll()
        found = answer(next(looking), there, None)
        while True:
            found = answer(looking.send(found), bare, None)

    with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
        look()
    assert perform(read_identity(), bare) is None
