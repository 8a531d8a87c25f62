"""What `train` refuses and what it warns of, as far as the configuration alone shows it. `validate` says it too.

A configuration that loads is well formed. Loading does not ask whether this version can train by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from speedtronic.config.root import SpeedtronicConfig
from speedtronic.errors import ConfigError, NotBuiltError

NOT_BUILT: Mapping[str, tuple[str, ...]] = {
    "distributed.worker_repo_id": (),
    "distributed.codec": ("int8", "int4", "int2", "topk"),
    "distributed.outer": ("sparse_loco",),
    "distributed.trusted_nodes": (),
    "distributed.robust": (),
    "ooo_backprop": (),
    "precision.mode": ("fp8",),
    "eval.patience": (),
    "eval.samples": (),
    "logging.trackers": (),
}
"""Keys whose part is still to come, with the values that need it; without values, all but the default need it."""

BUILT_IN_MODELS = frozenset({"reference_transformer", "gpt"})


def refuse_what_is_not_built(config: SpeedtronicConfig) -> None:
    """Raise NotBuiltError naming every key that asks for a part this version does not have yet."""
    if asked := asked_and_not_built(config):
        raise NotBuiltError(
            "\n".join(
                f"{': '.join([key, *filter(None, [', '.join(NOT_BUILT[key])])])}: not part of this version yet; "
                "remove it from the configuration"
                for key in asked
            )
        )


def asked_and_not_built(config: SpeedtronicConfig) -> list[str]:
    """The keys that ask for a part this version does not have yet."""
    return [key for key in NOT_BUILT if _is_asked(config, key)]


def _is_asked(config: SpeedtronicConfig, key: str) -> bool:
    *sections, leaf = key.split(".")
    section: Any = getattr(config, sections[0]) if sections else config
    if section is config.distributed and not config.distributed.enabled:
        return False
    value = getattr(section, leaf)
    return value in NOT_BUILT[key] if NOT_BUILT[key] else value != section.defaults()[leaf]


def refuse_what_cannot_be_trained(config: SpeedtronicConfig) -> None:
    """Raise ConfigError with all that is certain to stop `train` before its first update.

    What only the data, the machine or a plugin can show is not looked at.
    """
    refuse_what_is_not_built(config)
    problems = [*beyond_the_model(config), *_wrong_sources(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def beyond_the_model(config: SpeedtronicConfig) -> Iterator[str]:
    """Sizes of the data that a built-in model cannot take."""
    if config.model.name not in BUILT_IN_MODELS:
        return
    data, model = config.data, config.model
    for key, needed, limit, held in (
        ("block_size", data.block_size, "max_seq_len", model.max_seq_len),
        ("vocab_size", data.vocab_size, "vocab_size", model.vocab_size),
    ):
        if needed is not None and needed > held:
            yield (
                f"data.{key} is {needed}, but the model takes at most {held} (model.{limit}); raise model.{limit} or "
                f"lower data.{key}"
            )


def _wrong_sources(config: SpeedtronicConfig) -> Iterator[str]:
    data = config.data
    if data.dataset is not None:
        return  # its factory decides
    if data.shards is None and data.text_path is None and not data.synthetic:
        yield NO_SOURCE
    if data.labels == "unshifted":
        yield LABELS_ARE_ALIGNED
    if not data.validation_fraction and (problem := needs_held_out_data(config)) is not None:
        yield problem


NO_SOURCE = "data: no source; give data.shards, data.text_path or data.dataset, or set data.synthetic: true"
LABELS_ARE_ALIGNED = (
    "data.labels: unshifted is for data whose labels repeat the inputs, which only your own data.dataset can have; "
    "text, shards and synthetic data have next-token labels already: set data.labels to aligned"
)


def needs_held_out_data(config: SpeedtronicConfig) -> str | None:
    """What is wrong where nothing is held out; None if nothing needs it."""
    remedy = "set data.validation_fraction, or let data.dataset return a pair (training, validation)"
    if config.eval.every_steps is not None:
        return f"eval.every_steps: nothing is held out to evaluate on; {remedy}"
    if config.checkpoint.keep_best > 0:
        return f"checkpoint.keep_best: nothing is held out to find the best checkpoint by; {remedy}"
    return None


def doubts(config: SpeedtronicConfig, max_steps: int | None = None) -> list[str]:
    """What is allowed and most likely not meant.

    Args:
        config: a resolved configuration.
        max_steps: the target that was given beside it and goes before its own.
    """
    found = []
    scheduler, run, data = config.scheduler, config.run, config.data
    steps = max_steps or data.max_steps or run.max_steps
    if max_steps is None and data.max_steps not in (None, run.max_steps) and "max_steps" in run.model_fields_set:
        found.append(
            f"run.max_steps (--max-steps) is {run.max_steps}, but data.max_steps is {data.max_steps} and goes before "
            f"it: the run takes {data.max_steps} updates; change or remove data.max_steps for another number"
        )
    # A warmup of one update has no effect.
    if scheduler.warmup_steps > 1 and scheduler.warmup_steps >= min(steps, scheduler.max_steps):
        end = "the run" if steps <= scheduler.max_steps else "the schedule (scheduler.max_steps)"
        found.append(
            f"scheduler.warmup_steps is {scheduler.warmup_steps}, but {end} ends after "
            f"{min(steps, scheduler.max_steps)} updates: the learning rate rises to the end; set fewer, or null for a "
            f"tenth of the updates and at most 100"
        )
    return found


def limits(config: SpeedtronicConfig) -> list[str]:
    """What a run as configured will not be able to do later, although nothing is wrong with it."""
    problem = config.model.without_hugging_face_form if config.model.name in BUILT_IN_MODELS else None
    if problem is None:
        return []
    return [f"{problem}: `checkpoints export` will write it as plain safetensors only"]
