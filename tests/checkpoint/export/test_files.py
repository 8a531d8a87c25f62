from __future__ import annotations

import errno
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.export.files import (
    ExportError,
    HuggingFaceTokenizer,
    SavedModel,
    export_hugging_face,
    export_pretrained,
    export_safetensors,
    open_model,
)
from speedtronic.config import SpeedtronicConfig
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError
from speedtronic.model.transformer import NORM_EPS, ReferenceTransformer, build_reference_transformer

TOKENIZER = HuggingFaceTokenizer(json.dumps({"added_tokens": [{"id": 7, "content": "</s>"}]}), 7)


def config_of(**model: Any) -> SpeedtronicConfig:
    sizes = {"vocab_size": 40, "max_seq_len": 16, "n_layer": 2, "n_head": 2, "d_model": 16}
    return SpeedtronicConfig.from_dict({"model": sizes | model})


def built(config: SpeedtronicConfig) -> ReferenceTransformer:
    torch.manual_seed(3)
    return build_reference_transformer(config.model)


def save(folder: Path, model: nn.Module | dict[str, Any], config: SpeedtronicConfig | None = None) -> Path:
    state: dict[str, Any] = {"model": model.state_dict() if isinstance(model, nn.Module) else model}
    if config is not None:
        state["config"] = config.to_dict(redact_secrets=True)
    return CheckpointManager(folder).save(12, state)


@pytest.fixture
def saved(tmp_path: Path) -> SavedModel:
    """Of the reference transformer with a tied head."""
    return open_model(save(tmp_path / "checkpoints", built(config_of()), config_of()))


def llama(model: SavedModel, target: Path, **options: Any) -> Path:
    return export_hugging_face(model, target, norm_eps=NORM_EPS, **{"tokenizer": None, **options})


# --- one file ---


@pytest.mark.parametrize("tied", [True, False])
def test_the_library_loads_the_file_into_an_equal_model(tmp_path: Path, tied: bool) -> None:
    config = config_of(tie_weights=tied)
    model = built(config)
    file = export_safetensors(open_model(save(tmp_path / "c", model, config)), tmp_path / "out")
    assert file == tmp_path / "out" / "model.safetensors"
    other = ReferenceTransformer(model.config)
    assert load_model(other, file) == (set(), [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_file_tells_its_step_and_which_tensors_are_one(saved: SavedModel, tmp_path: Path) -> None:
    with safe_open(export_safetensors(saved, tmp_path / "w.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "12", "lm_head.weight": "transformer.wte.weight"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping


def test_any_model_is_exported_with_every_kind_of_tensor(tmp_path: Path) -> None:
    tensors = {
        "b16": torch.randn(3, 5).bfloat16(),
        "odd": torch.randn(7),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "count": torch.tensor(11),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 6).t(),
    }
    file = export_safetensors(open_model(save(tmp_path / "c", tensors)), tmp_path / "w.safetensors")
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_is_for_floating_point_tensors_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randn(3, dtype=torch.float64),
        "b": torch.randn(5),
        "steps": torch.tensor([1, 2, 2**40]),
        "small": torch.tensor([1, 2, 3], dtype=torch.int32),
    }
    model = open_model(save(tmp_path / "c", tensors))
    loaded = load_file(export_safetensors(model, tmp_path / "w.safetensors", dtype=dtype))
    assert torch.equal(loaded["a"], tensors["a"].to(dtype))
    assert torch.equal(loaded["b"], tensors["b"].to(dtype))
    assert torch.equal(loaded["steps"], tensors["steps"])
    assert torch.equal(loaded["small"], tensors["small"])


def test_a_value_that_a_dtype_does_not_hold_is_an_error(tmp_path: Path) -> None:
    model = open_model(save(tmp_path / "c", {"ok": torch.ones(2), "layer.weight": torch.tensor([1.0, 7e4])}))
    with pytest.raises(CheckpointError, match=r"layer\.weight has values that are too large for torch\.float16"):
        export_safetensors(model, tmp_path / "w.safetensors", dtype=torch.float16)
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob(".tmp*"))
    assert export_safetensors(model, tmp_path / "w.safetensors", dtype=torch.bfloat16).is_file()


def test_an_infinite_weight_stays_infinite(tmp_path: Path) -> None:
    model = open_model(save(tmp_path / "c", {"w": torch.tensor([float("inf"), float("nan"), 1.0])}))
    loaded = load_file(export_safetensors(model, tmp_path / "w.safetensors", dtype=torch.float16))["w"]
    assert loaded.isinf().tolist() == [True, False, False]
    assert loaded.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "odd", [torch.ones(2, dtype=torch.complex64), {"inner": torch.ones(2)}, 5], ids=["complex", "nested", "number"]
)
def test_a_model_with_more_than_plain_tensors_is_refused(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(CheckpointError, match=r"real tensors.*\(odd\)"):
        open_model(save(tmp_path / "c", {"fine": torch.ones(2), "odd": odd}))


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model"):
        open_model(CheckpointManager(tmp_path).save(1, {"x": 1}))


def test_the_checkpoint_may_have_been_renamed(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"w": torch.ones(2)})
    assert open_model(checkpoint.rename(tmp_path / "best")).step == 12


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"w": torch.ones(2)})
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step_000000000012: model\.safetensors is damaged"):
        open_model(checkpoint)


def test_a_checkpoint_that_is_cut_while_it_is_read_leaves_nothing(saved: SavedModel, tmp_path: Path) -> None:
    os.truncate(saved.path / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match="ends too early"):
        export_safetensors(saved, tmp_path / "w.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


# --- the average ---


def averaged(folder: Path, model: nn.Module, config: SpeedtronicConfig | None = None, **other: Any) -> Path:
    """A checkpoint whose averaged weights are float32, and twice those of the model."""
    weights = {tensor: 2 * tensor.detach().float() for tensor in model.parameters()}
    average = {name: weights[tensor] for name, tensor in model.named_parameters(remove_duplicate=False)}
    state: dict[str, Any] = {"model": model.state_dict(), "ema": {**average, **other}}
    if config is not None:
        state["config"] = config.to_dict(redact_secrets=True)
    return CheckpointManager(folder).save(12, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_exported_in_the_models_dtype_and_the_rest_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype)
    saved = open_model(averaged(tmp_path / "c", model))
    loaded = load_file(export_safetensors(saved, tmp_path / "w.safetensors"))
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        expected = 2 * tensor if name in dict(model.named_parameters()) else tensor
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], expected)


def test_the_averages_own_precision_can_be_asked_for(tmp_path: Path) -> None:
    model, exact = nn.Linear(2, 2).to(torch.bfloat16), torch.full((2, 2), 1 + 2**-20)
    saved = open_model(averaged(tmp_path / "c", model, weight=exact))
    loaded = load_file(export_safetensors(saved, tmp_path / "w.safetensors", dtype=torch.float32))
    assert torch.equal(loaded["weight"], exact)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_has_the_averaged_weights(tmp_path: Path, tied: bool) -> None:
    config = config_of(tie_weights=tied)
    model = built(config)
    loaded = load_file(
        llama(open_model(averaged(tmp_path / "c", model, config)), tmp_path / "hf") / "model.safetensors"
    )
    assert ("lm_head.weight" in loaded) is not tied
    assert torch.equal(loaded["model.embed_tokens.weight"], 2 * model.get_parameter("transformer.wte.weight"))
    assert torch.equal(loaded["model.norm.weight"], 2 * model.get_parameter("transformer.norm.weight"))


def test_an_average_that_a_dtype_does_not_hold_is_named_as_the_model_names_it(tmp_path: Path) -> None:
    saved = open_model(averaged(tmp_path / "c", nn.Linear(2, 2), weight=torch.full((2, 2), 7e4)))
    with pytest.raises(CheckpointError, match=": weight has values that are too large"):
        export_safetensors(saved, tmp_path / "w.safetensors", dtype=torch.float16)


@pytest.mark.parametrize(
    "other",
    [
        {"weight": torch.zeros(3, 2)},
        {"weight": torch.zeros(2, 2, dtype=torch.int64)},
        {"strange": torch.zeros(1)},
        {"weight": torch.zeros(2, 2, dtype=torch.complex64)},
        {"weight": 5},
    ],
    ids=["shape", "dtype", "name", "complex", "number"],
)
def test_an_average_of_another_model_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    checkpoint = averaged(tmp_path / "c", nn.Linear(2, 2), **other)
    with pytest.raises(CheckpointError, match=r"step_000000000012: .*averaged weights \(optimizer\.ema\) are not"):
        open_model(checkpoint)


# --- a folder ---


def test_a_folder_has_what_a_llama_needs(saved: SavedModel, tmp_path: Path) -> None:
    folder = llama(saved, tmp_path / "hf", tokenizer=TOKENIZER)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["eos_token_id"]) == ("llama", "float32", 7)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (7, 7)
    assert (folder / "tokenizer.json").read_text() == TOKENIZER.json
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    assert (tokens["eos_token"], tokens["model_max_length"]) == ("</s>", 16)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert weights["model.embed_tokens.weight"].shape == (40, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalised_heads_have_norms_with_weights_of_one(tmp_path: Path, dtype: torch.dtype) -> None:
    config = config_of(qk_norm=True)
    folder = llama(open_model(save(tmp_path / "c", built(config), config)), tmp_path / "hf", dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    norms = {name: tensor for name, tensor in weights.items() if "q_norm" in name or "k_norm" in name}
    assert len(norms) == 4
    assert all(torch.equal(tensor, torch.ones(8, dtype=dtype)) for tensor in norms.values())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


def test_a_folder_without_a_tokenizer_has_no_file_for_one(saved: SavedModel, tmp_path: Path) -> None:
    folder = llama(saved, tmp_path / "hf", tokenizer=HuggingFaceTokenizer(None, 3))
    assert not list(folder.glob("tokenizer*"))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 3


def test_the_configuration_names_the_dtype_of_the_weights(saved: SavedModel, tmp_path: Path) -> None:
    folder = llama(saved, tmp_path / "hf", dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_another_model_is_refused_with_the_format_that_it_has(tmp_path: Path) -> None:
    foreign = open_model(save(tmp_path / "c", nn.Linear(2, 2), config_of(name="mine")))
    with pytest.raises(CheckpointError, match="the model 'mine'; export it with --format safetensors"):
        llama(foreign, tmp_path / "hf")
    nameless = open_model(save(tmp_path / "d", nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match="without a configuration; export it with --format safetensors"):
        llama(nameless, tmp_path / "hf")


def test_another_model_under_the_name_of_the_reference_is_refused(tmp_path: Path) -> None:
    impostor = open_model(save(tmp_path / "c", nn.Linear(2, 2), config_of()))
    with pytest.raises(CheckpointError, match=r"(?s)not the weights of the reference.*bias is not in the reference"):
        llama(impostor, tmp_path / "hf")


def test_weights_of_several_dtypes_need_one_to_be_chosen(tmp_path: Path) -> None:
    model = built(config_of())
    model.transformer["norm"].double()
    mixed = open_model(save(tmp_path / "c", model, config_of()))
    with pytest.raises(CheckpointError, match="--dtype"):
        llama(mixed, tmp_path / "hf")
    assert llama(mixed, tmp_path / "hf", dtype=torch.float32).is_dir()


# --- a model that writes itself ---


class Pretrained(nn.Module):
    """Writes itself as a model of Hugging Face does, in two files."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        (Path(folder) / "config.json").write_text(json.dumps({"dtype": str(self.linear.weight.dtype)}))
        for number, (name, tensor) in enumerate(self.state_dict().items(), 1):
            save_file({name: tensor.contiguous()}, Path(folder) / f"model-{number:05d}-of-00002.safetensors")


def pretrained(model: SavedModel, target: Path, **options: Any) -> Path:
    return export_pretrained(model, Pretrained(), target, **{"tokenizer": None, **options})


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def saved_by_itself(tmp_path: Path) -> SavedModel:
    torch.manual_seed(4)
    return open_model(save(tmp_path / "its checkpoints", Pretrained(), config_of(name="mine")))


def test_a_model_writes_itself_with_the_weights_of_the_run(saved_by_itself: SavedModel, tmp_path: Path) -> None:
    folder = pretrained(saved_by_itself, tmp_path / "hf", tokenizer=TOKENIZER)
    expected = load_file(saved_by_itself.path / "model.safetensors")
    actual = weights_in(folder)
    assert actual.keys() == expected.keys() == {"linear.weight", "linear.bias"}
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert (folder / "tokenizer.json").read_text() == TOKENIZER.json
    pretrained(saved_by_itself, folder, replace=True, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in weights_in(folder).values()} == {torch.bfloat16}
    assert not (folder / "tokenizer.json").exists()


def test_the_settings_of_the_folder_of_a_tokenizer_are_exported_with_it(
    saved_by_itself: SavedModel, tmp_path: Path
) -> None:
    with_settings = TOKENIZER._replace(settings={"eos_token": "<end of turn>"}, chat_template=b"{{ messages }}")
    folder = pretrained(saved_by_itself, tmp_path / "hf", tokenizer=with_settings)
    assert (folder / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    written = json.loads((folder / "tokenizer_config.json").read_bytes())
    assert (written["eos_token"], written["bos_token"]) == ("<end of turn>", "</s>")
    pretrained(saved_by_itself, folder, replace=True)
    assert not (folder / "chat_template.jinja").exists()


def test_a_model_writes_itself_with_its_averaged_weights(tmp_path: Path) -> None:
    average = {"linear.weight": torch.full((4, 3), 2.0), "linear.bias": torch.zeros(4)}
    state = {"model": Pretrained().state_dict(), "ema": average}
    folder = pretrained(open_model(CheckpointManager(tmp_path / "c").save(1, state)), tmp_path / "hf")
    assert all(torch.equal(tensor, average[name]) for name, tensor in weights_in(folder).items())


def test_a_model_that_cannot_write_itself_or_has_other_weights_is_refused(
    saved_by_itself: SavedModel, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"method save_pretrained .* this is Linear; export it with --format"):
        export_pretrained(saved_by_itself, nn.Linear(2, 2), tmp_path / "hf", tokenizer=None)
    other = open_model(save(tmp_path / "c", nn.Linear(2, 2), config_of(name="mine")))
    with pytest.raises(CheckpointError, match=r"linear\.weight is missing there"):
        pretrained(other, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_a_model_raises_while_it_writes_leaves_nothing(saved_by_itself: SavedModel, tmp_path: Path) -> None:
    class Broken(Pretrained):
        def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
            super().save_pretrained(folder)
            raise RuntimeError("a mistake of the model")

    with pytest.raises(RuntimeError, match="a mistake of the model"):
        export_pretrained(saved_by_itself, Broken(), tmp_path / "hf", tokenizer=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["its checkpoints"]


# --- what is there already ---


def test_what_is_there_is_kept_unless_asked_otherwise(saved: SavedModel, tmp_path: Path) -> None:
    file, folder = tmp_path / "w.safetensors", tmp_path / "hf"
    file.write_text("old")
    llama(saved, folder)
    with pytest.raises(CheckpointError, match="--force"):
        export_safetensors(saved, file)
    with pytest.raises(CheckpointError, match="--force"):
        llama(saved, folder)
    assert file.read_text() == "old"
    export_safetensors(saved, file, replace=True)
    llama(saved, folder, replace=True, tokenizer=TOKENIZER)
    assert load_file(file)
    assert (folder / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "hf", "w.safetensors"]


def test_an_empty_folder_is_filled(saved: SavedModel, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    assert (llama(saved, tmp_path / "hf") / "config.json").exists()


def test_a_folder_with_anything_else_is_never_replaced(saved: SavedModel, tmp_path: Path) -> None:
    folder = llama(saved, tmp_path / "hf")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"'notes\.txt', which is not part of an export"):
        llama(saved, folder, replace=True)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("which", ["itself", "another", "renamed"])
def test_no_checkpoint_is_ever_written_to(which: str, saved: SavedModel, tmp_path: Path) -> None:
    target = saved.path if which == "itself" else save(tmp_path / "others", built(config_of()))
    if which == "renamed":
        target = target.rename(tmp_path / "best")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for place in (target, target / "model.safetensors", target / "deeper"):
        with pytest.raises(CheckpointError, match=f"inside the checkpoint {target.name}; name another place"):
            export_safetensors(saved, place, dtype=torch.float16, replace=True)
    for place in (target, target / "deeper"):
        with pytest.raises(CheckpointError, match=f"inside the checkpoint {target.name}; name another place"):
            llama(saved, place, replace=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_an_export_may_be_named_as_a_checkpoint_is(saved: SavedModel, tmp_path: Path) -> None:
    assert export_safetensors(saved, tmp_path / "exports" / "step_000000000012").is_file()
    assert llama(saved, tmp_path / "exports" / "step_000000000013").is_dir()


def test_a_file_in_place_of_a_folder_and_the_reverse_are_named(saved: SavedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file; name a folder"):
        llama(saved, tmp_path / "file", replace=True)
    with pytest.raises(CheckpointError, match="has the name of a file; name a folder"):
        llama(saved, tmp_path / "new.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a folder; name a file"):
        export_safetensors(saved, tmp_path / "folder.safetensors", replace=True)


# --- faults ---


class FailingAt(FileSystem):
    """Lets the n-th change to the disk fail, writes in their middle."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)

    def create(self, path: Path) -> FileIO:
        self._count()
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        super().write(file, data[: len(data) // 2])
        self._count()
        super().write(file, data[len(data) // 2 :])

    def sync(self, file: FileIO) -> None:
        self._count()
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("exported", [export_safetensors, llama, pretrained])
@pytest.mark.parametrize("exists", [False, True])
def test_whatever_fails_the_old_export_stays_or_the_new_one_is_whole(
    saved: SavedModel, saved_by_itself: SavedModel, tmp_path: Path, exported: Any, exists: bool
) -> None:
    saved = saved_by_itself if exported is pretrained else saved
    exported(saved, tmp_path / "whole" / "out", dtype=torch.float16)
    new = contents(tmp_path / "whole")
    if exists:
        exported(saved, tmp_path / "former" / "out")
    old = contents(tmp_path / "former")
    failures = 0
    for fail_at in range(1, 1000):
        place = tmp_path / f"try{fail_at}"
        if exists:
            exported(saved, place / "out")
        fs = FailingAt(fail_at)
        try:
            exported(saved, place / "out", dtype=torch.float16, replace=exists, fs=fs)
        except ExportError as error:
            failures += 1
            assert "No space left on device" in str(error)  # noqa: PT017 - the last one does not raise
        else:
            break
        assert contents(place) in (old, new), list(contents(place))
    assert failures > 5
    assert contents(place) == new


def test_an_interrupt_leaves_nothing(saved: SavedModel, tmp_path: Path) -> None:
    class Interrupted(FileSystem):
        def sync(self, file: FileIO) -> None:
            raise KeyboardInterrupt

    for exported in (export_safetensors, llama):
        with pytest.raises(KeyboardInterrupt):
            exported(saved, tmp_path / "out", fs=Interrupted())
    assert contents(tmp_path / "out") == {}
    assert not list(tmp_path.rglob(".tmp*"))


def test_a_disk_that_cannot_be_read_is_not_blamed_on_the_target(saved: SavedModel, tmp_path: Path) -> None:
    class Unreadable(FileSystem):
        def open(self, path: Path) -> FileIO:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match=r"step_000000000012: cannot be read: Input/output error"):
        export_safetensors(saved, tmp_path / "w.safetensors", fs=Unreadable())


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.zeros(1000 + number) for number in range(20)}
    model = open_model(save(tmp_path / "c", tensors))
    ahead: list[int] = []

    class Counting(FileSystem):
        def open(self, path: Path) -> FileIO:
            ahead.append(0)

            class Counted(FileIO):
                def readinto(self, buffer: Any) -> int:
                    count = super().readinto(buffer)
                    ahead.append(ahead[-1] + count)
                    return count

            return Counted(path, "rb")

        def write(self, file: FileIO, data: memoryview) -> None:
            super().write(file, data)
            if ahead:
                ahead.append(ahead[-1] - len(data))

    export_safetensors(model, tmp_path / "w.safetensors", fs=Counting())
    assert max(ahead) <= 4 * 1019
    assert ahead[-1] == 0
