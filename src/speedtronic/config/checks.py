"""What `train` refuses and what it warns of, as far as the configuration alone shows it. `validate` says it too.

A configuration that loads is well formed. Loading does not ask whether this version can train by it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from speedtronic.config.root import SpeedtronicConfig
from speedtronic.config.sections import HELD_OUT, MEASURES, DataConfig
from speedtronic.errors import ConfigError, NotBuiltError

NOT_BUILT: Mapping[str, tuple[str, ...]] = {
    "distributed.worker_repo_id": (),
    "distributed.codec": ("int8", "int4", "int2", "topk"),
    "distributed.outer": ("sparse_loco",),
    "distributed.trusted_nodes": (),
    "distributed.robust": (),
    "parallel.strategy": ("fsdp",),
    "parallel.shard_within_node": (),
    "parallel.cpu_offload": (),
    "precision.mode": ("fp8",),
}
"""Keys whose part is still to come, with the values that need it; without values, all but the default need it."""

BUILT_IN_MODELS = frozenset({"reference_transformer", "gpt"})
"""The values of `model.name` that mean the reference transformer."""

HUGGING_FACE = "hf"
"""The value of `model.name` that means what the folder of a Hugging Face model describes."""

REGISTERED = BUILT_IN_MODELS | {HUGGING_FACE}
"""The values of `model.name` that no plugin has to register."""


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


def refuse_what_cannot_be_trained(config: SpeedtronicConfig, registered: Collection[str] = REGISTERED) -> None:
    """Raise ConfigError with all that is certain to stop `train` before its first update.

    What only the data, the machine or a plugin can show is not looked at.

    Args:
        config: a resolved configuration.
        registered: the names of the models that there are before its plugins are imported.
    """
    refuse_what_is_not_built(config)
    problems = [*_not_built_in(config, registered), *beyond_the_model(config), *_wrong_sources(config)]
    problems += _wrong_evaluation(config)
    if config.scheduler.decay_steps is not None and config.scheduler.name != "wsd":
        problems.append(
            f"scheduler.decay_steps: only wsd has a decay of its own, and scheduler.name is {config.scheduler.name}; "
            "remove it, or set scheduler.name: wsd"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _not_built_in(config: SpeedtronicConfig, registered: Collection[str]) -> Iterator[str]:
    """A model that nothing can register, or that no built-in model can be."""
    model = config.model
    if model.name == HUGGING_FACE:
        if model.hf_folder is None:
            yield NO_HF_FOLDER
        if model.lora is not None and config.distributed.enabled:
            yield (
                "model.lora: nodes exchange whole models, and one with adapters has a part that stays as it is; train "
                "it on one machine, or leave model.lora out"
            )
        return
    if model.name not in BUILT_IN_MODELS:
        if model.name not in registered and not config.plugins and config.data.dataset is None:
            yield unknown_model(model.name, registered)
        return
    if model.extra:
        given = ", ".join(f"model.extra.{key}" for key in model.extra)
        yield f"{given}: the reference transformer takes no extra keys"
    if model.d_model // model.n_head % 2:
        yield (
            f"model.d_model {model.d_model} / model.n_head {model.n_head} is an odd head width, "
            f"{model.d_model // model.n_head}; rotary embedding turns pairs, so it must be even"
        )


NO_HF_FOLDER = (
    "model.name: hf builds what the config.json of a folder describes; set run.init_from, or model.hf_folder, to a "
    "folder that save_pretrained has written"
)


def unknown_model(name: str, registered: Collection[str]) -> str:
    """What is said of a model's name under which none is registered."""
    near = difflib.get_close_matches(name, registered, n=1)
    suggestion = f"; did you mean {near[0]!r}?" if near else "."
    return (
        f"model.name: no model is registered as {name!r}{suggestion} Known: {', '.join(sorted(registered))}. "
        "To register your own model, list its module under `plugins:`"
    )


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
    if data.source is None:
        yield NO_SOURCE
    if data.labels == "unshifted":
        yield LABELS_ARE_ALIGNED
    if config.loss == "mse":
        yield (
            "loss: mse compares numbers, and the labels of text, shards and synthetic data are token ids; leave it "
            "out, or give data.dataset"
        )
    if data.source == "synthetic":
        yield from _too_little_synthetic(data)
    if not data.validation_fraction and (problem := needs_held_out_data(config)) is not None:
        yield problem


def _too_little_synthetic(data: DataConfig) -> Iterator[str]:
    assert data.block_size is not None, "it is resolved"
    samples = data.num_tokens // data.block_size
    held_out = max(1, int(samples * data.validation_fraction)) if data.validation_fraction else 0
    needed = data.micro_batch_size if data.drop_last else 1
    if samples - held_out < needed:
        yield (
            f"data.num_tokens: {data.num_tokens} tokens are {samples} blocks of {data.block_size}, of which {held_out} "
            f"are held out (data.validation_fraction), and training needs at least {needed}; use more tokens, or a "
            "smaller data.block_size or data.micro_batch_size"
        )


def _wrong_evaluation(config: SpeedtronicConfig) -> Iterator[str]:
    section = config.eval
    of_set, _, name = section.monitor.rpartition("/")
    known = [*MEASURES, *(metric.name for metric in section.metrics)]
    # A metric may compute several numbers, each with a name of its own behind that of the metric.
    if name.partition(".")[0] not in known:
        yield f"eval.monitor: no evaluation has {name!r}; name one of {', '.join(known)}, or add it to eval.metrics"
    if of_set and of_set not in (HELD_OUT, *section.sets):
        sets = ", ".join((HELD_OUT, *section.sets))
        yield f"eval.monitor: {of_set!r} is none of the sets that are evaluated ({sets}); see eval.sets"


HOLD_SOMETHING_OUT = (
    "set data.validation_fraction or eval.sets, or let data.dataset return a pair (training, validation)"
)
NO_SOURCE = "data: no source; give data.shards, data.text_path or data.dataset, or set data.synthetic: true"
LABELS_ARE_ALIGNED = (
    "data.labels: unshifted is for data whose labels repeat the inputs, which only your own data.dataset can have; "
    "text, shards and synthetic data have next-token labels already: set data.labels to aligned"
)


def needs_held_out_data(config: SpeedtronicConfig) -> str | None:
    """What is wrong where nothing is held out; None if nothing needs it."""
    if config.eval.sets:
        return None
    if config.eval.every_steps is not None:
        return f"eval.every_steps: nothing is held out to evaluate on; {HOLD_SOMETHING_OUT}"
    if config.checkpoint.keep_best > 0:
        return f"checkpoint.keep_best: nothing is held out to find the best checkpoint by; {HOLD_SOMETHING_OUT}"
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
