from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.model import ReferenceTransformer
from speedtronic.precision import PrecisionPlan
from speedtronic.shapes import (
    ShapeProfile,
    ShapeReport,
    ShapeWarning,
    resolve_shape_profile,
    validate_startup_shapes,
)
from tests.support.cases import case
from tests.support.models import Events, Silence


def plan(mode: Any = "bf16", device_type: str = "cuda") -> PrecisionPlan:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[mode]
    return PrecisionPlan(mode, dtype, mode == "fp16", mode != "fp32", device_type)


def config(**sections: Any) -> SpeedtronicConfig:
    """A configuration with aligned sizes, except those given."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": 64, "max_seq_len": 64},
        "data": {"micro_batch_size": 8, "target_batch_size": 8},
    }
    return SpeedtronicConfig.from_dict(
        {name: {**tree.get(name, {}), **keys} for name, keys in {**tree, **sections}.items()}
    )


def validate(
    settings: SpeedtronicConfig,
    model: nn.Module | None = None,
    device: str = "cuda",
    mode: Any = "bf16",
    logger: Any = None,
) -> ShapeReport:
    return validate_startup_shapes(settings, model or nn.Linear(8, 8), device, plan(mode, device), logger)


def codes(report: ShapeReport) -> list[str]:
    return [warning.code for warning in report.warnings]


# For each warning, a configuration and a model that cause it, and the field, value and suggestion to expect.
CASES: dict[str, tuple[dict[str, Any], nn.Module, str, int, int | None]] = {
    "batch_alignment": (
        {"data": {"micro_batch_size": 12, "target_batch_size": 48}},
        nn.Identity(),
        "data.micro_batch_size",
        12,
        16,
    ),
    "sequence_alignment": ({"data": {"block_size": 60}}, nn.Identity(), "data.block_size", 60, 64),
    "token_alignment": (
        {"data": {"micro_batch_size": 3, "target_batch_size": 3, "block_size": 7}},
        nn.Identity(),
        "data.micro_batch_size * data.block_size",
        21,
        24,
    ),
    "model_alignment": ({}, nn.Sequential(nn.Linear(16, 12)), "0.out_features", 12, 16),
    "vocab_alignment": (
        {"model": {"vocab_size": 50257}, "shape_validation": {"check_vocab": True}},
        nn.Identity(),
        "model.vocab_size",
        50257,
        50264,
    ),
}


# ---------------------------------------------------------------- profile


def test_auto_is_8_for_half_precision_on_cuda_and_none_elsewhere() -> None:
    for device, mode, alignment in (
        ("cuda", "bf16", 8),
        ("cuda:1", "fp16", 8),
        ("cuda", "fp32", None),
        ("cpu", "bf16", None),
        ("cpu", "fp32", None),
        ("mps", "bf16", None),
    ):
        with case(device, mode, alignment):
            kind = device.partition(":")[0]
            expected = ShapeProfile(kind, mode, alignment, "auto")
            assert resolve_shape_profile(device, plan(mode, kind)) == expected
            assert resolve_shape_profile(torch.device(device), mode, "auto") == expected


def test_an_explicit_alignment_is_used_on_every_device() -> None:
    for device in ("cuda", "cpu"):
        with case(device):
            assert resolve_shape_profile(device, plan("fp32", device), 64) == ShapeProfile(
                device, "fp32", 64, "explicit"
            )
            for nothing in ("none", None):
                profile = resolve_shape_profile(device, plan("bf16", device), requested_alignment=nothing)  # type: ignore[arg-type]
                assert profile == ShapeProfile(device, "bf16", None, "explicit")


def test_an_alignment_that_is_not_a_whole_number_is_refused() -> None:
    for wrong in (0, -8, True, 8.0, "8", "many"):
        message = r"shape_validation\.alignment: must be 'auto', 'none' or"
        with case(wrong), pytest.raises(ConfigError, match=message):
            resolve_shape_profile("cuda", plan(), wrong)


# ---------------------------------------------------------------- warnings


@pytest.mark.parametrize("code", CASES)
def test_each_check_has_its_code_and_its_suggestion(code: str) -> None:
    sections, model, field, value, suggested = CASES[code]
    found = [warning for warning in validate(config(**sections), model).warnings if warning.code == code]
    assert len(found) == 1
    assert (found[0].field, found[0].value, found[0].suggested, found[0].alignment) == (field, value, suggested, 8)
    assert found[0].reason


def test_each_check_is_quiet_without_cuda_unless_asked_to_warn() -> None:
    for device in ("cpu", "mps"):
        for code in CASES:
            with case(device, code):
                sections, model, *_ = CASES[code]
                section = {"alignment": 8, **sections.get("shape_validation", {})}
                quiet = config(**{**sections, "shape_validation": section})
                assert validate(quiet, model, device, "fp32").warnings == ()
                loud = config(**{**sections, "shape_validation": {**section, "warn_on_cpu": True}})
                assert code in codes(validate(loud, model, device, "fp32"))


@pytest.mark.parametrize(
    ("code", "switch"),
    [
        ("batch_alignment", "check_batch"),
        ("sequence_alignment", "check_sequence"),
        ("token_alignment", "check_sequence"),
        ("model_alignment", "check_model"),
        ("vocab_alignment", "check_vocab"),
    ],
)
def test_each_check_can_be_switched_off(code: str, switch: str) -> None:
    sections, model, *_ = CASES[code]
    section = {**sections.get("shape_validation", {}), switch: False}
    assert code not in codes(validate(config(**{**sections, "shape_validation": section}), model))


@pytest.mark.parametrize("code", CASES)
def test_each_check_holds_against_an_explicit_alignment(code: str) -> None:
    sections, model, *_ = CASES[code]
    for alignment, warns in ((1, False), (256, True)):
        section = {**sections.get("shape_validation", {}), "alignment": alignment}
        report = validate(config(**{**sections, "shape_validation": section}), model, mode="fp32")
        assert (code in codes(report)) is warns
        assert all(warning.alignment == alignment for warning in report.warnings)


@pytest.mark.parametrize("section", [{"enabled": False}, {"alignment": "none"}])
def test_nothing_is_checked_if_the_validation_is_off(section: dict[str, Any]) -> None:
    settings = config(data={"micro_batch_size": 3, "target_batch_size": 3}, shape_validation=section)

    class Untouched(nn.Module):
        def speedtronic_shape_metadata(self) -> Any:
            raise AssertionError("nobody may ask")

    assert validate(settings, Untouched()).warnings == ()


def test_aligned_sizes_give_no_warning() -> None:
    settings = config(shape_validation={"check_vocab": True})
    model = ReferenceTransformer(vocab_size=64, block_size=64, n_layer=2, n_head=2, d_model=16, d_ff=48)
    assert validate(settings, model).warnings == ()


def test_auto_gives_no_warning_on_a_cpu() -> None:
    settings = config(data={"micro_batch_size": 3, "target_batch_size": 3}, shape_validation={"warn_on_cpu": True})
    assert validate(settings, device="cpu", mode="fp32").warnings == ()


# ---------------------------------------------------------------- the batch


def test_a_suggested_micro_batch_is_aligned_not_smaller_and_divides_the_target() -> None:
    for micro, target, suggested in (
        (3, 24, 8),
        (3, 12, None),
        (6, 48, 8),
        (12, 24, 24),
        (9, 72, 24),
        (20, 40, 40),
        (1, 1, None),
        (1, 2**31 - 8, 8),
    ):
        with case(micro, target, suggested):
            settings = config(data={"micro_batch_size": micro, "target_batch_size": target})
            found = [warning.suggested for warning in validate(settings).warnings if warning.code == "batch_alignment"]
            assert found == [suggested]
            if suggested is not None:
                settings.data.micro_batch_size = suggested
                settings.validate()
                assert "batch_alignment" not in codes(validate(settings))


def test_a_suggested_sequence_that_is_too_long_for_the_model_names_max_seq_len() -> None:
    (warning,) = validate(config(model={"max_seq_len": 60})).warnings
    assert warning.suggested == 64
    assert "model.max_seq_len" in warning.reason
    (warning,) = validate(config(data={"block_size": 60})).warnings
    assert "model.max_seq_len" not in warning.reason


# ---------------------------------------------------------------- the model


def test_a_width_that_many_layers_share_gives_one_warning() -> None:
    model = ReferenceTransformer(vocab_size=64, block_size=64, n_layer=6, n_head=2, d_model=20, d_ff=60)
    report = validate(config(), model)
    assert [(warning.field, warning.value, warning.suggested) for warning in report.warnings] == [
        ("transformer.wte.embedding_dim", 20, 24)
    ]
    assert "transformer.h.0.attn.q_proj.in_features" in report.warnings[0].reason


def test_each_width_of_a_model_gives_a_warning() -> None:
    model = nn.Sequential(nn.Conv1d(16, 20, 3), nn.ConvTranspose2d(20, 24, 3), nn.Linear(24, 30), nn.Embedding(9, 31))
    report = validate(config(), model)
    assert {(warning.field, warning.value) for warning in report.warnings} == {
        ("0.out_channels", 20),
        ("2.out_features", 30),
        ("3.embedding_dim", 31),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_is_not_taken_for_a_width_of_the_model(tied: bool) -> None:
    model = ReferenceTransformer(
        vocab_size=50257, block_size=64, n_layer=1, n_head=2, d_model=16, d_ff=48, tie_weights=tied
    )
    for vocab_size in (50257, 512):  # of the configuration, which a model of one's own may not follow
        assert validate(config(model={"vocab_size": vocab_size}), model).warnings == ()
    with_vocabulary = config(model={"vocab_size": 50257}, shape_validation={"check_vocab": True})
    assert codes(validate(with_vocabulary, model)) == ["vocab_alignment"]


class Named(nn.Module):
    """A model that names its dimensions itself, and has a layer that would be checked otherwise."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 30)
        self._answer = answer

    def speedtronic_shape_metadata(self) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_a_model_can_name_its_own_dimensions() -> None:
    model = Named({"head_size": 20, "d_model": 64, "vocab_size": 101})
    report = validate(config(), model)
    assert [(warning.code, warning.field, warning.value) for warning in report.warnings] == [
        ("model_alignment", "head_size", 20)
    ]
    report = validate(config(shape_validation={"check_model": False, "check_vocab": True}), model)
    assert [(warning.code, warning.value, warning.suggested) for warning in report.warnings] == [
        ("vocab_alignment", 101, 104)
    ]


@pytest.mark.parametrize(
    "answer",
    [RuntimeError("no idea"), 7, None, "text", {"d_model": "wide"}, {"d_model": 0}, {"d_model": True}, {3: 20}],
)
def test_a_failing_hook_is_a_warning_and_the_layers_are_read(answer: Any) -> None:
    report = validate(config(), Named(answer))
    assert codes(report) == ["model_metadata", "model_alignment"]
    assert report.warnings[0].field == "speedtronic_shape_metadata"
    assert report.warnings[0].value is report.warnings[0].suggested is None
    assert (report.warnings[1].field, report.warnings[1].value) == ("layer.out_features", 30)


def test_an_attribute_that_cannot_be_called_is_a_failing_hook() -> None:
    model = nn.Linear(8, 8)
    model.speedtronic_shape_metadata = 3  # type: ignore[assignment]
    assert codes(validate(config(), model)) == ["model_metadata"]


def test_a_hook_whose_lookup_fails_is_a_failing_hook() -> None:
    class Broken(nn.Linear):
        @property
        def speedtronic_shape_metadata(self) -> Any:
            raise RuntimeError("not built yet")

    report = validate(config(), Broken(8, 8))
    assert codes(report) == ["model_metadata"]
    assert "not built yet" in report.warnings[0].reason


def test_a_hook_may_return_numpy_integers() -> None:
    report = validate(config(), Named({"d_model": np.int64(20)}))
    assert [(warning.field, warning.value) for warning in report.warnings] == [("d_model", 20)]
    assert json.loads(json.dumps(report.as_dict()))["warnings"][0]["value"] == 20


def test_a_missing_block_size_is_the_models_length() -> None:
    settings = config(model={"max_seq_len": 60})
    settings.data.block_size = None
    assert [(w.code, w.value) for w in validate(settings).warnings] == [("sequence_alignment", 60)]


# ---------------------------------------------------------------- report and loggers

MISALIGNED: Mapping[str, Any] = {"data": {"micro_batch_size": 3, "target_batch_size": 6, "block_size": 7}}


def test_the_report_is_plain_data_in_a_fixed_order() -> None:
    model = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 11))
    settings = config(**MISALIGNED, shape_validation={"check_vocab": True}, model={"vocab_size": 65})
    report = validate(settings, model)
    assert codes(report) == [
        "batch_alignment",
        "sequence_alignment",
        "token_alignment",
        *["model_alignment"] * 3,
        "vocab_alignment",
    ]
    assert report == validate(settings, model)
    tree = json.loads(json.dumps(report.as_dict()))
    assert tree["profile"] == {"device_type": "cuda", "precision": "bf16", "alignment": 8, "source": "auto"}
    assert tree["warning_count"] == report.warning_count == 7
    assert tree["warnings"][0].keys() == {"code", "field", "value", "suggested", "alignment", "reason"}


def test_a_metric_logger_gets_an_event_for_each_warning_and_one_for_the_profile() -> None:
    events = Events()
    report = validate(config(**MISALIGNED), logger=MetricLogger(stream=Silence(), hooks=[events]))
    assert events.names() == ["shape_warning"] * 3 + ["shape_profile"]
    assert events.of("shape_warning") == report.as_dict()["warnings"]
    assert events.of("shape_profile") == [
        {"device_type": "cuda", "precision": "bf16", "alignment": 8, "warning_count": 3}
    ]


def test_a_terminal_shows_each_warning_once() -> None:
    screen = io.StringIO()
    validate(config(**MISALIGNED), logger=MetricLogger(stream=screen))
    warnings = [line for line in screen.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 3
    assert "field data.micro_batch_size  value 3" in warnings[0]
    assert not [line for line in warnings if line.endswith("...")]


@pytest.mark.parametrize("section", [{}, {"enabled": False}])
def test_an_unchecked_device_gets_a_profile_and_a_disabled_validation_sends_no_event(section: dict[str, Any]) -> None:
    events = Events()
    settings = config(**MISALIGNED, shape_validation=section)
    validate(settings, device="cpu", mode="fp32", logger=MetricLogger(stream=Silence(), hooks=[events]))
    assert events.names() == ([] if section else ["shape_profile"])


@pytest.mark.parametrize("adapted", [False, True])
def test_a_standard_library_logger_gets_a_line_for_each_warning(
    adapted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = logging.getLogger("shapes of a test")
    logger = logging.LoggerAdapter(plain, {}) if adapted else plain
    with caplog.at_level(logging.DEBUG, logger="shapes of a test"):
        report = validate(config(**MISALIGNED), Named(RuntimeError("100 % broken")), logger=logger)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * report.warning_count
    assert caplog.records[1].getMessage().startswith("data.block_size is 7, not a multiple of 8, such as 8: ")
    assert "data.micro_batch_size is 3, not a multiple of 8: " in caplog.text
    assert "RuntimeError: 100 % broken" in caplog.text


def test_a_warning_cannot_be_changed() -> None:
    warning = ShapeWarning("batch_alignment", "data.micro_batch_size", 3, 8, 8, "because")
    with pytest.raises(AttributeError):
        warning.value = 4  # type: ignore[misc]
