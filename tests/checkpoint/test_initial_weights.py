from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointError, CheckpointManager, initial_weights
from speedtronic.checkpoint.initial_weights import load_initial_weights


class Net(nn.Module):
    """Two layers, a tied head, and a buffer."""

    def __init__(self, width: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0))


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    safetensors.torch.save_file(dict(tensors), path, metadata)
    return path


def plain(model: nn.Module) -> dict[str, Tensor]:
    """The state without the tied name, each tensor in memory of its own."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def save_checkpoint(folder: Path, model: nn.Module, step: int = 1, manager: CheckpointManager | None = None) -> Path:
    state = {
        "model": model.state_dict(),
        "optimizer": {"big": torch.zeros(100)},
        "tokenizer": {"kind": "bytes"},
        "config": {"model": {"name": "net"}},
    }
    return (manager or CheckpointManager(folder)).save(step, state)


# ---------------------------------------------------------------- sources


def test_a_safetensors_file_fills_the_model(tmp_path: Path) -> None:
    source, model = net(1), net(2)
    source.count.fill_(7)
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_model(source, str(path))
    loaded = load_initial_weights(model, path)
    assert_equal(model, source)
    assert model.head.weight is model.embed.weight
    assert loaded.source == path
    assert loaded.loaded == ("count", "embed.weight", "inner.weight", "inner.bias", "head.weight")
    assert (loaded.tokenizer, loaded.model) == (None, None)


@pytest.mark.parametrize("what", ["checkpoint", "renamed", "checkpoints", "run"])
def test_one_of_our_checkpoints_fills_the_model(what: str, tmp_path: Path) -> None:
    source, model = net(1), net(2)
    checkpoint = save_checkpoint(tmp_path / "run/checkpoints", source)
    path = {"checkpoints": tmp_path / "run/checkpoints", "run": tmp_path / "run"}.get(what, checkpoint)
    if what == "renamed":
        path = checkpoint = checkpoint.rename(tmp_path / "best of all")
    loaded = load_initial_weights(model, path)
    assert_equal(model, source)
    assert loaded.source == checkpoint
    assert loaded.tokenizer == {"kind": "bytes"}
    assert loaded.model == {"name": "net"}


@pytest.mark.parametrize("where", ["checkpoint", "run"])
def test_the_average_of_a_run_that_kept_one_fills_the_model(where: str, tmp_path: Path) -> None:
    source, model = net(1), net(2)
    source.count.fill_(7)
    average = {name: torch.full_like(p, 0.5) for name, p in source.named_parameters(remove_duplicate=False)}
    average["head.weight"] = average["embed.weight"]
    manager = CheckpointManager(tmp_path / "checkpoints")
    checkpoint = manager.save(1, {"model": source.state_dict(), "ema": average, "tokenizer": None})
    loaded = load_initial_weights(model, tmp_path if where == "run" else checkpoint)
    assert loaded.averaged
    assert all((parameter == 0.5).all() for parameter in model.parameters())
    assert model.count == 7
    assert not load_initial_weights(model, save_checkpoint(tmp_path / "other", source)).averaged


def test_an_average_that_does_not_fit_is_listed_like_any_weight(tmp_path: Path) -> None:
    state = {"model": net().state_dict(), "ema": {"inner.bias": torch.zeros(9)}}
    with pytest.raises(CheckpointError, match=r"inner\.bias has shape \(9,\)"):
        load_initial_weights(net(), CheckpointManager(tmp_path).save(1, state))


@pytest.mark.parametrize("moment", ["read_trees", "_check_fit"])
def test_a_checkpoint_that_a_run_removes_meanwhile_gives_way_to_its_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints", keep_last=1)
    save_checkpoint(tmp_path, net(1), 1, manager)
    original, calls = getattr(initial_weights, moment), []

    def overtaken(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            save_checkpoint(tmp_path, net(2), 2, manager)
        return original(*arguments)

    monkeypatch.setattr(initial_weights, moment, overtaken)
    model = net()
    weights = load_initial_weights(model, tmp_path)
    assert weights.source.name == "step_000000000002"
    assert_equal(model, net(2))


def test_the_newest_sound_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints", keep_last=None)
    sources = [net(seed) for seed in range(3)]
    paths = [save_checkpoint(tmp_path, source, step + 1, manager) for step, source in enumerate(sources)]
    weights = paths[2] / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    told: list[str] = []
    model = net(9)
    assert load_initial_weights(model, tmp_path, warn=told.append).source == paths[1]
    assert_equal(model, sources[1])
    assert len(told) == 1
    assert paths[2].name in told[0]
    with pytest.raises(CheckpointError, match="checksum"):
        load_initial_weights(model, paths[2])


def test_a_folder_of_checkpoints_none_of_which_is_sound_is_an_error(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, net()) / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded"):
        load_initial_weights(net(), tmp_path)


def test_a_hugging_face_folder_fills_the_model(tmp_path: Path) -> None:
    source, model = net(1), net(2)
    write(tmp_path / "model.safetensors", plain(source), {"format": "pt"})
    assert load_initial_weights(model, tmp_path).source == tmp_path
    assert_equal(model, source)


def sharded(folder: Path, source: nn.Module, **files: str) -> Path:
    """A folder in which every tensor has a file of its own, or the one that `files` says."""
    weight_map = {}
    for number, (name, tensor) in enumerate(plain(source).items()):
        file = f"model-{number:05d}.safetensors"
        write(folder / file, {name: tensor})
        weight_map[name] = file
    weight_map.update({name.replace("_", "."): file for name, file in files.items()})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def test_a_tensor_that_the_model_has_not_because_it_is_of_ones_must_be_of_ones(tmp_path: Path) -> None:
    source, model = net(1), net(2)
    ones = {"scale": torch.ones(3, dtype=torch.bfloat16), "other": torch.ones(2)}
    write(tmp_path / "model.safetensors", plain(source) | ones)

    def translate(config: object, names: list[str]) -> dict[str, str | None]:
        return {name: None if name in ones else name for name in names}

    load_initial_weights(model, tmp_path, translate=translate)
    assert_equal(model, source)
    ones["scale"][2] = 1.5
    write(tmp_path / "model.safetensors", plain(source) | ones)
    with pytest.raises(CheckpointError, match="scale is not all ones there, and this model has no such weights"):
        load_initial_weights(model, tmp_path, translate=translate)


def test_a_sharded_hugging_face_folder_fills_the_model(tmp_path: Path) -> None:
    source, model = net(1), net(2)
    load_initial_weights(model, sharded(tmp_path, source))
    assert_equal(model, source)


def test_files_that_are_links_are_followed(tmp_path: Path) -> None:
    """A download cache keeps the files elsewhere and links to them."""
    source, model = net(1), net(2)
    write(tmp_path / "blob", plain(source))
    (tmp_path / "snapshot").mkdir()
    os.symlink("../blob", tmp_path / "snapshot/model.safetensors")
    load_initial_weights(model, tmp_path / "snapshot")
    assert_equal(model, source)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b"])
def test_an_index_cannot_lead_out_of_its_folder(file: str, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    write(tmp_path / "secret.safetensors", {"inner.bias": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="not a file of its own folder"):
        load_initial_weights(net(), sharded(tmp_path / "inside", net(), inner_bias=file))


@pytest.mark.parametrize("file", ["a\0.safetensors", "\ud800.safetensors"], ids=["null", "surrogate"])
def test_an_index_with_an_impossible_file_name_is_an_error(file: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a file of its own folder"):
        load_initial_weights(net(), sharded(tmp_path, net(), inner_bias=file))


def test_an_index_that_does_not_agree_with_its_files_is_an_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path, net(), inner_bias="model-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"inner\.bias is not in model-00000"):
        load_initial_weights(net(), folder)
    (tmp_path / "model-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: cannot be read: No such file"):
        load_initial_weights(net(), folder)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 9999])
def test_a_file_that_is_not_an_index_is_an_error(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_initial_weights(net(), tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
@pytest.mark.parametrize("by", ["file", "folder", "run"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(name: str, by: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" if by == "run" else tmp_path
    folder.mkdir(exist_ok=True)
    torch.save(net().state_dict(), folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}: a pickle, which could run code .*safetensors\.torch\.save"):
        load_initial_weights(net(), tmp_path / name if by == "file" else tmp_path)


def test_a_folder_without_weights_is_an_error_that_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_initial_weights(net(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no weights here.*model\.safetensors"):
        load_initial_weights(net(), tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 60, -1])
def test_a_damaged_file_is_named(cut: int, tmp_path: Path) -> None:
    path = write(tmp_path / "weights.safetensors", plain(net()))
    path.write_bytes(path.read_bytes()[:cut])
    model = net(2)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: "):
        load_initial_weights(model, path)
    assert_equal(model, net(2))


def test_a_file_of_anything_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("not weights at all", encoding="utf-8")
    with pytest.raises(CheckpointError, match="weights: not a safetensors file"):
        load_initial_weights(net(), tmp_path / "weights")


# ---------------------------------------------------------------- what fits


def test_every_mismatch_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    stored = plain(net(1))
    stored["inner.weight"] = torch.zeros(3, 4)
    stored["count"] = torch.tensor(1.5)
    del stored["inner.bias"]
    path = write(tmp_path / "weights.safetensors", stored | {"extra": torch.zeros(1)})
    model = net(2)
    with pytest.raises(CheckpointError) as caught:
        load_initial_weights(model, path)
    message = str(caught.value)
    assert message.splitlines()[1:-1] == [
        "  inner.bias is missing there",
        "  extra is not in this model",
        "  count has shape () torch.float32 there and () torch.int64 in this model",
        "  inner.weight has shape (3, 4) torch.float32 there and (3, 3) torch.float32 in this model",
    ]
    assert "run.init_strict: false" in message
    assert_equal(model, net(2))


def test_what_fits_is_loaded_where_that_is_enough(tmp_path: Path) -> None:
    stored = plain(net(1))
    stored["inner.weight"] = torch.zeros(3, 4)
    del stored["inner.bias"]
    path = write(tmp_path / "weights.safetensors", stored)
    told: list[str] = []
    model = net(2)
    loaded = load_initial_weights(model, path, strict=False, warn=told.append)
    assert loaded.loaded == ("count", "embed.weight")
    assert torch.equal(model.embed.weight, net(1).embed.weight)
    assert torch.equal(model.inner.weight, net(2).inner.weight)
    assert len(told) == 1
    assert "inner.bias is missing there" in told[0]
    assert "inner.weight has shape (3, 4)" in told[0]


def test_weights_of_which_nothing_fits_are_an_error_all_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.safetensors", {"embed.weight": torch.zeros(5, 4), "other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="none of these weights fits this model"):
        load_initial_weights(net(), path, strict=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_models_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {n: t.to(dtype) if t.is_floating_point() else t for n, t in plain(net(1)).items()}
    model = net(2)
    load_initial_weights(model, write(tmp_path / "weights.safetensors", stored))
    assert model.inner.weight.dtype == torch.float32
    assert torch.equal(model.inner.weight, stored["inner.weight"].float())


def test_a_value_that_the_models_dtype_does_not_hold_is_an_error(tmp_path: Path) -> None:
    stored = plain(net(1)) | {"inner.bias": torch.tensor([1.0, 7e4, 2.0])}
    path = write(tmp_path / "weights.safetensors", stored)
    with pytest.raises(CheckpointError, match=r"inner\.bias has values that are too large for torch\.float16"):
        load_initial_weights(net().half(), path)
    load_initial_weights(net().bfloat16(), path)


def test_an_infinite_weight_stays_infinite_in_another_dtype(tmp_path: Path) -> None:
    stored = plain(net(1)) | {"inner.bias": torch.tensor([1.0, float("inf"), 2.0])}
    model = net().half()
    load_initial_weights(model, write(tmp_path / "weights.safetensors", stored))
    assert model.inner.bias.isinf().tolist() == [False, True, False]


def test_parameters_stay_the_same_objects_and_trainable(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.safetensors", plain(net(1)))
    model = net(2)
    before = dict(model.named_parameters())
    load_initial_weights(model, path)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefix_of_a_wrapper_is_taken_off(prefix: str, tmp_path: Path) -> None:
    stored = {f"{prefix}{name}": tensor for name, tensor in plain(net(1)).items()}
    model = net(2)
    load_initial_weights(model, write(tmp_path / "weights.safetensors", stored))
    assert_equal(model, net(1))


def test_a_prefix_that_is_the_models_own_name_stays(tmp_path: Path) -> None:
    source, model = nn.ModuleDict({"module": nn.Linear(2, 2)}), nn.ModuleDict({"module": nn.Linear(2, 2)})
    load_initial_weights(model, write(tmp_path / "weights.safetensors", source.state_dict()))
    assert_equal(model, source)


def test_a_prefix_that_only_some_names_have_stays(tmp_path: Path) -> None:
    stored = plain(net(1))
    stored["module.inner.bias"] = stored.pop("inner.bias")
    with pytest.raises(CheckpointError, match=r"module\.inner\.bias is not in this model"):
        load_initial_weights(net(), write(tmp_path / "weights.safetensors", stored))


def test_the_weights_of_a_base_model_go_into_the_model_around_it(tmp_path: Path) -> None:
    class Around(nn.Module):
        base_model_prefix = "transformer"

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.transformer = inner

    base, model = net(1), Around(net(2))
    load_initial_weights(model, write(tmp_path / "weights.safetensors", plain(base)))
    assert_equal(model.transformer, base)


# ---------------------------------------------------------------- tied tensors


def test_a_tied_name_may_be_missing(tmp_path: Path) -> None:
    for kept in ("embed.weight", "head.weight"):
        stored = plain(net(1))
        stored[kept] = stored.pop("embed.weight")
        model = net(2)
        load_initial_weights(model, write(tmp_path / f"{kept}.safetensors", stored))
        assert_equal(model, net(1))


def test_both_names_of_a_tied_tensor_may_be_there_when_they_are_equal(tmp_path: Path) -> None:
    stored = plain(net(1))
    stored["head.weight"] = stored["embed.weight"].clone()
    model = net(2)
    load_initial_weights(model, write(tmp_path / "weights.safetensors", stored))
    assert_equal(model, net(1))


def test_different_weights_for_one_tied_tensor_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.safetensors", net(1, tied=False).state_dict())
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"head\.weight and embed\.weight differ there.*tie_weights"):
            load_initial_weights(net(), path, strict=strict)


def test_the_tied_weights_of_a_file_fill_both_tensors_of_an_untied_model(tmp_path: Path) -> None:
    safetensors.torch.save_model(net(1), str(tmp_path / "weights.safetensors"))
    model = net(2, tied=False)
    load_initial_weights(model, tmp_path / "weights.safetensors")
    assert torch.equal(model.head.weight, net(1).embed.weight)
    assert torch.equal(model.embed.weight, net(1).embed.weight)


def test_a_name_that_is_missing_for_an_untied_model_is_a_mismatch(tmp_path: Path) -> None:
    path = write(tmp_path / "weights.safetensors", plain(net(1)))
    with pytest.raises(CheckpointError, match=r"head\.weight is missing there"):
        load_initial_weights(net(tied=False), path)


# ---------------------------------------------------------------- memory


def test_memory_holds_one_tensor_of_the_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    alive: list[int] = []
    living = 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal living
        tensor = read(*arguments)
        living += 1

        def gone() -> None:
            nonlocal living
            living -= 1

        weakref.finalize(tensor, gone)
        alive.append(living)
        return tensor

    read = initial_weights.read_tensor
    monkeypatch.setattr(initial_weights, "read_tensor", counted)
    path = write(tmp_path / "weights.safetensors", source.state_dict())
    load_initial_weights(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))), path)
    assert len(alive) == 40
    assert max(alive) <= 2
