from __future__ import annotations

import json

import pytest

from speedtronic.distributed.ledger import START, Ledger
from speedtronic.distributed.protocol import DeltaId
from speedtronic.distributed.records import Position

LEDGER = Ledger.of(
    DeltaId("n", "s2", 4), Position(1, 2, 3), ("s1", "s2"), origin="0" * 64, store="a" * 32, residual="b" * 64
)


def test_a_ledger_comes_back_from_its_bytes() -> None:
    assert Ledger.from_bytes(LEDGER.to_bytes()) == LEDGER
    assert LEDGER.position == Position(1, 2, 3)
    assert LEDGER.sessions == ("s1", "s2")
    assert LEDGER.last("n") == DeltaId("n", "s2", 4)


def test_a_ledger_without_a_delta_names_none() -> None:
    ledger = Ledger.of(None, START, (), origin=None)
    assert ledger.last("n") is None
    assert ledger.sessions == ()
    assert Ledger.from_bytes(ledger.to_bytes()) == ledger


def test_it_keeps_the_newest_sessions_and_always_the_last_delta_s() -> None:
    ledger = Ledger.of(DeltaId("n", "new", 1), START, tuple(f"t{number}" for number in range(300)), origin=None)
    assert len(ledger.sessions) == 256
    assert ledger.sessions[-2:] == ("t299", "new")


def test_a_ledger_of_protocol_1_knows_no_identity_and_no_residual() -> None:
    older = {key: value for key, value in json.loads(LEDGER.to_bytes()).items() if key not in {"store", "residual"}}
    ledger = Ledger.from_bytes(json.dumps(older).encode())
    assert ledger is not None
    assert ledger == LEDGER.model_copy(update={"store": None, "residual": None})


@pytest.mark.parametrize(
    "changed",
    [
        {"seq": -1},
        {"step": 1.5},
        {"tokens": "3"},
        {"origin": "x"},
        {"store": "x"},
        {"residual": "x"},
        {"sessions": [1]},
        {"more": 1},
        {"seq": None},
    ],
)
def test_damaged_bytes_are_no_ledger(changed: dict[str, object]) -> None:
    assert Ledger.from_bytes(json.dumps({**json.loads(LEDGER.to_bytes()), **changed}).encode()) is None


@pytest.mark.parametrize("data", [b"", b"\x00" * 64, b"[]", b"\xff", LEDGER.to_bytes()[:-1]])
def test_json_of_something_else_is_no_ledger(data: bytes) -> None:
    assert Ledger.from_bytes(data) is None
