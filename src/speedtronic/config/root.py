"""`SpeedtronicConfig`: one object drives a run. Loading, editing, checking, writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from speedtronic.config.base import AutoSize, Section
from speedtronic.config.loading import gather
from speedtronic.config.problems import InvalidConfigError, Problem, unknown_key
from speedtronic.config.secrets import redacted
from speedtronic.config.sections import (
    CheckpointConfig,
    CompileOptions,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    FactoryList,
    LoggingConfig,
    LossName,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SchedulerConfig,
    ShapeValidationConfig,
    TextList,
    Tuning,
)
from speedtronic.config.shorthands import in_full
from speedtronic.config.text import write_yaml

# The share that is held out where `eval.every_steps` asks for evaluations and no share is given.
DEFAULT_HELD_OUT = 0.1

Source = str | os.PathLike[str] | Mapping[str, Any]


class SpeedtronicConfig(Section):
    """A whole configuration.

    Sections are given as mappings, as section objects (which are copied) or by shorthand. Keys that follow
    others (`data.vocab_size` follows `model.vocab_size`, …) have their values from the start. After you edit an
    attribute, `validate()` updates the keys that follow it, unless they were given.

    Raises:
        ConfigError: anything is wrong; every problem is in the message, one a line.
    """

    run: RunConfig = Field(default_factory=RunConfig, description="The run as a whole.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    data: DataConfig = Field(default_factory=DataConfig, description="Data and batches.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="The learning rate's curve.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="The arithmetic.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="Log lines and events.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation while training.")
    shape_validation: ShapeValidationConfig = Field(
        default_factory=ShapeValidationConfig, description="Warnings about slow shapes."
    )
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="DumbDiLoCo.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Several devices, one process each.")
    loss: LossName | None = Field(
        default=None,
        description="How the model's output becomes a loss: cross_entropy or mse with the labels of the batch "
        "(`labels` of a mapping, the second field of a tuple), or an importable package.module:function that is called "
        "with output and batch; null: the model returns its loss, or logits.",
    )
    compile: bool = Field(default=False, description="Compile the model with torch.compile.")
    compile_options: CompileOptions = Field(default_factory=CompileOptions, description="How to compile.")
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass to save memory."
    )
    ooo_backprop: bool = Field(
        default=False,
        description="Out-of-order backprop: on CUDA, weight gradients run beside the rest of the backward pass.",
    )
    ooo_streams: Annotated[int, Field(ge=1, le=8)] = Field(
        default=4, description="CUDA streams for out-of-order backprop."
    )
    plugins: TextList = Field(
        default=[],
        description="Modules to import before models are looked up, from the configuration's folder too.",
    )
    callbacks: FactoryList = Field(
        default=[],
        description="Importable factories package.module:function of callbacks, which act between two steps. Called "
        "without arguments, or with the whole configuration if they have a parameter config.",
    )
    tune: Tuning = Field(
        default="off",
        description="auto: find the fastest way to run on this machine by measuring, in at most 2% of the run. Or the "
        "path of a plan, a file of `speedtronic tune` that ends in .json. Keys with another value than their default "
        "stay as they are; precision.mode: auto may become bf16.",
    )

    def __init__(self, /, **values: Any) -> None:
        tree, problems = in_full(values, sections())
        try:
            super().__init__(**tree)
        except InvalidConfigError as error:
            problems += error.problems
        if not problems and (problem := self.scheduler.check_decay()) is not None:
            problems.append(Problem(("scheduler", "decay_steps"), problem))
        if not problems and self.tune == "off" and isinstance(self.data.micro_batch_size, AutoSize):
            problems.append(
                Problem(("data", "micro_batch_size"), "auto needs tune: auto, or a plan; else give a whole number")
            )
        if problems:
            raise InvalidConfigError(problems)

    if not TYPE_CHECKING:  # A type checker that sees this method would allow any attribute to be set.

        def __setattr__(self, key: str, value: Any) -> None:
            tree, problems = in_full({key: value}, sections())
            if problems:
                raise InvalidConfigError(problems)
            if key not in tree:
                raise InvalidConfigError([unknown_key((key,), self.known_keys)])
            super().__setattr__(key, tree[key])

    def resolve(self) -> None:
        """Update the keys that follow others, first within each section, then across sections."""
        for section in (getattr(self, name) for name in sections()):
            section.resolve()
        self.model.follow("hf_folder", self.run.init_from if self.model.name == "hf" else None)
        self.data.follow("vocab_size", self.model.vocab_size)
        self.data.follow("block_size", self.model.max_seq_len)
        self.data.follow("seed", self.run.seed)
        held_out = self.eval.every_steps is not None and self.data.dataset is None and not self.eval.sets
        self.data.follow("validation_fraction", DEFAULT_HELD_OUT if held_out else 0.0)
        self.scheduler.follow("max_steps", self.run.max_steps)
        self.scheduler.resolve()  # the warmup follows max_steps
        self.logging.follow("every_steps", self.run.log_every or 1)

    @property
    def accumulation_steps(self) -> int:
        """Micro batches in one optimizer update, of all ranks together."""
        return self.data.target_batch_size // self.data.micro_batch_size

    @classmethod
    def load(cls, source: Source | SpeedtronicConfig, overrides: Sequence[str] = ()) -> Self:
        """Load a configuration and resolve the keys that follow others.

        Args:
            source: path of a YAML or JSON file, YAML or JSON text, a mapping, or a configuration (copied).
            overrides: `section.key=value` strings that replace values of the source; they are read as YAML 1.2.

        Raises:
            ConfigError: anything is wrong. Every problem is in the message, one a line, as
                `file:line: section.key: what is wrong and what would be right`.
        """
        gathered = gather(source, overrides, sections())
        problems = list(gathered.problems)
        try:
            config = cls(**gathered.tree)
        except InvalidConfigError as error:
            problems += error.problems
        if problems:
            raise InvalidConfigError(gathered.located(problems))
        return config

    @classmethod
    def from_yaml(cls, source: str | os.PathLike[str]) -> Self:
        """Load a YAML file, or a string of YAML."""
        return cls.load(source)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Load a mapping of sections, top-level keys and shorthands."""
        return cls.load(values)

    def validate(self) -> Self:  # type: ignore[override]  # pydantic's deprecated classmethod of this name
        """Check everything again, and update the keys that follow others.

        Returns:
            This configuration itself.

        Raises:
            ConfigError: something is wrong. Nothing was changed then.
        """
        type(self)(**self.given())
        self.resolve()
        return self

    def to_dict(self, redact_secrets: bool = False) -> dict[str, Any]:
        """The resolved values as plain dicts, lists, strings, numbers, bools and None.

        Args:
            redact_secrets: write `<redacted>` for the token, for each value of `model.extra` whose key names a
                secret, and for each of `distributed.store_options` but endpoint, region, profile and switches; leave
                user and password out of addresses.
        """
        tree = self.plain()
        return redacted(tree) if redact_secrets else tree

    def to_yaml(self, redact_secrets: bool = False) -> str:
        """`to_dict` as YAML 1.2."""
        return write_yaml(self.to_dict(redact_secrets))

    def to_json(self, redact_secrets: bool = False) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(redact_secrets), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the resolved, redacted configuration: as JSON when `path` ends in `.json`, else as YAML.

        The file is replaced as a whole or not at all. Missing folders are created.
        """
        from speedtronic.durable.files import FileSystem, ensure_directory, replace_file

        target = Path(path)
        text = self.to_json(True) if target.suffix == ".json" else self.to_yaml(True)
        ensure_directory(FileSystem(), target.parent)
        replace_file(FileSystem(), target, text.encode("utf-8"))


@cache
def sections() -> dict[str, type[Section]]:
    """The class of each section, by the section's name."""
    classes = ((name, field.annotation) for name, field in SpeedtronicConfig.model_fields.items())
    return {name: kind for name, kind in classes if isinstance(kind, type) and issubclass(kind, Section)}


def load_config(source: Source | SpeedtronicConfig, overrides: Sequence[str] = ()) -> SpeedtronicConfig:
    """See `SpeedtronicConfig.load`."""
    return SpeedtronicConfig.load(source, overrides)


def load_yaml_config(path: str | os.PathLike[str]) -> SpeedtronicConfig:
    """See `SpeedtronicConfig.from_yaml`."""
    return SpeedtronicConfig.from_yaml(path)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """What differs between two `to_dict` trees.

    Returns:
        (`section.key`, old value, new value) of each difference; None stands for a missing key.
    """

    def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object, object]]:
        for key in {**old, **new}:
            before, after = old.get(key), new.get(key)
            if isinstance(before, Mapping) and isinstance(after, Mapping):
                yield from changes(before, after, f"{prefix}{key}.")
            elif before != after:
                yield f"{prefix}{key}", before, after

    return list(changes(old, new, ""))
