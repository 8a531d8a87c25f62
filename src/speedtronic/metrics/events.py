"""Every event of a run: its meaning, the keys of its payload, and its level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speedtronic.metrics.records import DEBUG, INFO, WARNING


@dataclass(frozen=True)
class EventKind:
    """One kind of event.

    Attributes:
        meaning: when it is sent.
        keys: the keys of every payload.
        sometimes: more keys, which only some payloads have.
        level: the level it is shown at: WARNING if a reader should not miss it, DEBUG if few readers need it.
    """

    meaning: str
    keys: tuple[str, ...]
    sometimes: tuple[str, ...] = ()
    level: int = INFO


EVENTS: Mapping[str, EventKind] = {
    "environment": EventKind(
        "what the numbers of a run may depend on besides its configuration, from each of its processes",
        ("speedtronic", "torch", "python", "system", "device", "processor", "cores", "threads"),
        level=DEBUG,
    ),
    "train_start": EventKind(
        "`fit` starts",
        ("step", "target_steps", "device", "precision", "parameters", "micro_batches"),
    ),
    "train_step": EventKind(
        "one optimizer update; the sinks get every `logging.every_steps`-th one and the last one, the hooks get all. "
        "`…_per_sec` is a mean since `fit` began. `interval_…` is since the last step that was logged, without "
        "evaluations, and without a first step that compiles or loads the kernels of a card where others follow it; "
        "`interval_loss` is a mean of the finite losses, and `mfu` is of the interval too. Memory is read once a log. "
        "`gpu_busy_percent` needs `speedtronic[gpu]`. With several optimizers `loss` is the sum of `losses`, which has "
        "that of each by its name",
        (
            "step",
            "loss",
            "lr",
            "steps_per_sec",
            "samples_per_sec",
            "tokens_per_sec",
            "samples",
            "tokens",
            "micro_batches",
            "grad_norm",
            "lr_applied",
            "interval_loss",
            "interval_steps_per_sec",
            "interval_samples_per_sec",
            "interval_tokens_per_sec",
            "peak_memory_bytes",
            "eta_s",
        ),
        ("peak_reserved_bytes", "gpu_busy_percent", "mfu", "losses"),
    ),
    "train_end": EventKind(
        "`fit` ends without an error",
        ("step", "samples", "tokens", "final_loss", "eval_loss", "duration_s"),
    ),
    "eval": EventKind(
        "an evaluation on one set of data: `set` is `held_out` or one of `eval.sets`, and a set has an event of its "
        "own. Language models have `perplexity`, and `bits_per_byte` where the tokenizer tells the bytes of a token. "
        "Each metric of `eval.metrics` is a key more. One of a DumbDiLoCo master is of the global weights: `version` "
        "is theirs, `step` is that of the node that is furthest, and `best_version` was the best by `eval.monitor` "
        "since the master started",
        ("step", "loss"),
        ("set", "perplexity", "bits_per_byte", "targets", "batches", "duration_s", "version", "best_version"),
    ),
    "sample": EventKind("a text that the model wrote at an evaluation (`eval.samples`)", ("step", "prompt", "text")),
    "checkpoint": EventKind(
        "a checkpoint is durable, or its save failed (`path` is null)", ("step", "path"), ("error",)
    ),
    "tune": EventKind(
        "how the run runs was decided: `source` is measured, cache, checkpoint, file, or too short; `choices` are what "
        "differs from the configuration; `speedup` is of a step when it was measured, or null; `ways` were measured",
        ("source", "choices", "speedup", "ways"),
        level=DEBUG,  # a line for people says it too
    ),
    "compile": EventKind("`torch.compile` was set up, or was given up", ("status",), ("cache", "error")),
    "ooo_backprop": EventKind(
        "out-of-order backprop was set up, or its gain was measured; `reason` says why it is off, and `gain` is 0.05 "
        "where an ordinary backward pass takes 5% longer",
        ("enabled", "reason", "device", "num_streams", "stages", "gain"),
    ),
    "optimizer_step_skipped": EventKind(
        "a gradient scaler skipped an update", ("step", "reason", "scale"), level=WARNING
    ),
    "nonfinite": EventKind(
        "a loss or gradient is NaN or infinite", ("step", "loss", "grad_norm", "action"), level=WARNING
    ),
    "interrupted": EventKind("a signal ended the run", ("step", "signal"), level=WARNING),
    "shape_warning": EventKind(
        "a size for which the device's kernels are slow",
        ("code", "field", "value", "suggested", "alignment", "reason"),
        level=WARNING,
    ),
    "shape_profile": EventKind(
        "the sizes were checked before training",
        ("device_type", "precision", "alignment", "warning_count"),
        level=DEBUG,
    ),
    "delta_upload_queued": EventKind(
        "DumbDiLoCo: a pseudo-gradient is on this node's disk, and will be sent to the store from there",
        ("step", "seq", "bytes"),
        level=DEBUG,
    ),
    "delta_uploaded": EventKind("DumbDiLoCo: the store has a pseudo-gradient", ("seq", "bytes", "session")),
    "delta_upload_skipped": EventKind(
        "DumbDiLoCo: a boundary without an upload; the next pseudo-gradient holds its progress too",
        ("step", "reason"),
        level=WARNING,
    ),
    "delta_upload_failed": EventKind(
        "DumbDiLoCo: a pseudo-gradient could not be written or sent; it is tried again",
        ("error",),
        ("step", "seq", "session"),
        level=WARNING,
    ),
    "delta_rejected": EventKind(
        "DumbDiLoCo: the master rejected a pseudo-gradient of this node", ("seq", "session", "reason"), level=WARNING
    ),
    "global_installed": EventKind(
        "DumbDiLoCo: this node goes on from new global weights; `staleness` counts rounds, `pending` counts this "
        "node's pseudo-gradients that the weights do not contain yet",
        ("step", "version", "staleness", "pending"),
    ),
    "outer_step": EventKind(
        "DumbDiLoCo: the master published a version; `fraction` is the share of the expected work that was in, "
        "`rounds` is the sum of the shares so far",
        ("version", "deltas", "nodes", "fraction", "rounds", "rejected"),
    ),
    "log": EventKind("a message for people; hooks do not get it", ("level", "message")),
}


def event_level(event: str) -> int:
    """The level an event is shown at; INFO for an event of a user's own."""
    return EVENTS[event].level if event in EVENTS else INFO
