"""Copies of checkpoints in a store."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.manager import Mirror
from speedtronic.config import load_config
from speedtronic.distributed.checkpoint_mirror import CheckpointMirror
from speedtronic.distributed.stores import MemoryStore, RetryingStore, Store
from speedtronic.errors import CheckpointError, ConfigError, StoreUnavailableError
from speedtronic.runtime import build_runtime, train_from_config
from tests.distributed.stores.servers import ON_SERVERS, PLACES
from tests.support.configs import tiny
from tests.support.failing import Failing
from tests.support.faulty_store import Faults, FaultyStore

SMALL = 300  # bytes of a part, so that each file has several


def state_of(step: int, eval_loss: float | None = None) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((20, 9), float(step))},
        "optimizer": {"exp_avg": torch.arange(150.0) + step},
        "step": step,
        "config": {},
        "metrics": {"loss": 2.0, "eval_loss": eval_loss},
    }


class Run:
    """A run that saves in a folder and has a mirror."""

    def __init__(self, folder: Path, store: Store, *, keep_last: int | None = 3, **rules: Any) -> None:
        self.warned: list[str] = []
        self.mirror = CheckpointMirror(
            store,
            keep_last=keep_last,
            keep_every=rules.get("keep_every"),
            keep_best=rules.get("keep_best", 0),
            warn=self.warned.append,
            inform=lambda _: None,
            part=SMALL,
        )
        self.manager = CheckpointManager(
            folder, keep_last=keep_last, mirror=self.mirror, warn=self.warned.append, **rules
        )

    def save(self, step: int, eval_loss: float | None = None) -> Path:
        path = self.manager.save(step, state_of(step, eval_loss))
        self.mirror.wait()
        return path

    def fetched(self) -> dict[str, Any] | None:
        """What a run that finds nothing in the folder continues from."""
        shutil.rmtree(self.manager.directory, ignore_errors=True)
        if self.mirror.fetch(self.manager) is None:
            return None
        return self.manager.load_latest()


@pytest.fixture
def shared() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(tmp_path: Path, shared: MemoryStore) -> Run:
    return Run(tmp_path / "checkpoints", shared)


def names(store: Store, prefix: str) -> list[str]:
    return [entry.name for entry in store.list_after(prefix).entries]


def steps(store: Store) -> list[int]:
    return [int(name.removeprefix("index/").partition("-")[0]) for name in names(store, "index/")]


def assert_is(state: dict[str, Any] | None, step: int) -> None:
    assert state is not None
    assert torch.equal(state["model"]["weight"], state_of(step)["model"]["weight"])
    assert torch.equal(state["optimizer"]["exp_avg"], state_of(step)["optimizer"]["exp_avg"])


def test_a_mirror_is_what_a_manager_takes(run: Run) -> None:
    mirror: Mirror = run.mirror
    assert mirror is run.manager.mirror


def test_the_newest_checkpoint_comes_back_to_an_empty_disk(run: Run) -> None:
    for step in (10, 20):
        run.save(step)
    run_id = run.manager.run_id
    other = Run(run.manager.directory, run.mirror._store)
    assert_is(other.fetched(), 20)
    assert other.manager.run_id == run_id
    assert run.warned == other.warned == []


def test_the_run_that_saved_last_comes_back_although_another_saved_more_often(
    tmp_path: Path, shared: MemoryStore
) -> None:
    """A run in a new folder counts its saves anew."""
    earlier = Run(tmp_path / "earlier", shared)
    for step in (10, 20, 30):
        earlier.save(step)
    later = Run(tmp_path / "later", shared)
    later.save(5)
    assert_is(Run(tmp_path / "empty", shared).fetched(), 5)


def test_an_empty_store_has_nothing_to_fetch(run: Run) -> None:
    assert run.fetched() is None


def test_the_copies_are_kept_by_the_rules_of_the_run(tmp_path: Path, shared: MemoryStore) -> None:
    run = Run(tmp_path, shared, keep_last=2, keep_every=30, keep_best=1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0), (50, 5.0), (60, 6.0), (70, 7.0)):
        run.save(step, loss)
    assert steps(shared) == [20, 30, 60, 70]
    folders = {name.split("/")[2] for name in names(shared, "part/")}
    assert folders == {name.removeprefix("index/").removesuffix(".json") for name in names(shared, "index/")}
    assert run.warned == []


def test_of_two_saves_of_one_step_the_later_is_kept(run: Run, shared: MemoryStore) -> None:
    run.save(10)
    run.save(10)
    assert steps(shared) == [10]
    assert_is(run.fetched(), 10)


def test_a_resumed_run_makes_no_second_copy(run: Run, shared: MemoryStore) -> None:
    path = run.save(10)
    before = names(shared, "")
    run.mirror.add(path)
    run.mirror.wait()
    assert names(shared, "") == before


def test_a_damaged_copy_is_passed_over_for_the_one_before(run: Run, shared: MemoryStore) -> None:
    run.save(10)
    run.save(20)
    (*_, newest) = [name for name in names(shared, "part/") if "/000000000020-" in name]
    shared.delete(newest)
    shared.put_if_absent(newest, b"something else")
    assert_is(run.fetched(), 10)
    assert any("was passed over" in word and "missing or damaged" in word for word in run.warned)
    shared.delete([name for name in names(shared, "part/") if "/000000000010-" in name][0])
    with pytest.raises(CheckpointError, match="no copy of a checkpoint is whole"):
        run.fetched()


def test_a_copy_that_was_cut_short_is_not_fetched_and_is_removed_by_the_next_process(
    tmp_path: Path, shared: MemoryStore
) -> None:
    Run(tmp_path, shared).save(10)
    whole = names(shared, "part/")

    def lost(kind: str, name: str) -> Exception | None:
        return (
            RuntimeError("the machine is gone")
            if kind == "put_if_absent" and "state.safetensors.00001" in name
            else None
        )

    first = Run(tmp_path, shared)
    first.manager.load_latest()
    first.mirror._store = Failing(shared, lost)
    first.save(20)
    assert any("the checkpoint of step 20 was not copied" in word for word in first.warned)
    assert steps(shared) == [10]
    assert len(names(shared, "part/")) > len(whole)

    second = Run(tmp_path, shared)
    second.manager.load_latest()
    second.save(30)
    assert steps(shared) == [10, 30]
    assert {name.split("/")[2] for name in names(shared, "part/")} == {
        name.removeprefix("index/").removesuffix(".json") for name in names(shared, "index/")
    }


def test_files_that_are_removed_meanwhile_are_copied_all_the_same(tmp_path: Path, shared: MemoryStore) -> None:
    may_go_on = threading.Event()
    started = threading.Event()

    class Slow(MemoryStore):
        def put_if_absent(self, name: str, data: Any, *, timeout: float = 1.0) -> bool:
            started.set()
            assert may_go_on.wait(60)
            return shared.put_if_absent(name, data)

        def __getattribute__(self, name: str) -> Any:
            return getattr(shared, name) if name in {"get", "list_after", "delete"} else super().__getattribute__(name)

    run = Run(tmp_path, Slow("slow"), keep_last=1)
    run.manager.save(10, state_of(10))
    assert started.wait(60)
    for step in (20, 30, 40):
        run.manager.save(step, state_of(step))
    assert [path.name for path in run.manager.directory.glob("step_*")] == ["step_000000000040"]
    may_go_on.set()
    run.mirror.wait()
    assert steps(shared) == [40], "by the rule of one"
    left_out = [word for word in run.warned if "saves faster than the store takes them" in word]
    assert ["step 20" in left_out[0], "step 30" in left_out[1], len(left_out)] == [True, True, 2]


def test_a_store_that_is_down_costs_a_warning(tmp_path: Path, shared: MemoryStore) -> None:
    down = True

    def failure(kind: str, name: str) -> Exception | None:
        return StoreUnavailableError("no answer") if down else None

    run = Run(tmp_path, Failing(shared, failure))
    run.save(10)
    assert [word for word in run.warned if "step 10 was not copied" in word and "no answer" in word]
    down = False
    run.save(20)
    assert steps(shared) == [20]


def test_a_store_whose_requests_fail_and_tear_gets_whole_copies(tmp_path: Path, shared: MemoryStore) -> None:
    faulty = FaultyStore(shared, Faults(failing=0.3, seed=3), sleep=lambda _: None)
    run = Run(tmp_path, RetryingStore(faulty, attempts=40, sleep=lambda _: None))
    for step in (10, 20, 30, 40):
        run.save(step)
    assert steps(shared) == [20, 30, 40]
    assert_is(run.fetched(), 40)
    assert run.warned == []


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"format":1,"number":1,"manifest":"{}","files":{}}'])
def test_what_is_no_index_is_left_alone(run: Run, shared: MemoryStore, content: bytes) -> None:
    name = "index/000000000099-0123abcd.json"
    shared.put_if_absent(name, content)
    shared.put_if_absent("index/other.json", b"{}")
    run.save(10)
    assert_is(run.fetched(), 10)
    assert names(shared, "index/")[0] != name
    assert shared.get(name, limit=100) == content
    assert len([word for word in run.warned if "is no index of a checkpoint" in word]) == 1


def test_a_copy_leads_to_no_other_path(run: Run, shared: MemoryStore) -> None:
    run.save(10)
    (name,) = names(shared, "index/")
    data = shared.get(name, limit=10**6)
    assert data is not None
    shared.delete(name)
    shared.put_if_absent(name, data.replace(b'"path":"part/', b'"path":"../part/'))
    other = Run(run.manager.directory, shared)
    assert other.fetched() is None
    assert any("is no index of a checkpoint" in word for word in other.warned)


# ---------------------------------------------------------------------- in a run


def config_of(folder: Path, mirror: str, **options: Any) -> dict[str, Any]:
    return tiny(
        folder / "run",
        run={"max_steps": 8},
        checkpoint={"every_steps": 2, "mirror": mirror, "mirror_options": options},
    )


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    state = CheckpointManager(Path(config["run"]["output_dir"]) / "checkpoints").load_latest()
    assert state is not None
    return state


def assert_continues(config: dict[str, Any], lose: Callable[[], None], undisturbed: dict[str, Any]) -> None:
    """A run that is cut short, and loses its disk, ends with every tensor of one that was not."""
    train_from_config(config, max_steps=4)
    lose()
    train_from_config(config, resume=True)
    ended = weights_of(config)
    assert ended["step"] == undisturbed["step"] == 8
    for part in ("model", "optimizer"):
        assert_same(ended[part], undisturbed[part])


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.fixture(params=["folder", *ON_SERVERS])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if request.param == "folder":
        yield f"dir://{tmp_path}/mirror", {}
    else:
        with PLACES[request.param]() as place:
            yield f"{place.url}/mirror", dict(place.options)


def test_a_run_that_lost_its_disk_goes_on_from_the_mirror_bit_for_bit(
    mirror: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    straight = tiny(tmp_path / "straight", run={"max_steps": 8})
    train_from_config(straight)
    config = config_of(tmp_path, mirror[0], **mirror[1])
    assert_continues(config, lambda: shutil.rmtree(tmp_path / "run"), weights_of(straight))


def test_a_mirror_is_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint.mirror: not the address of a store"):
        train_from_config(config_of(tmp_path, "/mnt/mirror"))
    with pytest.raises(ConfigError, match="checkpoint.mirror_options.region: unknown to a store at dir://"):
        train_from_config(config_of(tmp_path, f"dir://{tmp_path}/m", region="x"))


def test_what_a_kill_left_uncopied_is_copied_by_the_resumed_run(tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path / "run", run={"max_steps": 8}, checkpoint={"every_steps": 2}), max_steps=4)
    config = config_of(tmp_path, f"dir://{tmp_path}/mirror")
    config["checkpoint"]["every_steps"] = 100
    train_from_config(config, resume=True)
    assert [path.name[:12] for path in sorted((tmp_path / "mirror/index").iterdir())] == [
        "000000000004",
        "000000000008",
    ]


def test_each_node_has_its_own_part_of_a_mirror(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"dir://{tmp_path}/mirror/")
    config["distributed"] = {
        "enabled": True,
        "repo_id": f"dir://{tmp_path}/store",
        "state_dir": str(tmp_path / "state"),
    }
    with pytest.raises(ConfigError, match="distributed.node_id: needed with checkpoint.mirror"):
        build_runtime(config)
    config["distributed"]["node_id"] = "anna"
    trainer, manager = build_runtime(config)
    assert isinstance(manager.mirror, CheckpointMirror)
    assert manager.mirror.url == f"dir://{tmp_path}/mirror/anna"
    trainer.logger.close()


def test_the_options_of_a_mirror_are_hidden(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, "s3://user:pass@bucket/x", key="hush", region="here"))
    shown = config.to_dict(redact_secrets=True)["checkpoint"]
    assert shown["mirror"] == "s3://bucket/x"
    assert shown["mirror_options"] == {"key": "<redacted>", "region": "here"}


@pytest.mark.slow
def test_a_run_that_is_killed_with_its_disk_goes_on_from_the_mirror_bit_for_bit(tmp_path: Path) -> None:
    steps = 600
    straight = tiny(tmp_path / "straight", run={"max_steps": steps}, checkpoint={"every_steps": 20})
    train_from_config(straight)
    config = config_of(tmp_path, f"dir://{tmp_path}/mirror")
    config["run"]["max_steps"], config["checkpoint"]["every_steps"] = steps, 20
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "speedtronic", "train", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list((tmp_path / "mirror").glob("index/*.json"))) < 3:
            threading.Event().wait(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    shutil.rmtree(tmp_path / "run")
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    ended, undisturbed = weights_of(config), weights_of(straight)
    assert ended["step"] == undisturbed["step"] == steps
    assert_same(ended["model"], undisturbed["model"])
    assert_same(ended["optimizer"], undisturbed["optimizer"])
