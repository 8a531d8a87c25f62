"""Every event of a run: what it says, and which keys its payload has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EventKind:
    """What an event tells.

    Attributes:
        meaning: when it is sent.
        keys: keys that each payload has.
        sometimes: keys that a payload may have besides.
    """

    meaning: str
    keys: tuple[str, ...]
    sometimes: tuple[str, ...] = ()


EVENTS: Mapping[str, EventKind] = {
    "train_start": EventKind(
        "`fit` begins",
        ("step", "target_steps", "device", "precision", "parameters", "micro_batches"),
    ),
    "train_step": EventKind(
        "one optimizer update; on the sinks at the cadence of `logging.every_steps`, to hooks always",
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
            "peak_memory_bytes",
        ),
        ("mfu",),
    ),
    "train_end": EventKind(
        "`fit` ends without an error",
        ("step", "samples", "tokens", "final_loss", "eval_loss", "duration_s"),
    ),
    "eval": EventKind("an evaluation on held-out data", ("step", "loss"), ("targets", "batches", "duration_s")),
    "checkpoint": EventKind(
        "a checkpoint is durable, or its save failed (`path` is null)", ("step", "path"), ("error",)
    ),
    "compile": EventKind("`torch.compile` was set up, or was given up", ("status",), ("error",)),
    "optimizer_step_skipped": EventKind("a gradient scaler left out an update", ("step", "reason", "scale")),
    "nonfinite": EventKind("a loss or gradient is NaN or infinite", ("step", "loss", "grad_norm", "action")),
    "interrupted": EventKind("a signal ended the run", ("step", "signal")),
    "shape_warning": EventKind(
        "a size that the device's kernels are slow with",
        ("code", "field", "value", "suggested", "alignment", "reason"),
    ),
    "shape_profile": EventKind(
        "the sizes were looked at before training",
        ("device_type", "precision", "alignment", "warning_count"),
    ),
    "delta_upload_queued": EventKind(
        "DumbDiLoCo: a pseudo-gradient is on this node's disk, from where it will reach the store",
        ("step", "seq", "bytes"),
    ),
    "delta_uploaded": EventKind("DumbDiLoCo: the store has a pseudo-gradient", ("seq", "bytes", "session")),
    "delta_upload_skipped": EventKind(
        "DumbDiLoCo: a boundary without an upload; the next pseudo-gradient holds its progress too", ("step", "reason")
    ),
    "delta_upload_failed": EventKind(
        "DumbDiLoCo: a pseudo-gradient could not be written or sent; it is tried again",
        ("error",),
        ("step", "seq", "session"),
    ),
    "delta_rejected": EventKind("DumbDiLoCo: the master took in no such pseudo-gradient", ("seq", "session", "reason")),
    "global_installed": EventKind(
        "DumbDiLoCo: this node trains on from new global weights; `staleness` counts rounds, `pending` this node's "
        "pseudo-gradients that are not in them yet",
        ("step", "version", "staleness", "pending"),
    ),
    "outer_step": EventKind(
        "DumbDiLoCo: the master published a version; `fraction` is the share of the expected work that was in, "
        "`rounds` the sum of the shares so far",
        ("version", "deltas", "nodes", "fraction", "rounds", "rejected"),
    ),
    "log": EventKind("a message for people; hooks do not hear it", ("level", "message")),
}
