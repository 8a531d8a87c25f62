"""Two thousand mutated checkpoints: whatever their bytes say, loading gives the state back or a CheckpointError.

A checksum proves that nothing has changed, not who wrote it. So most mutations here get a new seal, as an attacker
would make it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.export.files import export_safetensors, open_model
from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.checkpoint.manifest import FILES, MANIFEST
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError

CASES = 2000
NAME = "step_000000000008"

# Values that a file may hold in place of any other.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 10**4000,
    0.0, -0.5, 1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "\x00", "\ud800", "../../outside/secret", "/etc/passwd", "..", "model.safetensors", "A" * 10_000,
    "F32", "F64", "BOOL", "<f4", "|O", "O", "|S0", "<U0", "|V0", "V2147483647", "<f4,<f4", "(9999,9999)f4",
    [], [[]], {}, [0], [-1], [0, 0], [4, 0], [2**62, 2**62], [0, 2**62, 2**62], [10**4000] * 50, [1] * 100, ["a"],
    [[0, 1], [1, 2]], {"": 0}, {"$tensor": "optimizer.m"}, {"$tensor": ["a"]}, {"$tensor": "absent"}, {"$tuple": 5},
    {"$tensor": "ema.scale"},
    {"$dict": [[1]]}, {"$dict": [[[1], 2]]}, {"$dict": [[None, 2], [1.5, 2]]}, {"$dict": 5}, {"$float": "1e999"},
    {"$float": 10**400}, {"$float": None}, {"$int": "0x" + "f" * 5000}, {"$int": "z"}, {"$int": 5}, {"$bytes": "é"},
    {"$bytes": "a"}, {"$bytes": 5}, {"$complex": "optimizer.m"}, {"$complex": "absent"}, {"$code": "import os"},
    {"$ndarray": 5}, {"$ndarray": ["seen", "|O", [3]]}, {"$ndarray": ["seen", "<i8", [2**62, 4]]},
    {"$ndarray": ["seen", "|S0", [10**11]]}, {"$ndarray": ["seen", "|u1", [-24]]},
    {"$ndarray": ["seen", "|u1", ["24"]]},
    {"$ndarray": ["optimizer.m", "<f4", [4]]}, {"$ndarray": ["seen", {"$tuple": ["<f4", [10**9]]}, [1]]},
    {"$ndarray": ["seen", [{"$tuple": ["a", "|V24"]}], []]}, {"$ndarray": ["none", "|S0", [10**11]]},
    {"$ndarray": ["seen", "<i8", [10**4000] * 50]}, {"$tensor": "__metadata__"}, {"data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, {"size": 1, "sha256": "x"},
)  # fmt: skip


def original() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    average = weight / 2
    return {
        "model": {"weight": weight, "tied": weight, "scale": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {
            "m": torch.zeros(3),
            "turned": torch.tensor([1 + 2j]),
            "groups": [{"lr": 0.1, "betas": (0.9, 1)}],
        },
        "ema": {"weight": average, "tied": average, "scale": torch.zeros(2)},
        "seen": np.arange(3),
        "none": np.ones(0, np.uint8),
        "table": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "by_number": {0: "a", 1: b"bytes"},
        "odd": [float("nan"), float("-inf"), 2**70, None, True, "text"],
        "metrics": {"loss": 2.5, "eval_loss": 2.75},
        "config": {"run": {"seed": 1}},
    }


# ---------------------------------------------------------------------- what a mutation may do


def write_json(path: Path, value: Any) -> None:
    path.write_bytes(json.dumps(value).encode("ascii"))


def seal(path: Path, fields: dict[str, Any]) -> None:
    """Write a manifest or a pointer with the right checksum, of whatever it says."""
    fields = {key: value for key, value in fields.items() if key != "seal"}
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode("ascii")).hexdigest()
    write_json(path, {**fields, "seal": checksum})


def update_manifest(checkpoint: Path) -> None:
    """Let the manifest be right about the files as they are."""
    fields = json.loads((checkpoint / MANIFEST).read_bytes())
    for name in FILES:
        data = (checkpoint / name).read_bytes()
        fields["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(checkpoint / MANIFEST, fields)


def some_place(chance: random.Random, value: Any) -> tuple[Any, Any]:
    """A container somewhere in a JSON value and a key of it, at any depth as likely as at another."""
    holder, key = None, None
    while isinstance(value, dict | list) and value and (holder is None or chance.random() < 0.7):
        holder, key = value, chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[key]
    return holder, key


def with_one_change(chance: random.Random, value: Any) -> Any:
    holder, key = some_place(chance, value)
    if holder is None:
        return deepcopy(chance.choice(HOSTILE))
    kind = chance.randrange(6)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(["extra", "$tensor", "$tuple", "../up", "\ud800", "", "format"])] = holder[key]
    elif kind == 2:
        other, place = some_place(chance, value)
        holder[key] = deepcopy(other[place]) if chance.random() < 0.5 else place
    else:
        holder[key] = deepcopy(chance.choice(HOSTILE))
    return value


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Bytes as a disk, or a transfer that was cut, may leave them."""
    begin = chance.randrange(len(data) + 1)
    end = min(len(data), begin + chance.choice([1, 1, 8, 4096]))
    kind = chance.randrange(6)
    if kind == 0:
        return data[:begin]
    if kind == 1:
        return data[:begin] + chance.randbytes(end - begin) + data[end:]
    if kind == 2:
        return data[:begin] + bytes(end - begin) + data[end:]
    if kind == 3:
        return data[:begin] + data[end:]
    if kind == 4:
        return data[:begin] + chance.randbytes(8) + data[begin:]
    flipped = bytearray(data)
    flipped[begin % len(data)] ^= 1 << chance.randrange(8)
    return bytes(flipped)


# ---------------------------------------------------------------------- the mutations

# Each changes a folder of one checkpoint.


def any_byte(chance: random.Random, folder: Path) -> None:
    path = chance.choice([folder / "latest.json", *(folder / NAME / name for name in (*FILES, MANIFEST))])
    path.write_bytes(damaged(chance, path.read_bytes()))


def swapped_files(chance: random.Random, folder: Path) -> None:
    first, second = chance.sample([folder / "latest.json", *(folder / NAME / n for n in (*FILES, MANIFEST))], 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def sealed_manifest(chance: random.Random, folder: Path) -> None:
    path = chance.choice([folder / "latest.json", folder / NAME / MANIFEST])
    fields = with_one_change(chance, json.loads(path.read_bytes()))
    seal(path, fields) if isinstance(fields, dict) else write_json(path, fields)


def key_that_stands_twice(chance: random.Random, folder: Path) -> None:
    path = chance.choice([folder / "latest.json", folder / NAME / MANIFEST, folder / NAME / "state.json"])
    fields = json.loads(path.read_bytes())
    key = chance.choice(list(fields))
    text = json.dumps({key: chance.choice(HOSTILE)})[:-1] + ", " + json.dumps(fields)[1:]
    path.write_bytes(text.encode("ascii"))
    if path.name == "state.json":
        update_manifest(folder / NAME)


def nested_without_end(chance: random.Random, folder: Path) -> None:
    depth = chance.choice([300, 900, 990, 5_000, 200_000])
    opened = chance.choice(["[", '{"a":', '{"$tuple":[', '{"$dict":[[0,'])
    text = (opened * depth).encode()
    if chance.random() < 0.7:
        text += b"0" + b"".join({"[": b"]", "{": b"}"}[c] for c in reversed(opened) if c in "[{") * depth
    name = chance.choice([*FILES, MANIFEST, "latest.json"])
    if name == "state.json":
        (folder / NAME / name).write_bytes(b'{"state":{"a":' + text + b"}}")
    elif name.endswith(".safetensors"):
        (folder / NAME / name).write_bytes(struct.pack("<Q", len(text)) + text)
    else:
        path = folder / name if name == "latest.json" else folder / NAME / name
        path.write_bytes(path.read_bytes().rstrip()[:-1] + b',"versions":' + text + b"}")
        return
    update_manifest(folder / NAME)


def sealed_tree(chance: random.Random, folder: Path) -> None:
    path = folder / NAME / "state.json"
    trees = json.loads(path.read_bytes())
    for _ in range(chance.choice([1, 1, 3])):
        trees = with_one_change(chance, trees)
    write_json(path, trees)
    update_manifest(folder / NAME)


def one_array_named_often(chance: random.Random, folder: Path) -> None:
    """A copy for each would be a hundred times the memory of what is in the file."""
    path = folder / NAME / "state.json"
    trees = json.loads(path.read_bytes())
    trees["state"]["more"] = [trees["state"]["seen"]] * 100
    write_json(path, trees)
    update_manifest(folder / NAME)


def sealed_header(chance: random.Random, folder: Path) -> None:
    path = folder / NAME / chance.choice(FILES[:2])
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = with_one_change(chance, json.loads(data[8 : 8 + length]))
    text = json.dumps(header).encode("ascii")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    update_manifest(folder / NAME)


def sealed_header_length(chance: random.Random, folder: Path) -> None:
    path = folder / NAME / chance.choice(FILES[:2])
    data = path.read_bytes()
    length = chance.choice([0, 1, 7, len(data) - 8, len(data) - 7, len(data), 2**31, 2**62, 2**63, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    update_manifest(folder / NAME)


def sealed_damage(chance: random.Random, folder: Path) -> None:
    path = folder / NAME / chance.choice(FILES)
    path.write_bytes(damaged(chance, path.read_bytes()))
    update_manifest(folder / NAME)


def sparse_giant(chance: random.Random, folder: Path) -> None:
    """A file that claims to be huge, and is, without taking a block of the disk."""
    name = chance.choice(FILES)
    path, size = folder / NAME / name, 2**41
    if name == "state.json":
        os.truncate(path, size)
    else:
        header = {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        text = json.dumps(header).encode("ascii")
        path.write_bytes(struct.pack("<Q", chance.choice([len(text), size - 8])) + text)
        os.truncate(path, size)
    fields = json.loads((folder / NAME / MANIFEST).read_bytes())
    # A size that the file does not have: nothing may be taken on the manifest's word.
    fields["files"][name] = {"size": chance.choice([size - 1, size + 1, 2**62]), "sha256": "0" * 64}
    seal(folder / NAME / MANIFEST, fields)


def another_kind_of_file(chance: random.Random, folder: Path) -> None:
    path = chance.choice([folder / NAME, folder / "latest.json", *(folder / NAME / n for n in (*FILES, MANIFEST))])
    kind = chance.randrange(6)
    kept = folder.parent / "outside" / "kept"
    if kind == 0:
        shutil.move(path, kept)
        path.symlink_to(kept)
        return
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.symlink_to(folder.parent / "outside" / "secret")
    elif kind == 4:
        os.mkfifo(path)


def another_name(chance: random.Random, folder: Path) -> None:
    names = ["step_000000000009", "step_8", "step_" + "9" * 200, NAME + "-01234567", NAME + "-new", "step_٠٠٠٠٠٠٠٠٠٠٠٨"]
    (folder / NAME).rename(folder / chance.choice(names))


MUTATIONS: tuple[Callable[[random.Random, Path], None], ...] = (
    any_byte, any_byte, swapped_files, sealed_manifest, sealed_manifest, key_that_stands_twice, nested_without_end,
    sealed_tree, sealed_tree, sealed_tree, one_array_named_often, sealed_header, sealed_header, sealed_header_length,
    sealed_damage, sparse_giant, another_kind_of_file, another_name,
)  # fmt: skip

# After these the checkpoint is another one that is rightly sealed, and may load as what it is now.
MAY_BE_ANOTHER_STATE = {
    key_that_stands_twice, nested_without_end, sealed_tree, one_array_named_often, sealed_header, sealed_damage,
}  # fmt: skip


# ---------------------------------------------------------------------- what must hold


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    return type(left) is type(right) and (left == right or left != left and right != right)


PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, np.ndarray)


def strangers(value: Any) -> list[type]:
    """The types in a loaded state that no state has."""
    stack, found = [value], []
    while stack:
        item = stack.pop()
        if type(item) in (list, tuple):
            stack.extend(item)
        elif type(item) is dict:
            stack.extend([*item.keys(), *item.values()])
        elif type(item) not in PLAIN:
            found.append(type(item))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "kept"}


class NoFlush(FileSystem):
    """Leaves out what a power cut alone would show, and what takes the time."""

    def sync(self, file: FileIO) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


def manager_of(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, keep_last=1, keep_best=1, warn=lambda message: None, fs=NoFlush())


class Model(nn.Module):
    """The model that `original` is the state of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.tied = nn.Parameter(torch.zeros(3, 4))
        self.scale = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))


OTHER_WAYS_TO_READ: tuple[Callable[[Path], Any], ...] = (
    lambda folder: manager_of(folder).entries(),
    lambda folder: manager_of(folder).latest_path(),
    lambda folder: manager_of(folder).verified_path(),
    lambda folder: manager_of(folder).verify(folder / NAME),
    lambda folder: manager_of(folder).copy_to(folder.parent / "copy"),
    lambda folder: export_safetensors(open_model(folder / NAME), folder.parent / "copy", fs=NoFlush()),
    lambda folder: load_initial_weights(Model(), folder / NAME),
)


def loaded(folder: Path, another_way: Callable[[Path], Any]) -> Any:
    """The state in the folder, None for a CheckpointError; reads it in another way too."""
    with suppress(CheckpointError):
        another_way(folder)
    try:
        return manager_of(folder).load_latest()
    except CheckpointError:
        return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    CheckpointManager(folder).save(8, original())
    return folder


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the largest tensor that was asked for."""
    asked, empty = [0], torch.empty

    def watched(shape: Any, *, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        count = 1
        for length in shape:
            count *= length
        asked[0] = max(asked[0], count * dtype.itemsize)
        return empty(shape, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", watched)
    return asked


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", range(4))
def test_mutated_checkpoints_are_errors_or_the_state_and_touch_nothing_else(
    part: int, tmp_path: Path, sound: Path, largest: list[int]
) -> None:
    expected = original()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes((sound / NAME / "state.json").read_bytes())
    outside = contents(tmp_path / "outside")
    outcomes = {"error": 0, "state": 0, "another": 0}
    tracemalloc.start()
    for number in range(part * CASES // 4, (part + 1) * CASES // 4):
        folder = tmp_path / "checkpoints"
        shutil.copytree(sound, folder)
        chance = random.Random(number)
        mutate = MUTATIONS[number % len(MUTATIONS)]
        mutate(chance, folder)
        case = f"case {number}: {mutate.__name__}"
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            state = loaded(folder, OTHER_WAYS_TO_READ[number % len(OTHER_WAYS_TO_READ)])
        except Exception as error:
            raise AssertionError(case) from error
        assert tracemalloc.get_traced_memory()[1] - before < 64 * 2**20, case
        if state is None:
            outcomes["error"] += 1
        elif same(state, expected):
            outcomes["state"] += 1
        else:
            assert mutate in MAY_BE_ANOTHER_STATE, case
            assert not strangers(state), case
            outcomes["another"] += 1
        assert {path.name for path in tmp_path.iterdir()} <= {"checkpoints", "copy", "outside"}, case
        assert contents(tmp_path / "outside") == outside, case
        for path in (folder, tmp_path / "copy", tmp_path / "outside" / "kept"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    tracemalloc.stop()
    assert largest[0] <= 4096, "no tensor is larger than the files"
    assert all(count > 20 for count in outcomes.values()), outcomes


@pytest.mark.parametrize("mutate", sorted(set(MUTATIONS), key=lambda mutation: mutation.__name__))
def test_saving_beside_a_mutated_checkpoint_works(
    mutate: Callable[[random.Random, Path], None], tmp_path: Path, sound: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    for number in range(4):
        folder = tmp_path / "checkpoints"
        shutil.copytree(sound, folder)
        mutate(random.Random(number), folder)
        manager = manager_of(folder)
        for step in (8, 9):
            manager.save(step, {**original(), "step": step})
        state = manager_of(folder).load_latest()
        assert state is not None
        assert state["step"] == 9
        assert (tmp_path / "outside" / "secret").read_bytes() == b"secret"
        shutil.rmtree(folder)
        for kept in (tmp_path / "outside").glob("kept"):
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
