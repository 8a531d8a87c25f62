"""What a run's evaluations are: named sets, texts, and no trace in the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic import register_model
from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import DataConfig, load_config
from speedtronic.data import CharTokenizer, ShardWriter
from speedtronic.errors import ConfigError, DataError, SpeedtronicError
from speedtronic.evaluation import Evaluation
from speedtronic.runtime import build_runtime, train_from_config
from tests.support.configs import tiny
from tests.support.models import Events


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """The runs' console lines go to the capture."""


@register_model("scores of three classes", replace=True)
class Scores(nn.Module):
    """Dropout, batch norm, and the scores of three classes for four numbers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.inner(x)
        return scores


def samples(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    # Classes that can be learned, and some noise.
    labels = (x[:, :3] + 0.7 * torch.randn(count, 3, generator=generator)).argmax(-1)
    return list(zip(x, labels, strict=True))


def classes(data: DataConfig) -> Any:
    return samples(40, 0), samples(23, 1)


def more(data: DataConfig) -> Any:
    return samples(11, 2)


class Accuracy:
    def __init__(self) -> None:
        self.reset()

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right += int((preds.argmax(-1) == target).sum())
        self.count += len(target)

    def compute(self) -> float:
        torch.rand(3)
        return self.right / self.count

    def reset(self) -> None:
        self.right = self.count = 0


def classifier(folder: Path, **sections: Any) -> dict[str, Any]:
    here = __name__
    evaluation = {
        "every_steps": 2,
        "metrics": [{"name": "accuracy", "factory": f"{here}:Accuracy"}],
        "sets": {"more": {"dataset": f"{here}:more"}},
        "monitor": "accuracy",
        "mode": "max",
    }
    return tiny(
        folder,
        run={"max_steps": 30, "threads": 1},
        model={"name": "scores of three classes"},
        data={"dataset": f"{here}:classes", "micro_batch_size": 5, "target_batch_size": 10, "shuffle": True},
        optimizer={"lr": 0.05},
        loss="cross_entropy",
        logging={"json_file": "log.jsonl"},
        **{
            "checkpoint": {"every_steps": 1, "keep_last": 1, "keep_best": 1},
            **sections,
            "eval": {**evaluation, **sections.get("eval", {})},
        },
    )


def records(folder: Path, event: str = "eval") -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def weights(folder: Path) -> dict[str, Tensor]:
    state = CheckpointManager(folder / "checkpoints").load_latest()
    assert state is not None
    found: dict[str, Tensor] = state["model"]
    return found


def accuracy_by_hand(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    return sum(int(model(x[None])[0].argmax()) == int(label) for x, label in data) / len(data)


def test_each_set_has_its_record_on_every_sink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = build_runtime(classifier(tmp_path), max_steps=2)
    events = Events()
    trainer.logger.add_hook(events)
    with trainer.logger:
        result = trainer.fit()
    own, other = records(tmp_path)
    assert [(one["step"], one["set"], one["targets"]) for one in (own, other)] == [(2, "held_out", 23), (2, "more", 11)]
    assert own["accuracy"] == pytest.approx(accuracy_by_hand(trainer.model, samples(23, 1)), abs=1e-6)
    assert other["accuracy"] == pytest.approx(accuracy_by_hand(trainer.model, samples(11, 2)), abs=1e-6)
    assert result.eval_loss == own["loss"]
    assert [seen["set"] for seen in events.of("eval")] == ["held_out", "more"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval ")]
    assert len(lines) == 2
    assert f"set more  loss {other['loss']:.4f}  accuracy {other['accuracy']:.4g}" in lines[1]


def test_evaluations_leave_no_trace_in_the_training(tmp_path: Path) -> None:
    """Metrics, further sets and texts change no mode, no random number and no buffer."""
    train_from_config(classifier(tmp_path / "all"), max_steps=6)
    bare = {"every_steps": None, "at_end": False, "metrics": [], "sets": {}, "monitor": "loss", "mode": None}
    train_from_config(classifier(tmp_path / "none", eval=bare, checkpoint={}), max_steps=6)
    assert len(records(tmp_path / "all")) == 6
    first, second = weights(tmp_path / "all"), weights(tmp_path / "none")
    assert all(torch.equal(first[name], second[name]) for name in first)


def outcome(folder: Path) -> Any:
    manager = CheckpointManager(folder / "checkpoints")
    lines = [{key: one[key] for key in ("step", "set", "loss", "accuracy")} for one in records(folder)]
    return lines, manager.best_path().name, [entry.step for entry in manager.entries()]


def test_early_stopping_and_the_best_checkpoint_are_bit_exact_across_a_resume(tmp_path: Path) -> None:
    early = {"patience": 2, "at_end": False}
    whole = train_from_config(classifier(tmp_path / "whole", eval=early))
    assert 4 < whole.steps < 30, "the run should stop early"
    lines, best, kept = outcome(tmp_path / "whole")
    measured = {one["step"]: one["accuracy"] for one in lines if one["set"] == "held_out"}
    assert best == f"step_{max(measured, key=lambda step: (measured[step], step)):012d}"
    for cut in (1, whole.steps - 3, whole.steps - 2, whole.steps - 1):
        folder = tmp_path / f"cut at {cut}"
        train_from_config(classifier(folder, eval=early), max_steps=cut)
        rest = train_from_config(classifier(folder, eval=early), resume=True)
        assert rest.steps == whole.steps
        assert outcome(folder) == (lines, best, kept)
        first, second = weights(tmp_path / "whole"), weights(folder)
        assert all(torch.equal(first[name], second[name]) for name in first)
    # What has stopped early trains nothing more.
    again = train_from_config(classifier(tmp_path / "whole", eval=early), resume=True)
    assert (again.steps, len(again.metrics)) == (whole.steps, 0)


def text_run(folder: Path, **sections: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    (folder / "other.txt").write_text("a dog ran to the tea. " * 9)
    data = {"text_path": str(folder / "text.txt"), **sections.pop("data", {})}
    log = {"json_file": "log.jsonl"}
    return tiny(folder, run={"threads": 1}, model={"vocab_size": 256}, data=data, logging=log, **sections)


def test_without_a_held_out_part_the_first_set_is_that_of_the_run(tmp_path: Path) -> None:
    sets = {"b": {"text_path": str(tmp_path / "other.txt")}, "a": {"text_path": str(tmp_path / "text.txt")}}
    config = load_config(text_run(tmp_path, eval={"every_steps": 2, "sets": sets}))
    assert config.data.validation_fraction == 0.0
    result = train_from_config(config)
    assert [(one["step"], one["set"]) for one in records(tmp_path)] == [(2, "b"), (2, "a"), (4, "b"), (4, "a")]
    assert result.eval_loss == records(tmp_path)[-2]["loss"]
    for one in records(tmp_path):
        assert one["bits_per_byte"] == pytest.approx(one["loss"] / 0.6931471805599453)


def test_the_model_writes_at_each_evaluation_and_the_same_text_from_the_same_weights(tmp_path: Path) -> None:
    section = {"every_steps": 2, "samples": 2, "prompts": ["the ", ""], "sample_tokens": 7}
    train_from_config(text_run(tmp_path, eval=section, optimizer={"lr": 0.0}))
    texts = records(tmp_path, "sample")
    assert [one["step"] for one in texts] == [2] * 4 + [4] * 4
    assert [one["prompt"] for one in texts[:4]] == ["the ", "the ", "", ""]
    assert all(1 <= len(one["text"]) <= 7 for one in texts)
    # The weights stayed, since the learning rate is 0.
    assert [one["text"] for one in texts[:4]] == [one["text"] for one in texts[4:]]
    assert texts[0]["text"] != texts[1]["text"]


def test_texts_change_nothing_in_the_training(tmp_path: Path) -> None:
    model = {"dropout": 0.2, "vocab_size": 256}
    losses = []
    for name, section in (("with", {"samples": 1, "sample_tokens": 5}), ("without", {})):
        config = text_run(tmp_path / name, eval={"every_steps": 1, **section})
        config["model"] |= model
        losses.append([record["loss"] for record in train_from_config(config).metrics])
    assert losses[0] == losses[1]


def shards(folder: Path, tokenizer: CharTokenizer) -> str:
    with ShardWriter(folder, tokenizer=tokenizer) as writer:
        writer.write(tokenizer.encode_array("some more words that nobody has trained on, thirty or so"))
        writer.end_document()
    return str(folder)


def a_pair(data: DataConfig) -> Any:
    return samples(4, 0), samples(4, 1)


def test_sets_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    other = str(tmp_path / "other.txt")
    smaller = shards(tmp_path / "shards", CharTokenizer(200))
    right = shards(tmp_path / "right", CharTokenizer(256))
    text_run(tmp_path)
    for section, data, said in (
        ({"shards": smaller}, {}, r"eval\.sets\.x\.shards: .* another tokenizer"),
        ({"text_path": other}, {"text_path": None}, r"eval\.sets\.x\.text_path: the training data has no tokenizer"),
        ({"text_path": "nowhere.txt"}, {}, r"eval\.sets\.x: .*nowhere\.txt"),
        ({"text_path": other, "block_size": 99}, {}, r"eval\.sets\.x: data\.block_size is 99"),
        ({"text_path": other, "labels": "unshifted"}, {}, r"eval\.sets\.x: data\.labels: unshifted"),
        ({"dataset": f"{__name__}:a_pair"}, {}, r"eval\.sets\.x\.dataset: .*returned a pair"),
    ):
        config = text_run(tmp_path, eval={"sets": {"x": section}}, data=data)
        with pytest.raises(SpeedtronicError, match=said):
            build_runtime(config)
    trainer, _ = build_runtime(text_run(tmp_path, eval={"sets": {"x": {"shards": right}}}))
    assert trainer.fit(1).eval_loss is not None


def test_what_cannot_be_evaluated_or_written_is_refused_before_training(tmp_path: Path) -> None:
    for sections, error, said in (
        ({"eval": {"samples": 1}}, ConfigError, "eval.samples: nothing is held out"),
        ({"eval": {"samples": 1}, "data": {"validation_fraction": 0.1}}, ConfigError, "has no tokenizer"),
        ({"eval": {"metrics": [{"name": "a", "factory": "a:b"}]}}, ConfigError, "eval.metrics: nothing is held out"),
        ({"eval": {"monitor": "f1", "mode": "max"}}, ConfigError, "eval.monitor: no evaluation has 'f1'"),
        ({"eval": {"monitor": "x/loss"}}, ConfigError, "eval.monitor: 'x' is none of the sets"),
    ):
        with pytest.raises(error, match=said):
            build_runtime(tiny(tmp_path, **sections))
    perplexity = {"every_steps": 1, "monitor": "perplexity", "mode": "min"}
    with pytest.raises(ConfigError, match=r"eval\.monitor: perplexity is of language models"):
        build_runtime(classifier(tmp_path, eval=perplexity))
    bits = {**perplexity, "monitor": "held_out/bits_per_byte"}
    with pytest.raises(ConfigError, match=r"held_out/bits_per_byte needs the bytes of each token"):
        build_runtime(text_run(tmp_path, data={"tokenizer": "chars"}, eval=bits))
    characters = text_run(
        tmp_path, data={"tokenizer": "chars"}, eval={"every_steps": 1, "samples": 1, "prompts": ["Q"]}
    )
    with pytest.raises(DataError, match="'Q'"):
        build_runtime(characters)


def test_an_error_names_the_set_and_a_signal_ends_all_of_them() -> None:
    def broken(model: nn.Module, should_stop: Any) -> Any:
        raise DataError("there is no target")

    def fine(model: nn.Module, should_stop: Any) -> Any:
        return None if should_stop() else {"loss": 1.0}

    evaluation = Evaluation({"one": fine, "two": broken})  # type: ignore[dict-item]  # functions stand for sets
    with pytest.raises(DataError) as caught:
        evaluation(nn.Linear(1, 1))
    assert caught.value.__notes__ == ["raised by the evaluation of the set two"]
    assert evaluation(nn.Linear(1, 1), lambda: True) is None
