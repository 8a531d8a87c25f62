"""The composition root: from a configuration to a trainer. The only place that knows every part.

`_build` is the page to read; what it calls stands below it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from speedtronic import __version__
from speedtronic.checkpoint import CheckpointManager, RunLock
from speedtronic.checkpoint.export.llama import hidden_differences, reference_names
from speedtronic.checkpoint.initial_weights import is_hugging_face_folder, load_initial_weights
from speedtronic.checkpoint.sharing import broadcast_state
from speedtronic.config import ConfigError, SpeedtronicConfig, changed_keys, load_config
from speedtronic.config.checks import (
    BUILT_IN_MODELS,
    HOLD_SOMETHING_OUT,
    HUGGING_FACE,
    doubts,
    needs_held_out_data,
    refuse_what_cannot_be_trained,
)
from speedtronic.config.run_folder import RUN_CONFIG, TRACKERS, imported_from, run_folder, save_run
from speedtronic.config.sections import HELD_OUT, MEASURES
from speedtronic.data import Tokenizer, TrainingData, build_data
from speedtronic.data.build import Loader, build_set
from speedtronic.errors import CheckpointError, warn
from speedtronic.evaluation import Evaluation, HeldOutLoss, TokenMeasures, build_metrics
from speedtronic.evaluation.evaluation import Write
from speedtronic.generation import context_length_of, sample_writer
from speedtronic.metrics import MetricLogger
from speedtronic.metrics.tracker_feed import TrackerFeed, opener_of
from speedtronic.model.hugging_face import base_of, check_base, folder_of, load_pretrained, vocabulary_size
from speedtronic.model.transformer import NORM_EPS
from speedtronic.model.wrappers import forward_signature
from speedtronic.optimizers import learning_rate_schedule
from speedtronic.optimizers.factory import build_adamw, build_adamw8bit, build_hybrid, build_named
from speedtronic.optimizers.schedules import wsd_decay_steps
from speedtronic.parallel.memory import refuse_what_does_not_fit
from speedtronic.parallel.start import join_group
from speedtronic.precision import PrecisionPlan, processor_name, resolve_device, resolve_precision, use_device
from speedtronic.ranks import Group, SingleProcess
from speedtronic.registry import build_model, import_factory, registry
from speedtronic.shapes import validate_startup_shapes
from speedtronic.trainer import Trainer, TrainResult
from speedtronic.trainer.compile import keep_compiled_code, repeated_blocks
from speedtronic.trainer.forward import Forward, move_batch
from speedtronic.trainer.lazy_modules import initialize, uninitialized
from speedtronic.trainer.loss import loss_by_name
from speedtronic.trainer.profiling import StepProfiler
from speedtronic.trainer.state import load_model
from speedtronic.trainer.unused import BUILT_FROM_CONFIG

if TYPE_CHECKING:
    from speedtronic.distributed.checkpoint_mirror import CheckpointMirror
    from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator
    from speedtronic.tuning import Plan, Workbench

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

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
    return _build(_resolve(config), resume=resume, device=device, max_steps=max_steps)


def train_from_config(
    config: ConfigSource,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    max_steps: int | None = None,
    profile_steps: int | None = None,
) -> TrainResult:
    """Build a runtime and fit it.

    Args:
        config, resume, device, max_steps: those of `build_runtime`.
        profile_steps: trace so many steps after the first ones into `trace.json` in `run.output_dir`, and log a table
            of the time a phase.
    """
    settings = _resolve(config)
    folder = run_folder(settings)
    threads = torch.get_num_threads()
    group, _ = join_group(settings.parallel, device if device is not None else settings.run.device)
    # Taken before a log file is opened, so that a second process leaves no line in the first one's files.
    with RunLock(folder) if folder is not None and group.rank == 0 else nullcontext():
        trainer, _ = _build(settings, resume=resume, device=device, max_steps=max_steps, profile_steps=profile_steps)
        try:
            with trainer.logger:
                return trainer.fit()
        finally:
            torch.set_num_threads(threads)


run = train_from_config
train = train_from_config


def _build(
    settings: SpeedtronicConfig,
    *,
    resume: bool,
    device: str | torch.device | None,
    max_steps: int | None,
    profile_steps: int | None = None,
) -> tuple[Trainer, CheckpointManager]:
    """`build_runtime` for a configuration that `_resolve` returned."""
    seed_everything(settings.run.seed)
    _configure_torch(settings)
    group, target_device = join_group(settings.parallel, device if device is not None else settings.run.device)
    if group.size > 1 and settings.tune != "off":
        raise ConfigError(
            f"tune: {settings.tune} measures one process, and here are {group.size}: set tune: off, and what "
            "`speedtronic tune` has found in one process as keys of the configuration"
        )
    use_device(target_device, settings.precision.tf32)
    resume = resume or bool(settings.checkpoint.resume)
    folder = run_folder(settings)
    logger = build_logger(settings) if group.rank == 0 else MetricLogger(level="ERROR")
    precision = resolve_precision(settings.precision, target_device, warn=logger.warning)
    manager = build_checkpoint_manager(settings if group.rank == 0 else _without_mirror(settings), logger)
    if resume and group.rank == 0 and manager.mirror is not None and not manager.entries():
        _fetch_checkpoint(settings, manager, logger)
    logger.run_id = (manager.latest_run_id() if resume else None) or manager.run_id
    data = _build_data(settings, target_device, logger, group)

    saved = None
    if resume:
        # Only rank 0 needs to see the folder.
        saved = broadcast_state(group, manager.load_latest() if group.rank == 0 else None)
        if saved is None and settings.checkpoint.resume == "auto":
            logger.info(f"there is no checkpoint in {manager.directory} yet: starting from the beginning")
        elif saved is None:
            logger.warning(f"there is no checkpoint in {manager.directory}: starting from the beginning")
        else:
            _keep_warmup(settings, saved)
            _refuse_late_decay(settings, saved)
    for doubt in doubts(settings, max_steps):
        logger.warning(doubt)

    model = build_model(settings.model)
    if group.size > 1:
        refuse_what_does_not_fit(model, settings, target_device)
    model = model.to(target_device)
    _tune_convolutions(model, settings, target_device)
    if uninitialized(model):
        _initialize_lazy_modules(model, data.train, settings, target_device, precision, logger)
    _check_takes_documents(model, settings)
    if saved is None and settings.run.init_from is not None and group.rank == 0:  # the others get the weights of rank 0
        _load_initial_weights(model, settings.run.init_from, settings, data.tokenizer, logger)
    given = settings
    plan = _plan(settings, model, target_device, saved, max_steps, logger) if group.size == 1 else None
    if plan is not None:
        settings = plan.choices.applied_to(given)
        _configure_torch(settings)
        precision = resolve_precision(settings.precision, target_device, warn=logger.warning)
        if settings.data.plain() != given.data.plain():
            data = _build_data(settings, target_device, logger, group)
    logger.emit("environment", _environment(target_device))
    shape_report = validate_startup_shapes(settings, model, target_device, precision, logger)
    optimizer = build_optimizer(model, settings, target_device, warn=logger.warning)
    profiler = []
    if profile_steps is not None:
        profiler.append(StepProfiler(profile_steps, Path(settings.run.output_dir) / "trace.json"))
    trainer = Trainer(
        model,
        optimizer,
        data.train,
        device=target_device,
        config=settings,
        scheduler=build_scheduler(optimizer, settings),
        precision=precision,
        logger=logger,
        checkpoint_manager=manager,
        # Of a node of several processes, rank 0 talks to the store.
        coordinator=_build_coordinator(settings, model, logger) if group.rank == 0 else None,
        max_steps=max_steps,
        evaluator=_build_evaluator(data, settings, target_device, precision, logger, group),
        lock_directory=folder,
        on_lock=partial(_record_run, folder, given, manager, logger) if folder is not None else None,
        metadata={
            "tokenizer": data.tokenizer.spec() if data.tokenizer is not None else None,
            "tuning": plan.model_dump() if plan is not None else (saved or {}).get("tuning"),
            "base": base_of(model),
        },
        shape_report=shape_report,
        callbacks=[*_build_callbacks(settings), *profiler],
        merged_micro_batches=plan.choices.merged if plan is not None else 1,
    )
    if saved is not None:
        _resume(trainer, saved, settings)
        logger.info(f"resumed at step {trainer.step} from {manager.loaded_path}")
        if manager.mirror is not None and manager.loaded_path is not None:
            manager.mirror.add(manager.loaded_path)  # a kill may have cut its copy short
    return trainer, manager


def _environment(device: torch.device) -> dict[str, str]:
    """What a run's numbers may depend on besides its configuration."""
    versions = {"speedtronic": __version__, "torch": torch.__version__, "python": platform.python_version()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    machine = {"device": name, "processor": processor_name(), "cores": str(os.cpu_count())}
    return {**versions, "system": platform.platform(terse=True), **machine, "threads": str(torch.get_num_threads())}


def _plan(
    config: SpeedtronicConfig,
    model: nn.Module,
    device: torch.device,
    saved: Mapping[str, Any] | None,
    max_steps: int | None,
    logger: MetricLogger,
) -> Plan | None:
    """How the run runs, if `tune` decides it."""
    before = saved.get("tuning") if saved is not None else None
    if config.tune == "off" and before is None:
        return None
    from speedtronic.tuning import plan_of_run  # imported only by a run that is tuned

    return plan_of_run(
        config,
        _workbench(config, model, device),
        step=saved["step"] if saved is not None else 0,
        target=max_steps or config.data.max_steps or config.run.max_steps,
        saved=before,
        logger=logger,
    )


def tune_from_config(config: ConfigSource, *, device: str | torch.device | None = None) -> Plan:
    """Measure how a configuration runs fastest on this machine, however long that takes.

    Nothing is trained and no file of a run is written. The arguments and errors are those of `build_runtime`.
    """
    from speedtronic.tuning import measure_plan

    settings = _resolve(config)
    seed_everything(settings.run.seed)
    _configure_torch(settings)
    target_device = resolve_device(device if device is not None else settings.run.device)
    use_device(target_device, settings.precision.tf32)
    model = build_model(settings.model).to(target_device)
    _tune_convolutions(model, settings, target_device)
    if uninitialized(model):
        precision, quiet = resolve_precision(settings.precision, target_device), MetricLogger(level="ERROR")
        _initialize_lazy_modules(
            model, build_data(settings, pin_memory=False).train, settings, target_device, precision, quiet
        )
    _check_takes_documents(model, settings)
    target = settings.data.max_steps or settings.run.max_steps
    return measure_plan(settings, _workbench(settings, model, target_device), step=0, target=target, limited=False)


def _workbench(config: SpeedtronicConfig, model: nn.Module, device: torch.device) -> Workbench:
    from speedtronic.tuning import Workbench

    pin_memory = _pin_memory(config, device)

    def make_loader(settings: SpeedtronicConfig) -> Loader:
        # Of all the data: a node's part has the same shapes, and its place in the store is asked for once.
        return build_data(settings, pin_memory=pin_memory).train

    return Workbench(model, device, make_loader=make_loader, make_optimizer=build_optimizer)


def _record_run(folder: Path, config: SpeedtronicConfig, manager: CheckpointManager, logger: MetricLogger) -> None:
    """Make the folder stand for the run. Training goes on without, as it does where a save fails."""
    try:
        if not save_run(folder, config, manager.run_id, _import_folders(config)):
            logger.warning(
                f"{folder / RUN_CONFIG} is a file of yours, so it stays, and the resolved configuration of this run is "
                "in its checkpoints only; a run.output_dir of its own would hold both"
            )
    except OSError as error:
        logger.warning(f"the run's configuration could not be written to {folder}: {error}; training goes on")


def _import_folders(config: SpeedtronicConfig) -> list[str]:
    """The folders that the configuration's own modules were imported from, where Python does not look by itself."""
    installed = {Path(place).resolve() for place in sysconfig.get_paths().values()}
    found: dict[str, None] = {}
    for name in _named_modules(config.plain()):
        module = sys.modules.get(name.partition(".")[0])
        # A package lies one folder deeper than a module; one without an `__init__` has no file.
        package = next(iter(getattr(module, "__path__", ())), None)
        file = package or getattr(module, "__file__", None)
        if file is not None and Path(file).resolve().parent not in installed:
            found[str(Path(file).resolve().parent)] = None
    return list(found)


def _named_modules(values: Any) -> Iterator[str]:
    """The modules that a tree of plain values may name: in `plugins`, or as `package.module:function`."""
    if isinstance(values, dict):
        yield from values.get("plugins") or ()
        for value in values.values():
            yield from _named_modules(value)
    elif isinstance(values, list):
        for value in values:
            yield from _named_modules(value)
    elif isinstance(values, str) and _FACTORY.fullmatch(values):
        yield values.partition(":")[0]


# ---------------------------------------------------------------------- configuration


def _resolve(config: ConfigSource) -> SpeedtronicConfig:
    """Load, check and resolve a configuration and import its plugins: once for a run, at its edge.

    Returns:
        A configuration of the run's own. What the caller does to `config` later does not change it.
    """
    settings = load_config(config)
    refuse_what_cannot_be_trained(settings, registry.names())
    folder = None  # of the file, if it is one
    if isinstance(config, os.PathLike) or (isinstance(config, str) and Path(config).is_file()):
        folder = Path(config).resolve().parent
    import_plugins(settings.plugins, folder)
    if settings.model.name == HUGGING_FACE:
        _take_vocabulary(settings)
    return settings


def _take_vocabulary(config: SpeedtronicConfig) -> None:
    """Let `model.vocab_size`, and what follows it, be that of the Hugging Face folder."""
    size = vocabulary_size(config.model)
    if "vocab_size" in config.model.model_fields_set and config.model.vocab_size != size:
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} contradicts the {size} of {config.model.hf_folder}; leave it "
            "out"
        )
    config.model.vocab_size = size
    config.resolve()


def import_plugins(modules: Sequence[str], folder: Path | None = None) -> None:
    """Import the modules of `plugins`, so that the models in them are registered.

    From then on, what lies in the configuration's folder can be imported, by `data.dataset` too. If that is the folder
    of a run, so can its own modules, from where it imported them. The working directory is afterwards what it was, so
    that the relative folders of the run stay where they are.

    Args:
        modules: importable names.
        folder: the configuration file's own folder.

    Raises:
        ConfigError: a module does not exist. What a module raises itself is passed on.
    """
    for place in reversed([folder, *imported_from(folder)] if folder is not None else []):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    working_directory = os.getcwd()
    for module in modules:
        if module not in sys.modules and not _exists(module):
            places = f"the configuration's folder {folder} and " if folder is not None else ""
            raise ConfigError(
                f"plugins: there is no module {module!r} in {places}the Python path; name the file there, without .py, "
                "or install the package that has it"
            )
        importlib.import_module(module)
    os.chdir(working_directory)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its package does not exist, or it is no name of a module
        return False


# ---------------------------------------------------------------------- parts


def seed_everything(seed: int) -> None:
    """Seed Python's `random`, PYTHONHASHSEED for child processes, NumPy, and torch on the CPU and all CUDA devices.

    Any integer is a seed. Where fewer bits count, its last ones do: 32 for NumPy and PYTHONHASHSEED, 64 for torch.
    """
    random.seed(seed)
    # Python does not start with a hash seed outside these bits.
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)
    try:
        import numpy as np

        np.random.seed(seed % 2**32)
    except Exception:  # noqa: BLE001 - documented: a broken or absent NumPy must not stop a run that may not use it
        pass
    torch.manual_seed(seed % 2**64)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed % 2**64)


def _configure_torch(config: SpeedtronicConfig) -> None:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.compile:
        keep_compiled_code()  # before anything compiles
    if config.run.deterministic:
        # cuBLAS reads it when it starts, and without it torch refuses its products (NVIDIA's cuBLAS manual, results
        # reproducibility). What the user has set stays.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _tune_convolutions(model: nn.Module, config: SpeedtronicConfig, device: torch.device) -> None:
    """Let cuDNN measure its ways to compute the convolutions of a model, and take the fastest, if runs may differ."""
    if device.type == "cuda" and any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        torch.backends.cudnn.benchmark = not config.run.deterministic


def build_optimizer(
    model: nn.Module,
    config: SpeedtronicConfig,
    device: str | torch.device,
    *,
    warn: Callable[[str], None] = warn,
) -> torch.optim.Optimizer:
    """Build AdamW, Muon and AdamW, or a class that `config.optimizer` names, over every trainable parameter of `model`.

    Each is in exactly one group. Those that `config.optimizer.groups` never trains are frozen first. With
    `config.compile` the step of a cautious AdamW is compiled too. `warn` is told what is not done as the section says.

    Raises:
        ConfigError: the model has no trainable parameter, declares a role or a split for Muon that cannot be, or has no
            parameter for one of the groups.
    """
    optimizer: torch.optim.Optimizer
    section, kind = config.optimizer, torch.device(device)
    blocks = [] if section.layer_decay is None else repeated_blocks(model, "optimizer.layer_decay")
    if section.name == "muon":
        optimizer = build_hybrid(model, section, kind, blocks=blocks, warn=warn)
    elif section.name == "adamw":
        optimizer = build_adamw(model, section, kind, compiled=config.compile, blocks=blocks, warn=warn)
    elif section.name == "adamw8bit":
        optimizer = build_adamw8bit(model, section, blocks=blocks)
    else:
        optimizer = build_named(model, section, blocks=blocks)
    BUILT_FROM_CONFIG.add(optimizer)
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: SpeedtronicConfig) -> LambdaLR:
    """Build the schedule of `config.scheduler`. It advances once per global step."""
    config.resolve()  # `run.max_steps` may have been edited, which the schedule's length follows
    scheduler = LambdaLR(optimizer, learning_rate_schedule(config.scheduler))
    BUILT_FROM_CONFIG.add(scheduler)
    return scheduler


def build_logger(config: SpeedtronicConfig) -> MetricLogger:
    """Build the logger of `config.logging`; its relative files lie in `run.output_dir`. It has no hooks.

    Raises:
        ConfigError: a file cannot be opened, or trackers cannot be fed from it.
        MissingExtraError: a tracker is not installed.
    """
    config.resolve()  # `run.log_every` may have been edited, which `logging.every_steps` follows
    section, output = config.logging, Path(config.run.output_dir).absolute()
    openers = {name: opener_of(name) for name in section.trackers}
    lines = output / section.json_file if section.json_file is not None else None
    logger = MetricLogger(
        level=section.level,
        file=output / section.file if section.file is not None else None,
        json_file=lines,
        every_steps=section.every_steps or 1,
        progress=section.progress,
        fields=section.fields,
    )
    if lines is not None and openers and not lines.is_file():
        raise ConfigError(f"logging.trackers are fed from logging.json_file, and {lines} is not a plain file")
    for name, open_tracker in openers.items():
        assert lines is not None, "it follows logging.trackers"
        feed = TrackerFeed(
            name,
            open_tracker,
            lines,
            output / TRACKERS,
            run_name=config.run.name,
            config=config.to_dict(redact_secrets=True),
            warn=logger.warning,
            inform=logger.info,
        )
        logger.add_feed(feed)
    return logger


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
        mirror=_build_mirror(config, logger) if section.enabled and section.mirror is not None else None,
        warn=logger.warning,
    )


def _without_mirror(config: SpeedtronicConfig) -> SpeedtronicConfig:
    """For the ranks that write no checkpoint."""
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"mirror": None})})


def _build_mirror(config: SpeedtronicConfig, logger: MetricLogger) -> CheckpointMirror:
    # Imported only by a run that has a mirror: another one starts sooner without.
    from speedtronic.distributed.checkpoint_mirror import CheckpointMirror
    from speedtronic.distributed.stores import RetryingStore
    from speedtronic.distributed.stores.open import MIRROR, open_configured

    section, url = config.checkpoint, str(config.checkpoint.mirror)
    if config.distributed.enabled:
        # Nodes have one configuration, and each has checkpoints of its own. Its name must outlive its disk.
        if config.distributed.node_id is None:
            raise ConfigError(
                "distributed.node_id: needed with checkpoint.mirror, so that a node that lost its disk finds its own "
                "checkpoints again"
            )
        url = f"{url.rstrip('/')}/{config.distributed.node_id}"
    store = open_configured(url, section.mirror_options, MIRROR)
    return CheckpointMirror(
        RetryingStore(store),
        keep_last=section.keep_last,
        keep_every=section.keep_every,
        keep_best=section.keep_best,
        warn=logger.warning,
        inform=logger.info,
    )


def _fetch_checkpoint(config: SpeedtronicConfig, manager: CheckpointManager, logger: MetricLogger) -> None:
    """Write the newest checkpoint of the mirror to an empty disk."""
    mirror = _build_mirror(config, logger)
    try:
        path = mirror.fetch(manager)
    finally:
        mirror.wait()
    if path is not None:
        logger.info(f"fetched {path.name} from {mirror.url}")


def build_initial_model(config: SpeedtronicConfig, logger: MetricLogger) -> nn.Module:
    """Build the model of a configuration on the CPU, with the weights that a run starts with, and nothing else of it.

    Raises:
        ConfigError: there is no such model.
        CheckpointError: `run.init_from` cannot be read, or does not fit the model.
    """
    seed_everything(config.run.seed)
    _configure_torch(config)
    model = build_model(config.model)
    if lazy := uninitialized(model):
        raise ConfigError(
            f"model.name: the model {config.model.name!r} has lazy modules ({', '.join(lazy[:4])}), whose shapes only "
            "training data would tell; give them their sizes"
        )
    if config.run.init_from is not None:
        _load_initial_weights(model, config.run.init_from, config, None, logger)
    return model


def build_evaluator_on_cpu(config: SpeedtronicConfig, logger: MetricLogger) -> Evaluation | None:
    """Build what evaluates a model on the CPU, and nothing else of a run; None if nothing is held out.

    Raises:
        ConfigError, DataError, MissingExtraError: as `build_data`; or `eval.every_steps` has nothing to evaluate on.
    """
    device = torch.device("cpu")
    precision = resolve_precision(config.precision, device, warn=logger.warning)
    evaluator = _build_evaluator(
        build_data(config, pin_memory=False, warn=logger.warning), config, device, precision, logger
    )
    if evaluator is not None:
        evaluator.loss_fn = loss_by_name(config.loss)
    return evaluator


def evaluate_from_config(
    config: ConfigSource,
    state: Mapping[str, Any],
    *,
    device: str | torch.device | None = None,
    logger: MetricLogger | None = None,
) -> dict[str, Any]:
    """Evaluate the weights of a checkpoint by the `eval` section of a configuration. Nothing is trained or written.

    Args:
        config: names the model and the data.
        state: that of a checkpoint. Its averaged weights are evaluated where it has some, as in training.
        device: instead of `run.device`.
        logger: told what looks wrong; one that prints to the terminal without it.

    Returns:
        The numbers of the first set and its name as `set`; in `sets` those of all others; in `samples` texts.

    Raises:
        ConfigError: the configuration is wrong, or there is nothing to evaluate on.
        CheckpointError: the weights do not fit the model.
        DataError: the data cannot be evaluated on.
        DeviceError: the device does not exist.
    """
    settings = _resolve(config)
    logger = logger or build_logger(settings)
    if state.get("tuning") is not None and settings.tune != "off":
        # The run chose these two by measuring, and they decide how numbers are rounded and batched.
        settings.precision.mode = state["config"]["precision"]["mode"]
        settings.data.micro_batch_size = state["config"]["data"]["micro_batch_size"]
    seed_everything(settings.run.seed)
    _configure_torch(settings)
    target = resolve_device(device if device is not None else settings.run.device)
    precision = resolve_precision(settings.precision, target, warn=logger.warning)
    data = build_data(settings, pin_memory=_pin_memory(settings, target), warn=logger.warning)
    evaluation = _build_evaluator(data, settings, target, precision, logger)
    if evaluation is None:
        raise ConfigError(f"nothing is held out to evaluate on; {HOLD_SOMETHING_OUT}")
    evaluation.loss_fn = loss_by_name(settings.loss)
    model = build_model(settings.model).to(target)
    if uninitialized(model):
        _initialize_lazy_modules(model, data.train, settings, target, precision, logger)
    check_base(model, state.get("base"))
    load_model(model, {**state["model"], **(state.get("ema") or {})})
    numbers = evaluation(model)
    assert numbers is not None, "nothing has asked it to stop"
    return numbers


def _initialize_lazy_modules(
    model: nn.Module,
    loader: Loader,
    config: SpeedtronicConfig,
    device: torch.device,
    precision: PrecisionPlan,
    logger: MetricLogger,
) -> None:
    """Give lazy modules their shapes by the first batch, before anything asks for the shapes of the weights."""
    forward = Forward(model, precision, loss_fn=loss_by_name(config.loss), warn=logger.warning)
    batch = move_batch(next(iter(loader)), device)
    loader.restart()
    initialize(model, lambda: forward.call(model, batch))


def _load_initial_weights(
    model: nn.Module, path: str, config: SpeedtronicConfig, tokenizer: Tokenizer | None, logger: MetricLogger
) -> None:
    """Load `run.init_from` into the model, and warn where its weights mean something else here."""
    section = config.model
    if section.name == HUGGING_FACE and is_hugging_face_folder(Path(path)):
        _load_pretrained_weights(model, Path(path), config, logger)
        return
    is_reference = section.name in BUILT_IN_MODELS
    try:
        weights = load_initial_weights(
            model,
            path,
            strict=config.run.init_strict,
            translate=partial(reference_names, section, norm_eps=NORM_EPS) if is_reference else None,
            warn=logger.warning,
        )
    except CheckpointError as error:
        raise CheckpointError(f"run.init_from: {error}") from error
    check_base(model, weights.base)
    averaged = ", of its averaged weights (optimizer.ema)" if weights.averaged else ""
    logger.info(f"starting from {len(weights.loaded)} tensors of {weights.source}{averaged}")

    # Weights of the right shapes may still be those of another model, or of other token ids.
    differences = hidden_differences(weights.model, section) if is_reference and weights.model is not None else []
    if differences:
        listed = "\n  ".join(differences)
        logger.warning(
            f"{weights.source}: its weights were trained to compute something else than they do here:\n  {listed}"
        )
    if tokenizer is not None and weights.tokenizer not in (None, tokenizer.spec()):
        logger.warning(
            f"{weights.source}: its weights were trained with a different tokenizer than this data uses, so its token "
            "ids mean something else here"
        )


def _load_pretrained_weights(model: nn.Module, folder: Path, config: SpeedtronicConfig, logger: MetricLogger) -> None:
    """Load the folder of a Hugging Face model into one of its kind; a model with adapters has its weights already."""
    section = config.model
    if (base := base_of(model)) is not None:
        if folder.resolve() != folder_of(section).resolve():
            raise ConfigError(
                f"run.init_from: with model.lora the weights of {section.hf_folder} (model.hf_folder) stay as they "
                "are, so those of another folder have no place; name a checkpoint with such adapters, or leave it out"
            )
        logger.info(f"training adapters beside the frozen weights of {folder}: {', '.join(base)}")
        return
    try:
        loaded = load_pretrained(model, section, folder, strict=config.run.init_strict, warn=logger.warning)
    except CheckpointError as error:
        raise CheckpointError(f"run.init_from: {error}") from error
    logger.info(f"starting from {loaded} tensors of {folder}")


def _check_takes_documents(model: nn.Module, config: SpeedtronicConfig) -> None:
    signature = forward_signature(model)
    if config.data.document_mask and signature is not None and "document_ids" not in signature.parameters:
        raise ConfigError(
            f"data.document_mask: the model {config.model.name!r} has no argument document_ids in its forward, which "
            "would keep its attention within a document; set data.document_mask to false, or add the argument"
        )


def _pin_memory(config: SpeedtronicConfig, device: torch.device) -> bool:
    return device.type == "cuda" if config.data.pin_memory is None else config.data.pin_memory


def _build_data(config: SpeedtronicConfig, device: torch.device, logger: MetricLogger, group: Group) -> TrainingData:
    """Build the loaders. A node among others reads a part of the data, or all of it in an order of its own."""
    pin_memory = _pin_memory(config, device)
    if not config.distributed.enabled:
        return build_data(
            config,
            pin_memory=pin_memory,
            rank=group.rank,
            world_size=group.size,
            in_step=group.size,
            warn=logger.warning,
        )

    # Imported only by a run that has other nodes: a run of its own starts sooner without.
    from speedtronic.distributed.data_partition import DataPartition, data_partition_of
    from speedtronic.distributed.stores.open import connect

    seed = config.data.seed if config.data.seed is not None else config.run.seed
    found: list[Any] = []
    if group.rank == 0:
        with closing(connect(config.distributed)) as store:
            found = list(data_partition_of(config.distributed, store, seed))
    share = DataPartition(*group.broadcast(found))
    data = build_data(
        config,
        pin_memory=pin_memory,
        rank=share.part * group.size + group.rank,
        world_size=share.parts * group.size,
        in_step=group.size,
        order_seed=share.order_seed,
        warn=logger.warning,
    )

    # Say what this node reads, and warn where several nodes would train on the same samples.
    if share.place is not None:
        logger.info(f"node {share.node} reads part {share.part + 1} of {share.parts} of the data")
        if share.place >= share.parts:
            logger.warning(
                f"node {share.node} is number {share.place + 1} of distributed.expected_nodes: {share.parts}, so it "
                "reads the same part of the data as another node; raise expected_nodes on all nodes"
            )
    elif config.data.shuffle:
        logger.info(
            f"node {share.node} reads all of the data, in an order of its own (distributed.expected_nodes: null)"
        )
    else:
        logger.warning(
            "every node reads the same data in the same order; set distributed.expected_nodes to give each node its "
            "own part, or data.shuffle to give each node its own order"
        )
    return data


def _build_coordinator(
    config: SpeedtronicConfig, model: nn.Module, logger: MetricLogger
) -> DumbDiLoCoCoordinator | None:
    if not config.distributed.enabled:
        return None
    from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator

    return DumbDiLoCoCoordinator(config.distributed, model, logger=logger)


def _build_evaluator(
    data: TrainingData,
    config: SpeedtronicConfig,
    device: torch.device,
    precision: PrecisionPlan,
    logger: MetricLogger,
    group: Group | None = None,
) -> Evaluation | None:
    """Build what evaluates a model: on the held-out part, on `eval.sets`, and by letting it write.

    None if there is nothing to evaluate on.
    """
    group = group or SingleProcess()
    # Each set: its loader, how its labels are, and the tokenizer of its ids.
    pin_memory = _pin_memory(config, device)
    loaders: dict[str, tuple[Loader, str, Tokenizer | None]] = {}
    if data.validation is not None:
        loaders[HELD_OUT] = data.validation, config.data.labels, data.tokenizer
    for name, section in config.eval.sets.items():
        loader, tokenizer = build_set(
            config,
            name,
            data.tokenizer,
            pin_memory=pin_memory,
            rank=group.rank,
            in_step=group.size,
            warn=logger.warning,
        )
        loaders[name] = loader, section.labels or config.data.labels, tokenizer or data.tokenizer
    if not loaders:
        if (problem := needs_held_out_data(config)) is not None:
            raise ConfigError(problem)
        if asked := [key for key in ("metrics", "samples") if getattr(config.eval, key)]:
            listed = ", ".join(f"eval.{key}" for key in asked)
            raise ConfigError(f"{listed}: nothing is held out to evaluate on; {HOLD_SOMETHING_OUT}")
        return None

    def from_the_beginning(loader: Loader) -> Loader:
        loader.restart()
        return loader

    of_set, _, monitored = config.eval.monitor.rpartition("/")
    measures = {}
    for name, (loader, labels, tokenizer) in loaders.items():
        # The loss of a user's own function need not be the cross-entropy of tokens.
        is_text = tokenizer is not None or (config.data.dataset is None and name == HELD_OUT)
        of_tokens = is_text and config.loss in (None, "cross_entropy")
        tokens = TokenMeasures(tokenizer, device) if of_tokens else None
        if (of_set or next(iter(loaders))) == name and monitored in MEASURES[1:]:
            _check_monitored(config.eval.monitor, monitored, tokens)
        measures[name] = HeldOutLoss(
            partial(from_the_beginning, loader),
            device=device,
            precision=precision,
            batches=config.eval.batches,
            labels=labels,
            metrics=build_metrics(config.eval.metrics, device),
            tokens=tokens,
            group=group,
            warn=logger.warning,
        )
    return Evaluation(measures, _build_writer(data.tokenizer, config) if group.rank == 0 else None)


def _check_monitored(monitor: str, name: str, tokens: TokenMeasures | None) -> None:
    if tokens is None:
        raise ConfigError(
            f"eval.monitor: {monitor} is of language models: the data needs a tokenizer (data.tokenizer beside "
            "data.dataset), and loss must not be a function of your own; monitor the loss or a metric instead"
        )
    if name not in tokens.names:
        raise ConfigError(
            f"eval.monitor: {monitor} needs the bytes of each token, which the tokenizer of this data does not tell; "
            "monitor the loss or perplexity instead"
        )


def _build_writer(tokenizer: Tokenizer | None, config: SpeedtronicConfig) -> Write | None:
    if not config.eval.samples:
        return None
    if tokenizer is None:
        raise ConfigError(
            "eval.samples: the data has no tokenizer, so the model cannot write; train on data.text_path or "
            "data.shards, name data.tokenizer beside data.dataset, or set eval.samples to 0"
        )
    return sample_writer(
        tokenizer,
        config.eval.prompts,
        samples=config.eval.samples,
        max_new_tokens=config.eval.sample_tokens,
        context_length=context_length_of(config),
        seed=config.run.seed,
    )


def _build_callbacks(config: SpeedtronicConfig) -> list[object]:
    """Call the factories of `callbacks`.

    Raises:
        ConfigError: there is no such factory, or it asks for more than `config`. What it raises itself is passed on.
    """
    callbacks: list[object] = []
    for name in config.callbacks:
        factory = import_factory(name, key="callbacks")
        try:
            signature = inspect.signature(factory)
        except ValueError:  # some callables written in C have none
            signature = inspect.Signature()
        # By its name: another parameter, such as a step with a default, must not silently become the configuration.
        arguments = {"config": config} if "config" in signature.parameters else {}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"callbacks: {name} takes {signature}, and is called without arguments, or with config alone: {error}"
            ) from None
        try:
            callbacks.append(factory(**arguments))
        except Exception as error:  # the factory is the user's code; the error is raised on, and names it
            error.add_note(f"raised by the factory {name} that callbacks names")
            raise
    return callbacks


# ---------------------------------------------------------------------- resume


def _keep_warmup(config: SpeedtronicConfig, saved: Mapping[str, Any]) -> None:
    """Let a warmup that the configuration does not give be as long as it was: a longer run must not move it."""
    before = saved["config"]["scheduler"]["warmup_steps"] if "config" in saved else None
    if before is not None and config.scheduler.follows("warmup_steps"):
        config.scheduler.warmup_steps = before


def _refuse_late_decay(config: SpeedtronicConfig, saved: Mapping[str, Any]) -> None:
    """Raise ConfigError where a nearer end makes `wsd` jump into a decay that would have begun before."""
    section, step, state = config.scheduler, saved["step"], saved["scheduler"]
    if section.name != "wsd" or not state or step >= section.max_steps:
        return
    decay, left = wsd_decay_steps(section), section.max_steps - step
    # Of the first group: a rate below the one that the checkpoint ended with. A decay that goes on has the same.
    factor, base, rate = learning_rate_schedule(section)(step), state["base_lrs"][0], state["_last_lr"][0]
    if decay > left and base * factor < rate * (1 - 1e-6):
        raise ConfigError(
            f"scheduler.decay_steps: a decay of {decay} updates does not fit into the {left} that are left of "
            f"scheduler.max_steps {section.max_steps} (run.max_steps) after step {step}: the learning rate would jump "
            f"from {rate:g} to {base * factor:g}; set scheduler.decay_steps to at most {left}, or max_steps to at "
            f"least {step + decay}"
        )


def _refuse_state_of_another_class(before: str, now: str) -> None:
    """Raise CheckpointError for the state of another class of optimizers, which torch would load all the same.

    That of `adamw` and `muon` is told apart by the state itself.
    """
    if before != now and not {before, now} <= {"adamw", "muon"}:
        raise CheckpointError(
            f"the checkpoint was written by optimizer.name: {before}, whose state means nothing to {now}: continue "
            f"with {before}, or start over from its weights with run.init_from"
        )


def _resume(trainer: Trainer, state: dict[str, Any], config: SpeedtronicConfig) -> None:
    """Continue from a saved state. Where the configuration has changed since, the configuration wins."""
    if "config" in state:
        changes = changed_keys(state["config"], config.to_dict(redact_secrets=True))
        if changes:
            lines = "\n".join(f"  {key}: {old!r} -> {new!r}" for key, old, new in changes)
            trainer.logger.warning(
                f"the configuration has changed since the checkpoint; the run uses the new values:\n{lines}"
            )

        _refuse_state_of_another_class(state["config"]["optimizer"]["name"], config.optimizer.name)
    check_base(trainer.model, state.get("base"))

    # An optimizer's state carries its options (LR, weight decay, betas, …): put those of the new optimizer in their
    # place. `algorithm` and `param_names` say whose state it is, so they stay.
    of_the_state = ("params", "algorithm", "param_names")
    for group, own in zip(state["optimizer"]["param_groups"], trainer.optimizer.param_groups, strict=False):
        group.update({key: value for key, value in own.items() if key not in of_the_state})
    if state["scheduler"] is not None and isinstance(trainer.scheduler, LambdaLR):
        state["scheduler"]["base_lrs"] = list(trainer.scheduler.base_lrs)
    trainer.resume(state)
