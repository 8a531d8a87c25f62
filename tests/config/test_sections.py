from __future__ import annotations

import copy
import math
import pickle
from pathlib import PurePosixPath

import pytest

from speedtronic.config import (
    CheckpointConfig,
    CompileOptions,
    ConfigError,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    SchedulerConfig,
    ShapeValidationConfig,
    SpeedtronicConfig,
)
from speedtronic.config.base import Section

# The resolved default of every key.
DEFAULTS = {
    "run": {
        "name": "speedtronic-run",
        "seed": 1234,
        "device": "auto",
        "max_steps": 1000,
        "output_dir": "runs",
        "log_every": None,
        "on_nonfinite": "stop",
        "init_from": None,
        "init_strict": True,
        "deterministic": False,
        "threads": None,
    },
    "model": {
        "name": "reference_transformer",
        "vocab_size": 512,
        "max_seq_len": 128,
        "n_layer": 4,
        "n_head": 8,
        "n_kv_head": 8,
        "d_model": 256,
        "d_ff": 1024,
        "dropout": 0.0,
        "tie_weights": True,
        "rope_base": 10000.0,
        "qk_norm": False,
        "ngram_order": 1,
        "ngram_buckets": 4096,
        "gradient_checkpointing": False,
        "hf_folder": None,
        "lora": None,
        "extra": {},
    },
    "data": {
        "text_path": None,
        "dataset": None,
        "shards": None,
        "synthetic": True,
        "num_tokens": 100000,
        "tokenizer": "bytes",
        "vocab_size": 512,
        "block_size": 128,
        "micro_batch_size": 1,
        "target_batch_size": 1,
        "validation_fraction": 0.0,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": None,
        "shuffle": False,
        "drop_last": True,
        "seed": 1234,
        "max_steps": None,
        "loss_normalization": "micro_batch",
        "labels": "aligned",
        "document_mask": False,
        "packing": "concat",
        "mixture": None,
        "chat": None,
    },
    "optimizer": {
        "name": "adamw",
        "args": {},
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay_1d": False,
        "fused": None,
        "grad_clip": None,
        "grad_clip_value": None,
        "groups": [],
        "layer_decay": None,
        "cautious": False,
        "cautious_rescale": False,
        "ema": None,
        "muon_plus": False,
        "muon_lr": 3e-4,
        "muon_momentum": 0.95,
        "muon_ns_steps": 5,
        "muon_norm_eps": 1e-8,
        "muon_scale": "original",
        "muon_coefficients": "quintic",
    },
    "scheduler": {
        "name": "cosine",
        "args": {},
        "warmup_steps": 100,
        "max_steps": 1000,
        "min_lr_ratio": 0.1,
        "decay_steps": None,
    },
    "precision": {"mode": "auto", "dtype": None, "tf32": None},
    "checkpoint": {
        "enabled": True,
        "directory": "checkpoints",
        "every_steps": 500,
        "every_minutes": None,
        "keep_last": 3,
        "keep_every": None,
        "keep_best": 0,
        "background": True,
        "resume": False,
        "mirror": None,
        "mirror_options": {},
    },
    "logging": {
        "level": "INFO",
        "file": None,
        "json_file": None,
        "every_steps": 1,
        "progress": "auto",
        "fields": None,
        "trackers": [],
    },
    "eval": {
        "every_steps": None,
        "batches": None,
        "at_end": True,
        "sets": {},
        "metrics": [],
        "monitor": "loss",
        "mode": None,
        "patience": None,
        "min_delta": 0.0,
        "samples": 0,
        "prompts": [],
        "sample_tokens": 100,
    },
    "shape_validation": {
        "enabled": True,
        "alignment": "auto",
        "check_batch": True,
        "check_sequence": True,
        "check_model": True,
        "check_vocab": False,
        "warn_on_cpu": False,
    },
    "distributed": {
        "enabled": False,
        "mode": "dumb_diloco",
        "role": "single",
        "node_id": None,
        "inner_steps": 500,
        "poll_interval": 60.0,
        "outer_lr": None,
        "outer_momentum": None,
        "outer": "nesterov",
        "repo_id": None,
        "worker_repo_id": None,
        "token": None,
        "store_options": {},
        "state_dir": ".speedtronic/diloco",
        "retry_initial": 1.0,
        "retry_max": 60.0,
        "retry_attempts": 6,
        "reset_inner_optimizer": False,
        "async_delta_upload": True,
        "delta_upload_shutdown_timeout": 5.0,
        "async_global_poll": True,
        "expected_nodes": None,
        "quorum": None,
        "grace": None,
        "max_staleness": None,
        "keep_versions": 8,
        "codec": "fp32",
        "trusted_nodes": [],
        "robust": "none",
    },
    "loss": None,
    "compile": False,
    "compile_options": {"mode": None, "dynamic": None, "regional": False},
    "parallel": {
        "strategy": "auto",
        "shard_within_node": False,
        "cpu_offload": False,
        "reduce_dtype": None,
        "find_unused_parameters": False,
        "timeout": 600.0,
    },
    "gradient_checkpointing": False,
    "ooo_backprop": False,
    "ooo_streams": 4,
    "plugins": [],
    "callbacks": [],
    "tune": "off",
}

SECTIONS = {
    "run": RunConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "precision": PrecisionConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "eval": EvalConfig,
    "shape_validation": ShapeValidationConfig,
    "distributed": DistributedConfig,
    "compile_options": CompileOptions,
}


def _same(left: object, right: object) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_key_exists_with_its_default_and_type(name: str) -> None:
    assert _same(SpeedtronicConfig().to_dict()[name], DEFAULTS[name])


def test_there_are_no_other_keys() -> None:
    assert SpeedtronicConfig().to_dict().keys() == DEFAULTS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_stands_alone_with_its_own_class(name: str) -> None:
    alone = SECTIONS[name]()
    assert type(getattr(SpeedtronicConfig(), name)) is SECTIONS[name]
    assert alone.path() == (name,)
    assert set(alone.plain()) == set(DEFAULTS[name])


@pytest.mark.parametrize("section", [SpeedtronicConfig, *SECTIONS.values()])
def test_every_key_is_described(section: type[Section]) -> None:
    assert [key for key, field in section.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (RunConfig, "max_steps", 10.7, "run.max_steps: must be a whole number, not 10.7"),
        (RunConfig, "max_steps", 10.0, "run.max_steps: must be a whole number, not 10.0"),
        (RunConfig, "max_steps", "10", "run.max_steps: must be a whole number, not the text '10'"),
        (RunConfig, "max_steps", True, "run.max_steps: must be a whole number, not true"),
        (RunConfig, "max_steps", None, "run.max_steps: must be a whole number, not null"),
        (RunConfig, "max_steps", 0, "run.max_steps: must be greater than 0, not 0"),
        (RunConfig, "seed", -1, "run.seed: must be at least 0, not -1"),
        (RunConfig, "seed", 2**32, "run.seed: must be at most 4294967295, not 4294967296"),
        (RunConfig, "name", "", "run.name: must not be empty"),
        (RunConfig, "name", 3, "run.name: must be text, not 3"),
        (
            RunConfig,
            "device",
            "gpu",
            "run.device: must be auto, cpu, mps, cuda or cuda:<index>, not the text 'gpu'",
        ),
        (
            RunConfig,
            "on_nonfinite",
            "halt",
            "run.on_nonfinite: must be 'stop', 'skip' or 'ignore', not the text 'halt'",
        ),
        (ModelConfig, "dropout", 1, "model.dropout: must be less than 1, not 1"),
        (ModelConfig, "dropout", False, "model.dropout: must be a number, not false"),
        (ModelConfig, "rope_base", math.inf, "model.rope_base: must be a finite number, not inf"),
        (ModelConfig, "extra", [1], "model.extra: must be a mapping, not a list"),
        (ModelConfig, "extra", {"a": {1: 2}}, "model.extra: keys under 'a' must be text, not 1"),
        (ModelConfig, "extra", {"a": math.nan}, "model.extra: the number under 'a' must be finite"),
        (
            ModelConfig,
            "extra",
            {"a": object()},
            "model.extra: the value under 'a' must be text, a number, true, false, null, a list or a mapping",
        ),
        (
            DataConfig,
            "shuffle",
            "no",
            "data.shuffle: must be true or false, not the text 'no'; write true or false without quotes",
        ),
        (DataConfig, "shuffle", 1, "data.shuffle: must be true or false, not 1"),
        (DataConfig, "validation_fraction", 1.0, "data.validation_fraction: must be less than 1, not 1.0"),
        (
            DataConfig,
            "dataset",
            "data.pt",
            "data.dataset: must be an importable factory, written package.module:function, not the text 'data.pt'",
        ),
        (OptimizerConfig, "lr", "1e-4", "optimizer.lr: must be a number, not the text '1e-4'"),
        (OptimizerConfig, "lr", math.nan, "optimizer.lr: must be a finite number, not nan"),
        (OptimizerConfig, "lr", -1e-4, "optimizer.lr: must be at least 0, not -0.0001"),
        (OptimizerConfig, "eps", 0.0, "optimizer.eps: must be greater than 0, not 0.0"),
        (OptimizerConfig, "betas", [0.9], "optimizer.betas: must have 2 items, not 1"),
        (OptimizerConfig, "betas", [0.9, 0.95, 0.99], "optimizer.betas: must have 2 items, not 3"),
        (OptimizerConfig, "betas", [0.9, 1], "optimizer.betas[1]: must be less than 1, not 1"),
        (OptimizerConfig, "betas", "0.9", "optimizer.betas: must be a list, not the text '0.9'"),
        (SchedulerConfig, "min_lr_ratio", 1.5, "scheduler.min_lr_ratio: must be at most 1, not 1.5"),
        (CheckpointConfig, "keep_last", 0, "checkpoint.keep_last: must be greater than 0, not 0"),
        (
            LoggingConfig,
            "level",
            "loud",
            "logging.level: must be 'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL', not the text 'LOUD'",
        ),
        (
            LoggingConfig,
            "trackers",
            ["neptune"],
            "logging.trackers[0]: must be 'tensorboard', 'wandb', 'mlflow' or 'trackio', not the text 'neptune'",
        ),
        (LoggingConfig, "trackers", "wandb", "logging.trackers: must be a list, not the text 'wandb'"),
        (
            ShapeValidationConfig,
            "alignment",
            0,
            "shape_validation.alignment: must be 'auto', 'none' or a whole number of at least 1, not 0",
        ),
        (
            ShapeValidationConfig,
            "alignment",
            True,
            "shape_validation.alignment: must be 'auto', 'none' or a whole number of at least 1, not true",
        ),
        (
            CompileOptions,
            "dynamic",
            "auto",
            "compile_options.dynamic: must be true or false, not the text 'auto'",
        ),
        (DistributedConfig, "token", "", "distributed.token: must not be empty"),
        (DistributedConfig, "token", 12345678, "distributed.token: must be text"),
        *[
            (
                DistributedConfig,
                "node_id",
                node,
                "distributed.node_id: must be at most 128 letters, digits, '.', '_' and '-', the first a letter or "
                f"digit, not the text {node!r}",
            )
            for node in (".", "..", "a/b", "a b", "", "é", "a\n", "_a")
        ],
    ],
)
def test_a_wrong_value_is_refused_at_construction_and_at_assignment(
    section: type[Section], key: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError) as at_construction:
        section(**{key: value})
    assert str(at_construction.value) == message

    sound = section()
    before = copy.deepcopy(sound)
    with pytest.raises(ConfigError) as at_assignment:
        setattr(sound, key, value)
    assert str(at_assignment.value) == message
    assert sound == before


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (RunConfig, {"device": "cuda:12", "seed": 2**32 - 1, "threads": 1, "log_every": 5}),
        (ModelConfig, {"rope_base": 500000, "extra": {"a": [1, {"b": None}], "c": True}}),
        (DataConfig, {"dataset": "my_pkg.data:build", "pin_memory": False, "validation_fraction": 0}),
        (DataConfig, {"document_mask": True, "shards": "prepared"}),
        (DataConfig, {"packing": "best_fit", "mixture": {"data/web": 0.7, "data/code": 0.3}, "document_mask": True}),
        (DataConfig, {"chat": "chats.jsonl", "tokenizer": "model/", "packing": "best_fit"}),
        (OptimizerConfig, {"lr": 1, "fused": True, "ema": 0.999, "grad_clip": 1}),
        (PrecisionConfig, {"mode": "fp8"}),
        (PrecisionConfig, {"mode": "bf16", "dtype": "bfloat16"}),
        (CheckpointConfig, {"keep_last": None, "every_minutes": 0.5}),
        (ShapeValidationConfig, {"alignment": 64}),
        (ShapeValidationConfig, {"alignment": "none"}),
        (DistributedConfig, {"node_id": "a..B_-9", "quorum": 2, "expected_nodes": 4, "max_staleness": 2.5}),
        (SchedulerConfig, {"name": "wsd", "decay_steps": 10, "warmup_steps": 5000}),
    ],
)
def test_a_right_value_is_kept(section: type[Section], values: dict[str, object]) -> None:
    built = section(**values).plain()
    assert {key: built[key] for key in values} == values


def test_a_whole_number_becomes_a_float_where_a_number_is_wanted() -> None:
    lr = OptimizerConfig(lr=1).lr
    assert isinstance(lr, float)


def test_betas_are_a_list_of_two_floats_whatever_they_were_given_as() -> None:
    assert OptimizerConfig(betas=(0, 0.5)).betas == [0.0, 0.5]


def test_a_path_object_is_kept_as_text() -> None:
    run = RunConfig(output_dir=PurePosixPath("a/b"), init_from=PurePosixPath("w.safetensors"))
    assert (run.output_dir, run.init_from) == ("a/b", "w.safetensors")
    data = DataConfig(text_path=PurePosixPath("x.txt"), tokenizer=PurePosixPath("t.json"))
    assert (data.text_path, data.tokenizer) == ("x.txt", "t.json")


def test_tuples_in_free_mappings_become_lists() -> None:
    assert ModelConfig(extra={"widths": (1, (2,))}).extra == {"widths": [1, [2]]}


def test_sections_do_not_share_their_default_mappings() -> None:
    first = ModelConfig()
    first.extra["a"] = 1
    assert ModelConfig().extra == {}


def test_all_problems_of_a_section_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(micro_batchsize=2, shuffle="no", target_batch_size=6, micro_batch_size=4, num_workers=-1)
    assert sorted(line.split(":")[0] for line in str(caught.value).splitlines()) == [
        "data.micro_batchsize",
        "data.num_workers",
        "data.shuffle",
        "data.target_batch_size",
    ]


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            ModelConfig,
            {"d_model": 256, "n_head": 6},
            "model.d_model: 256 must be divisible by model.n_head, which is 6",
        ),
        (ModelConfig, {"n_kv_head": 3}, "model.n_kv_head: 3 must divide model.n_head, which is 8"),
        (ModelConfig, {"n_kv_head": 16}, "model.n_kv_head: 16 must divide model.n_head, which is 8"),
        (
            ModelConfig,
            {"ngram_order": 9, "max_seq_len": 8},
            "model.ngram_order: 9 must be at most model.max_seq_len, which is 8",
        ),
        (
            DataConfig,
            {"micro_batch_size": 4, "target_batch_size": 6},
            "data.target_batch_size: 6 must be a multiple of data.micro_batch_size (4), such as 8",
        ),
        (
            DataConfig,
            {"text_path": "a.txt", "shards": "b"},
            "data.shards: name one source of data, not both data.text_path and data.shards",
        ),
        (
            DataConfig,
            {"mixture": {"a": 1.0}, "chat": "b.jsonl", "tokenizer": "model/"},
            "data.chat: name one source of data, not both data.mixture and data.chat",
        ),
        (
            DataConfig,
            {"mixture": {}},
            "data.mixture: names no folder; leave it out, or give folders with their weights",
        ),
        (
            DataConfig,
            {"chat": "b.jsonl"},
            "data.chat: needs data.tokenizer, a tokenizer with a chat template; other chats go through data prepare",
        ),
        (
            DataConfig,
            {"mixture": {"a": 1.0}, "tokenizer": "t.json"},
            "data.tokenizer: is for data.text_path; shards have their own, so leave it out",
        ),
        (
            DataConfig,
            {"packing": "best_fit", "text_path": "a.txt"},
            "data.packing: best_fit needs data.shards: no other source of data knows where documents start",
        ),
        *[
            (
                DataConfig,
                {"document_mask": True, **source},
                "data.document_mask: needs data.shards: no other source of data knows where documents start",
            )
            for source in ({}, {"text_path": "a.txt"}, {"shards": "b", "dataset": "my_pkg.data:build"})
        ],
        (OptimizerConfig, {"muon_plus": True}, "optimizer.muon_plus: needs optimizer.name: muon, not adamw"),
        (
            OptimizerConfig,
            {"args": {"momentum": 0.9}},
            "optimizer.args: is for an optimizer that is named as package.module:class; adamw has keys of its own",
        ),
        (
            OptimizerConfig,
            {"grad_clip": 1.0, "grad_clip_value": 1.0},
            "optimizer.grad_clip_value: is instead of optimizer.grad_clip; leave one of the two out",
        ),
        (
            SchedulerConfig,
            {"args": {"offset": 1}},
            "scheduler.args: is for a function that scheduler.name names as package.module:function, not cosine",
        ),
        *[
            (ModelConfig, {"name": "gpt", key: value}, f"model.{key}: is for model.name: hf, not gpt; leave it out")
            for key, value in (("hf_folder", "a"), ("lora", {"r": 4}))
        ],
        *[
            (
                OptimizerConfig,
                {"name": name, "cautious_rescale": True},
                "optimizer.cautious_rescale: needs optimizer.cautious: true; only a cautious update is rescaled",
            )
            for name in ("adamw", "muon")
        ],
        (
            PrecisionConfig,
            {"mode": "fp16", "dtype": "bfloat16"},
            "precision.dtype: bfloat16 contradicts precision.mode: fp16; leave one of the two out",
        ),
        (
            DistributedConfig,
            {"enabled": True},
            "distributed.repo_id: needed when distributed.enabled is true; "
            "name a store, such as dir:///path or org/name",
        ),
        (
            DistributedConfig,
            {"retry_initial": 90},
            "distributed.retry_max: 60.0 must not be less than distributed.retry_initial, which is 90",
        ),
        (
            DistributedConfig,
            {"quorum": 3, "expected_nodes": 2},
            "distributed.quorum: 3 is more than distributed.expected_nodes, which is 2",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    section: type[Section], values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**values)
    assert str(caught.value) == message


def test_a_contradiction_is_reported_beside_other_problems_when_its_own_keys_are_right() -> None:
    with pytest.raises(ConfigError, match=r"(?s)model\.vocab_size.*model\.d_model: 100 must be divisible"):
        ModelConfig(vocab_size="many", d_model=100)


def test_a_contradiction_is_not_guessed_from_wrong_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(d_model="wide", n_head=3)
    assert str(caught.value) == "model.d_model: must be a whole number, not the text 'wide'"
    with pytest.raises(ConfigError) as caught:
        DataConfig(mixture={"a": 0}, document_mask=True, packing="best_fit")
    assert str(caught.value) == "data.mixture.a: must be greater than 0, not 0"


def test_keys_that_depend_on_each_other_can_be_edited_one_after_the_other() -> None:
    model = ModelConfig()
    model.n_head = 6
    model.d_model = 384
    assert (model.n_kv_head, model.d_ff) == (6, 1536)


def test_trackers_bring_the_file_that_they_are_fed_from() -> None:
    assert LoggingConfig().json_file is None
    section = LoggingConfig(trackers=["wandb"], json_file=None)
    assert section.json_file == "metrics.jsonl"
    assert LoggingConfig(trackers=["wandb"], json_file="mine.jsonl").json_file == "mine.jsonl"
    section.trackers = []
    assert section.json_file is None


def test_given_sizes_do_not_follow() -> None:
    model = ModelConfig(n_kv_head=2, d_ff=100)
    model.d_model = 512
    assert (model.n_kv_head, model.d_ff) == (2, 100)
    model.d_ff = None
    assert model.d_ff == 2048


def test_muon_lr_is_lr_unless_given() -> None:
    assert OptimizerConfig(lr=0.5).muon_lr == 0.5
    assert OptimizerConfig(lr=0.5, muon_lr=0.1).muon_lr == 0.1


def test_an_enabled_single_node_with_a_store_becomes_master() -> None:
    assert DistributedConfig(enabled=True, repo_id="a/b").role == "master"
    assert DistributedConfig(enabled=False, repo_id="a/b").role == "single"
    assert DistributedConfig(enabled=True, role="worker", repo_id="a/b").role == "worker"


def test_an_unknown_attribute_cannot_be_set() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig().max_step = 3  # type: ignore[attr-defined]
    assert str(caught.value) == "run.max_step: unknown key; did you mean run.max_steps?"


def test_an_enormous_number_is_refused_in_words() -> None:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(lr=10**5000)
    assert str(caught.value) == "optimizer.lr: must be a number, not a number that large"


def test_a_section_pickles_and_copies() -> None:
    section = ModelConfig(n_head=4, extra={"a": [1]})
    for twin in (pickle.loads(pickle.dumps(section)), copy.deepcopy(section), section.model_copy(deep=True)):
        assert twin == section
        twin.n_head = 2
        assert twin.n_kv_head == 2


def test_a_level_may_be_written_small() -> None:
    assert LoggingConfig(level="warning").level == "WARNING"


def test_a_token_equals_its_text_and_hides_it() -> None:
    token = DistributedConfig(token="hf_secret").token
    assert token == "hf_secret"
    assert token != "other"
    assert "hf_secret" not in f"{token} {token!r}"
