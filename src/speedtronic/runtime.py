"""The composition root: from a configuration to a trainer. The only place that knows every part.

`build_runtime` is the page to read; what it calls stands below it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from speedtronic.checkpoint import CheckpointManager, RunLock
from speedtronic.checkpoint.export.llama import MODEL_NAMES, hidden_differences, reference_names
from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.config import ConfigError, SpeedtronicConfig, changed_keys, load_config
from speedtronic.data import Tokenizer, TrainingData, build_data
from speedtronic.data.build import Loader
from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator
from speedtronic.distributed.data_partition import DataPartition, data_partition_of
from speedtronic.distributed.stores.connect import connect
from speedtronic.errors import CheckpointError, NotBuiltError
from speedtronic.evaluation import HeldOutLoss
from speedtronic.metrics import MetricLogger
from speedtronic.model.transformer import NORM_EPS
from speedtronic.optimizers import learning_rate_schedule
from speedtronic.optimizers.factory import build_adamw, build_hybrid
from speedtronic.precision import PrecisionPlan, resolve_device, resolve_precision
from speedtronic.registry import build_model
from speedtronic.shapes import validate_startup_shapes
from speedtronic.trainer import Trainer, TrainResult

ConfigSource = SpeedtronicConfig | Mapping[str, Any] | str | os.PathLike[str]


def build_runtime(
    config: ConfigSource,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    max_steps: int | None = None,
) -> tuple[Trainer, CheckpointManager]:
    """Validate, seed, resolve the hardware, and construct every part of a run.

    Args:
        config: a configuration, a mapping, a YAML or JSON file, or a YAML or JSON string.
        resume: continue from the newest sound checkpoint; a missing one is a warning. Also `checkpoint.resume`.
        device: instead of `run.device`.
        max_steps: the target, before `data.max_steps` and `run.max_steps`; it leaves the LR schedule alone.

    Raises:
        ConfigError: the configuration is wrong, or asks for a part that is not built yet.
        DataError: the data cannot be trained on.
        CheckpointError: there are checkpoints but none is sound, or they are of another model; or `run.init_from`
            cannot be read, or does not fit the model.
        DeviceError: the device does not exist.
        StoreError: the store that nodes share cannot be used, or had to be asked for this node's part of the data and
            did not answer.
        RunFolderError: the folder of this node's state cannot be used; RunLockedError: another node uses it.
    """
    settings = _settled(config)
    seed_everything(settings.run.seed)
    _configure_torch(settings)
    target_device = resolve_device(device if device is not None else settings.run.device)
    precision = resolve_precision(settings.precision, target_device)
    logger = build_logger(settings)
    data = _build_data(settings, _pins_memory(settings, target_device), logger)
    manager = build_checkpoint_manager(settings, logger)
    saved = _newest_state(manager, logger) if resume or settings.checkpoint.resume else None
    model = build_model(settings.model).to(target_device)
    _check_takes_documents(model, settings)
    if saved is None and settings.run.init_from is not None:
        _start_from(settings.run.init_from, model, settings, data.tokenizer, logger)
    shape_report = validate_startup_shapes(settings, model, target_device, precision, logger)
    optimizer = build_optimizer(model, settings, target_device)
    scheduler = build_scheduler(optimizer, settings)
    trainer = Trainer(
        model,
        optimizer,
        data.train,
        device=target_device,
        config=settings,
        scheduler=scheduler,
        precision=precision,
        logger=logger,
        checkpoint_manager=manager,
        coordinator=_build_coordinator(settings, model, logger),
        max_steps=max_steps if max_steps is not None else (settings.data.max_steps or settings.run.max_steps),
        evaluator=_evaluator(data, settings, target_device, precision, logger),
        lock_directory=_lock_directory(settings),
        metadata={"tokenizer": data.tokenizer.spec() if data.tokenizer is not None else None},
        shape_report=shape_report,
    )
    if saved is not None:
        _resume(trainer, manager, saved, settings)
    return trainer, manager


def train_from_config(
    config: ConfigSource,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    max_steps: int | None = None,
) -> TrainResult:
    """Build a runtime and fit it. The arguments are those of `build_runtime`."""
    settings = _settled(config)
    # Taken before a log file is opened, so that a second process leaves no line in the first one's files.
    with _locked(settings):
        trainer, _ = build_runtime(settings, resume=resume, device=device, max_steps=max_steps)
        with trainer.logger:
            return trainer.fit()


run = train_from_config
train = train_from_config


# ---------------------------------------------------------------------- configuration


def _settled(config: ConfigSource) -> SpeedtronicConfig:
    settings = load_config(config).validate()
    refuse_what_is_not_built(settings)
    folder = _folder_of(config)
    import_plugins(settings.plugins, folder)
    return settings


def _folder_of(config: ConfigSource) -> Path | None:
    if isinstance(config, os.PathLike) or (isinstance(config, str) and Path(config).is_file()):
        return Path(config).resolve().parent
    return None


def import_plugins(modules: Sequence[str], folder: Path | None = None) -> None:
    """Import the modules of `plugins`, so that the models in them are registered.

    From then on, what lies in the configuration's folder can be imported, by `data.dataset` too.

    Args:
        modules: importable names.
        folder: the configuration file's own folder.

    Raises:
        ConfigError: a module does not exist. What a module raises itself is passed on.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for module in modules:
        if module not in sys.modules and not _exists(module):
            places = f"the configuration's folder {folder} and " if folder is not None else ""
            raise ConfigError(f"plugins: there is no module {module!r} in {places}the Python path")
        importlib.import_module(module)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# What the configuration can say and this version cannot do. A key here is refused by name, never ignored.
_NOT_BUILT: Mapping[str, Callable[[SpeedtronicConfig], bool]] = {
    "distributed.worker_repo_id": lambda c: c.distributed.enabled and c.distributed.worker_repo_id is not None,
    "distributed.codec: int8, int4, int2, topk": (
        lambda c: c.distributed.enabled and c.distributed.codec not in {"fp32", "bf16"}
    ),
    "distributed.outer: sparse_loco": lambda c: c.distributed.enabled and c.distributed.outer == "sparse_loco",
    "distributed.trusted_nodes": lambda c: c.distributed.enabled and bool(c.distributed.trusted_nodes),
    "distributed.robust": lambda c: c.distributed.enabled and c.distributed.robust != "none",
    "ooo_backprop": lambda c: c.ooo_backprop,
    "tune": lambda c: c.tune != "off",
    "compile_options.regional": lambda c: bool(c.compile_options.regional),
    "precision.mode: fp8": lambda c: c.precision.mode == "fp8",
    "eval.patience": lambda c: c.eval.patience is not None,
    "eval.samples": lambda c: c.eval.samples > 0,
    "logging.trackers": lambda c: bool(c.logging.trackers),
}


def refuse_what_is_not_built(config: SpeedtronicConfig) -> None:
    """Raise NotBuiltError naming every key that asks for a part this version does not have yet."""
    asked = [key for key, is_asked in _NOT_BUILT.items() if is_asked(config)]
    if asked:
        raise NotBuiltError(
            "\n".join(f"{key}: not part of this version yet; remove it from the configuration" for key in asked)
        )


# ---------------------------------------------------------------------- parts


def seed_everything(seed: int) -> None:
    """Seed Python's `random`, PYTHONHASHSEED for child processes, NumPy, and torch on the CPU and all CUDA devices."""
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    _seed_numpy(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _seed_numpy(seed: int) -> None:
    try:
        import numpy as np

        np.random.seed(seed)
    except Exception:  # noqa: BLE001 - documented: a broken or absent NumPy must not stop a run that may not use it
        return


def _configure_torch(config: SpeedtronicConfig) -> None:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)


def build_optimizer(model: nn.Module, config: SpeedtronicConfig, device: str | torch.device) -> torch.optim.Optimizer:
    """Build AdamW, or Muon and AdamW, from `config.optimizer` over every trainable parameter of `model`.

    Each is in exactly one group. With `config.compile` the step of a cautious AdamW is compiled too.

    Raises:
        ConfigError: the model has no trainable parameter, or declares a role or a split for Muon that cannot be.
    """
    if config.optimizer.name == "muon":
        return build_hybrid(model, config.optimizer, torch.device(device))
    return build_adamw(model, config.optimizer, torch.device(device), compiled=config.compile)


def build_scheduler(optimizer: torch.optim.Optimizer, config: SpeedtronicConfig) -> LambdaLR:
    """Build the schedule of `config.scheduler`. It advances once per global step."""
    return LambdaLR(optimizer, learning_rate_schedule(config.validate().scheduler))


def build_logger(config: SpeedtronicConfig) -> MetricLogger:
    """Build the logger of `config.logging`; its relative files lie in `run.output_dir`. It has no hooks."""
    section, output = config.validate().logging, Path(config.run.output_dir)
    return MetricLogger(
        level=section.level,
        file=output / section.file if section.file is not None else None,
        json_file=output / section.json_file if section.json_file is not None else None,
        every_steps=section.every_steps or 1,
        progress=section.progress,
    )


def build_checkpoint_manager(config: SpeedtronicConfig, logger: MetricLogger) -> CheckpointManager:
    """Build the manager of `config.checkpoint`; its relative directory lies in `run.output_dir`."""
    section = config.checkpoint
    return CheckpointManager(
        Path(config.run.output_dir) / section.directory,
        every_steps=section.every_steps,
        keep_last=section.keep_last,
        enabled=section.enabled,
        every_minutes=section.every_minutes,
        keep_every=section.keep_every,
        keep_best=section.keep_best,
        warn=logger.warning,
    )


def build_initial_model(config: SpeedtronicConfig, logger: MetricLogger) -> nn.Module:
    """Build the model of a configuration on the CPU, with the weights that a run begins with, and nothing else of it.

    Raises:
        ConfigError: there is no such model.
        CheckpointError: `run.init_from` cannot be read, or does not fit the model.
    """
    seed_everything(config.run.seed)
    _configure_torch(config)
    model = build_model(config.model)
    if config.run.init_from is not None:
        _start_from(config.run.init_from, model, config, None, logger)
    return model


def _build_data(config: SpeedtronicConfig, pin_memory: bool, logger: MetricLogger) -> TrainingData:
    """The data, of which a node among others reads a part, or all of it in an order of its own."""
    if not config.distributed.enabled:
        return build_data(config, pin_memory=pin_memory)
    with closing(connect(config.distributed)) as store:
        share = data_partition_of(config.distributed, store, _seed_of_data(config))
    data = build_data(
        config, pin_memory=pin_memory, rank=share.part, world_size=share.parts, order_seed=share.order_seed
    )
    _say_what_is_read(share, config, logger)
    return data


def _seed_of_data(config: SpeedtronicConfig) -> int:
    return config.data.seed if config.data.seed is not None else config.run.seed


def _say_what_is_read(share: DataPartition, config: SpeedtronicConfig, logger: MetricLogger) -> None:
    if share.place is not None:
        logger.info(f"node {share.node} reads part {share.part + 1} of {share.parts} of the data")
        if share.place >= share.parts:
            logger.warning(
                f"node {share.node} is number {share.place + 1} of distributed.expected_nodes: {share.parts}, so it "
                "reads the same part of the data as another one; raise expected_nodes on all nodes"
            )
    elif config.data.shuffle:
        logger.info(
            f"node {share.node} reads all of the data, in an order of its own (distributed.expected_nodes: null)"
        )
    else:
        logger.warning(
            "every node reads the same data in the same order; set distributed.expected_nodes, so that each reads a "
            "part of its own, or data.shuffle, so that each has an order of its own"
        )


def _build_coordinator(
    config: SpeedtronicConfig, model: nn.Module, logger: MetricLogger
) -> DumbDiLoCoCoordinator | None:
    if not config.distributed.enabled:
        return None
    return DumbDiLoCoCoordinator(config.distributed, model, logger=logger)


def _check_takes_documents(model: nn.Module, config: SpeedtronicConfig) -> None:
    if config.data.document_mask and "document_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"data.document_mask: the model {config.model.name!r} has no argument document_ids in its forward, which "
            "would keep its attention within a document; set it to false, or let the model take them"
        )


def _start_from(
    path: str, model: nn.Module, config: SpeedtronicConfig, tokenizer: Tokenizer | None, logger: MetricLogger
) -> None:
    section = config.model
    translate = partial(reference_names, section, norm_eps=NORM_EPS) if section.name in MODEL_NAMES else None
    try:
        weights = load_initial_weights(
            model, path, strict=config.run.init_strict, translate=translate, warn=logger.warning
        )
    except CheckpointError as error:
        raise CheckpointError(f"run.init_from: {error}") from error
    averaged = ", of its averaged weights (optimizer.ema)" if weights.averaged else ""
    logger.info(f"starting from {len(weights.loaded)} tensors of {weights.source}{averaged}")
    if section.name in MODEL_NAMES and weights.model is not None:
        _warn_of_another_model(weights.source, hidden_differences(weights.model, section), logger)
    if tokenizer is not None and weights.tokenizer not in (None, tokenizer.spec()):
        logger.warning(
            f"{weights.source}: its weights were trained with another tokenizer than that of this data, so its token "
            "ids mean something else here"
        )


def _warn_of_another_model(source: Path, differences: list[str], logger: MetricLogger) -> None:
    if differences:
        listed = "\n  ".join(differences)
        logger.warning(f"{source}: its weights were trained to compute something else than they do here:\n  {listed}")


def _pins_memory(config: SpeedtronicConfig, device: torch.device) -> bool:
    pin = config.data.pin_memory
    return device.type == "cuda" if pin is None else pin


def _evaluator(
    data: TrainingData,
    config: SpeedtronicConfig,
    device: torch.device,
    precision: PrecisionPlan,
    logger: MetricLogger,
) -> HeldOutLoss | None:
    if data.validation is None:
        if config.eval.every_steps is not None:
            raise ConfigError(
                "eval.every_steps: nothing is held out to evaluate on; set data.validation_fraction, or let "
                "data.dataset return a pair (training, validation)"
            )
        if config.checkpoint.keep_best > 0:
            raise ConfigError(
                "checkpoint.keep_best: nothing is held out to tell the best by; set data.validation_fraction, or let "
                "data.dataset return a pair (training, validation)"
            )
        return None
    return HeldOutLoss(
        partial(_from_the_beginning, data.validation),
        device=device,
        precision=precision,
        batches=config.eval.batches,
        labels=config.data.labels,
        warn=logger.warning,
    )


def _from_the_beginning(loader: Loader) -> Loader:
    loader.restart()
    return loader


def _locked(config: SpeedtronicConfig) -> AbstractContextManager[Any]:
    folder = _lock_directory(config)
    return RunLock(folder) if folder is not None else nullcontext()


def _lock_directory(config: SpeedtronicConfig) -> Path | None:
    logs = (config.logging.file, config.logging.json_file)
    writes = config.checkpoint.enabled or any(file is not None for file in logs)
    return Path(config.run.output_dir) if writes else None


# ---------------------------------------------------------------------- resume


def _newest_state(manager: CheckpointManager, logger: MetricLogger) -> dict[str, Any] | None:
    state = manager.load_latest()
    if state is None:
        logger.warning(f"there is no checkpoint in {manager.directory}: starting from the beginning")
    return state


def _resume(trainer: Trainer, manager: CheckpointManager, state: dict[str, Any], config: SpeedtronicConfig) -> None:
    if "config" in state:
        _show_changes(trainer.logger, state["config"], config)
    _let_the_config_win(state, trainer)
    trainer.resume(state)
    trainer.logger.info(f"resumed at step {trainer.step} from {manager.loaded_path}")


def _show_changes(logger: MetricLogger, saved: Mapping[str, Any], config: SpeedtronicConfig) -> None:
    changes = changed_keys(saved, config.to_dict(redact_secrets=True))
    if changes:
        lines = "\n".join(f"  {key}: {old!r} -> {new!r}" for key, old, new in changes)
        logger.warning(f"the configuration has changed since the checkpoint; it counts as it is now:\n{lines}")


def _let_the_config_win(state: dict[str, Any], trainer: Trainer) -> None:
    """Put the freshly built optimizer's options (LR, weight decay, betas, …) in place of the checkpoint's.

    But its `algorithm` and `param_names` stay, which tell whose state it holds.
    """
    of_the_state = ("params", "algorithm", "param_names")
    saved = state["optimizer"]["param_groups"]
    for group, own in zip(saved, trainer.optimizer.param_groups, strict=False):
        group.update({key: value for key, value in own.items() if key not in of_the_state})
    if state["scheduler"] is not None and isinstance(trainer.scheduler, LambdaLR):
        state["scheduler"]["base_lrs"] = list(trainer.scheduler.base_lrs)
