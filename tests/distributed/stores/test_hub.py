"""A Git repository of the Hub as a store: what each answer of the Hub means, and what is asked of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speedtronic.distributed.stores.hub import HubStore
from speedtronic.errors import SpeedtronicWarning, StoreRefusedError, StoreUnavailableError
from tests.distributed.stores.servers import on_hub_repository
from tests.support.hub_server import Hub

pytestmark = pytest.mark.stores

REPOSITORY = "namespace/model"
WEIGHTS, MOMENTUM = "w/00000001-n.safetensors", "opt/00000001-n.safetensors"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    with on_hub_repository(hub):
        yield hub


def store_of(**options: Any) -> HubStore:
    return HubStore(REPOSITORY, **options)


def test_a_repository_is_made_private(hub: Hub) -> None:
    store = store_of()
    assert store.get("store.json", limit=10) is None
    assert store.list_after("").entries == ()
    assert store.put_if_absent("store.json", b"x")
    assert hub.repositories[REPOSITORY].private


def test_a_public_repository_is_warned_of(hub: Hub) -> None:
    store_of().put_if_absent("store.json", b"x")
    hub.repositories[REPOSITORY].private = False
    with pytest.warns(SpeedtronicWarning, match="hf://namespace/model is public"):
        store_of().put_if_absent("head/1", b"x")


def test_a_version_is_one_commit(hub: Hub) -> None:
    store = store_of()
    store.put_if_absent("store.json", b"x")
    repository = hub.repositories[REPOSITORY]
    before = len(repository.commits)
    assert store.put_if_absent(WEIGHTS, b"weights")
    assert store.put_if_absent(MOMENTUM, b"momentum")
    assert not store.put_if_absent(WEIGHTS, b"weights")
    assert len(repository.commits) == before
    store.delete("store.json")
    assert store.put_if_absent("head/00000001.json", b"{}")
    assert repository.commits[before:] == ["head/00000001.json"]
    assert repository.files == {WEIGHTS: b"weights", MOMENTUM: b"momentum", "head/00000001.json": b"{}"}
    assert store_of().get(WEIGHTS, limit=100) == b"weights"


def test_weights_of_a_version_that_another_master_made_are_not_committed(hub: Hub) -> None:
    one, other = store_of(), store_of()
    one.put_if_absent(WEIGHTS, b"weights")
    assert other.put_if_absent("head/00000001.json", b"other")
    assert not one.put_if_absent("head/00000001.json", b"one")
    assert one.put_if_absent("head/00000002.json", b"one")
    assert WEIGHTS not in hub.repositories[REPOSITORY].files


def test_of_two_that_commit_at_once_one_looks_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = store_of(sleep=lambda _: None), store_of()
    one.put_if_absent("store.json", b"x")
    look = one._look
    meanwhile = iter(["head/1", "in/a"])

    def look_and_lose(name: str) -> Any:
        seen = look(name)
        if (other_name := next(meanwhile, None)) is not None:
            assert other.put_if_absent(other_name, b"other")
        return seen

    monkeypatch.setattr(one, "_look", look_and_lose)
    assert not one.put_if_absent("head/1", b"one"), "the other one made it"
    assert one.put_if_absent("in/b", b"one"), "the other one made something else"
    assert hub.repositories[REPOSITORY].files["head/1"] == b"other"


def test_a_branch_that_shows_an_older_state_is_not_believed(hub: Hub) -> None:
    store = store_of()
    store.put_if_absent("head/1", b"1")
    store.put_if_absent("head/2", b"2")
    hub.behind = 1
    assert store.get("head/2", limit=10) == b"2"
    assert not store.put_if_absent("head/2", b"again")
    assert store.get("head/3", limit=10) is None
    assert store.put_if_absent("head/3", b"3")


def test_a_lost_answer_is_found_out_at_the_next_attempt(hub: Hub) -> None:
    store = store_of()
    store.put_if_absent("in/a", b"x")
    store.delete("in/a")
    hub.failures = [-502]
    with pytest.raises(StoreUnavailableError, match="the Hub answers 502"):
        store.put_if_absent("in/b", b"y")
    assert not store.put_if_absent("in/b", b"y")
    assert store.put_if_absent("in/c", b"z"), "what is deleted already is not deleted again"
    assert sorted(hub.repositories[REPOSITORY].files) == ["in/b", "in/c"]


def test_the_hub_is_not_asked_before_it_wants_to_be(hub: Hub) -> None:
    clock = Clock()
    store = store_of(clock=clock)
    store.put_if_absent("in/a", b"x")
    hub.failures = [429]
    with pytest.raises(StoreUnavailableError, match="answers 429"):
        store.put_if_absent("in/b", b"y")
    before = len(hub.asked)
    with pytest.raises(StoreUnavailableError, match="asked to wait; 7 s are left"):
        store.put_if_absent("in/b", b"y")
    assert len(hub.asked) == before
    clock.now += 7
    assert store.put_if_absent("in/b", b"y")


def test_commits_beyond_the_budget_wait_for_an_hour(hub: Hub) -> None:
    clock = Clock()
    store = store_of(clock=clock, budget=3)
    for number in range(3):
        assert store.put_if_absent(f"in/{number}", b"x")
        clock.now += 60
    with pytest.raises(StoreUnavailableError, match="3 commits were made within an hour.*in 3420 s"):
        store.put_if_absent("in/3", b"x")
    assert store.get("in/0", limit=1) == b"x", "reading goes on"
    clock.now += 3420
    assert store.put_if_absent("in/3", b"x")


def test_who_makes_versions_squashes_the_history(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtronic.distributed.stores.hub._SQUASH_EVERY", 3)
    master, node = store_of(), store_of()
    node.put_if_absent("in/0", b"x")
    for version in range(7):
        assert master.put_if_absent(f"head/{version:08d}.json", b"{}")
    assert len(hub.repositories[REPOSITORY].states) == 2
    assert node.put_if_absent("in/1", b"x"), "a commit that it knows is gone"
    assert node.get("in/0", limit=1) == b"x"
    assert node.get("in/2", limit=1) is None


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_says_what_to_do(hub: Hub, status: int) -> None:
    store = store_of()
    store.put_if_absent("in/a", b"x")
    hub.failures = [status]
    with pytest.raises(StoreRefusedError, match=rf"hf://namespace/model: the Hub .*\({status}\); log in .*HF_TOKEN"):
        store.put_if_absent("in/b", b"x")


def test_a_wrong_token_is_explained_and_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_anotherone")
    with pytest.raises(StoreRefusedError, match="the Hub does not know the token") as raised:
        store_of().put_if_absent("in/a", b"x")
    assert "hf_anotherone" not in str(raised.value)


def test_a_large_object_is_read_no_further_than_asked(hub: Hub) -> None:
    store = store_of()
    store.put_if_absent("in/a.safetensors", b"x" * 1000)
    assert store.get("in/a.safetensors", limit=10) is None
    assert store.get("in/a.safetensors", limit=10, partial=True) == b"x" * 11


def test_the_check_with_ones_own_account_passes_here(hub: Hub) -> None:
    script = Path(__file__).parents[3] / "benchmarks/hub_check.py"
    done = subprocess.run([sys.executable, script, f"hf://{REPOSITORY}/check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 5

    hub.repositories[REPOSITORY].files.clear()
    hub.failures = [403]
    done = subprocess.run([sys.executable, script, f"hf://{REPOSITORY}/again"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.startswith(
        "FAILED  an object is created once: hf://namespace/model/again: the Hub denies access"
    )
