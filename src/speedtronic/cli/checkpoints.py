"""`speedtronic checkpoints list | verify | export | publish`: what a run has saved."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output
from speedtronic.cli.arguments import add_run_arguments, find_checkpoints, split_words
from speedtronic.cli.output import printable
from speedtronic.cli.publishing import (
    add_publish_arguments,
    draw_losses,
    new_folder,
    publish,
    take_address,
    write_card,
)
from speedtronic.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn

    from speedtronic.checkpoint import CheckpointEntry, CheckpointManager
    from speedtronic.checkpoint.export.files import HuggingFaceTokenizer, SavedModel
    from speedtronic.durable.files import FileSystem

_FIELDS = """\
fields of the JSON objects:
  step, run_id, time, loss, eval_loss    as the checkpoint's manifest.json has them; null when it cannot be read
  monitored   name, mode and value of what it is compared by (eval.monitor); null when it was not measured
  path        the checkpoint's folder
  size_bytes  of all its files
  newest      whether it is the one that is loaded next
  best        whether it is the one that --best takes: the best by eval.monitor of the run that is loaded next
  problem     what is wrong with it, or null
"""
_HEADINGS = ("", "STEP", "AGE", "SIZE", "LOSS", "EVAL LOSS", "RUN", "STATUS", "FOLDER")
_CHECKPOINT_NAME = re.compile(r"step_\d{12}")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("checkpoints", help="list, verify or export saved checkpoints")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_list(actions)
    _add_verify(actions)
    _add_export(actions)
    _add_publish(actions)


# ---------------------------------------------------------------------- which checkpoints a path means


@dataclass(frozen=True)
class _Found:
    """The checkpoints that a path means.

    Attributes:
        manager: of the folder that they are in.
        entries: all of them, by step; or the one that was named.
        is_one: whether one was named.
    """

    manager: CheckpointManager
    entries: list[CheckpointEntry]
    is_one: bool


def _find(args: argparse.Namespace) -> _Found:
    """Find the checkpoints that a user means.

    Raises:
        CheckpointError: there is no such path, it cannot be read, there are none, or only those of version 2.0.
        ConfigError: the path is a file that is not a configuration.
    """
    from speedtronic.checkpoint import CheckpointManager
    from speedtronic.checkpoint.entries import inspect
    from speedtronic.durable.files import FileSystem

    named, _ = split_words(args.words, "run")
    try:
        _refuse_what_is_no_run(Path(named))
        path = find_checkpoints(args).path
        path = path if path.name not in ("", "..") else path.resolve()
        if path.is_dir() and (_CHECKPOINT_NAME.match(path.name) or (path / "manifest.json").is_file()):
            return _Found(CheckpointManager(path.parent), [inspect(FileSystem(), path)], is_one=True)
        manager = CheckpointManager(path, warn=output.warn)
        entries = manager.entries()
        if not entries:
            manager.verified_path()  # says what is wrong with checkpoints of version 2.0
            raise CheckpointError(f"{manager.directory}: there are no checkpoints")
    except OSError as error:
        raise CheckpointError(f"{named}: cannot be read: {error.strerror or error}") from error
    return _Found(manager, entries, is_one=False)


def _refuse_what_is_no_run(path: Path) -> None:
    from speedtronic.checkpoint import CheckpointManager

    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder or config")
    if path.is_file() and path.suffix == ".pt":
        beside = CheckpointManager(path.parent)
        if not beside.entries():
            beside.verified_path()  # says what is wrong with checkpoints of version 2.0


def _as_json(entries: list[CheckpointEntry], newest: Path | None, best: Path | None) -> str:
    """A JSON array of entries, whose fields `_FIELDS` describes."""
    objects: list[dict[str, Any]] = [
        {
            "step": entry.step,
            "path": str(entry.path),
            "size_bytes": entry.size,
            "time": entry.manifest and entry.manifest.time,
            "run_id": entry.manifest and entry.manifest.run_id,
            "loss": entry.manifest and entry.manifest.loss,
            "eval_loss": entry.manifest and entry.manifest.eval_loss,
            "monitored": entry.monitored and entry.monitored.model_dump(),
            "newest": entry.path == newest,
            "best": entry.path == best,
            "problem": entry.problem,
        }
        for entry in entries
    ]
    return json.dumps(objects, indent=2) + "\n"


# ---------------------------------------------------------------------- list


def _add_list(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "list",
        help="list the checkpoints of a run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="List checkpoints: step, age, size, losses, run, and whether all files are there in full.\n"
        "Damaged ones are listed with the reason; * marks the one that is loaded next, `best` the best by\n"
        "eval.monitor.\n"
        "Contents are not read: `speedtronic checkpoints verify` does that.",
        epilog="exit code: 0 at least one is complete, 1 all are damaged, 2 there is none\n\n" + _FIELDS,
    )
    add_run_arguments(parser, best=False)
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object per checkpoint")
    parser.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> int:
    found = _find(args)
    newest, best = found.manager.latest_path(), found.manager.likely_best_path()
    if args.json:
        output.write(_as_json(found.entries, newest, best))
    else:
        now = datetime.now(UTC)
        output.write_table(_HEADINGS, [_as_row(entry, newest, best, now) for entry in found.entries])
    return 0 if any(entry.problem is None for entry in found.entries) else 1


def _as_row(entry: CheckpointEntry, newest: Path | None, best: Path | None, now: datetime) -> tuple[str, ...]:
    from speedtronic.metrics.lines import short_bytes

    manifest = entry.manifest
    losses = (manifest.loss, manifest.eval_loss) if manifest else (None, None)
    return (
        "*" if entry.path == newest else "",
        str(entry.step),
        output.age((now - datetime.fromisoformat(manifest.time)).total_seconds()) if manifest else "-",
        short_bytes(entry.size),
        *("-" if loss is None else f"{loss:.4f}" for loss in losses),
        manifest.run_id[:8] if manifest else "-",
        f"damaged: {printable(entry.problem)}" if entry.problem else "complete" + ", best" * (entry.path == best),
        printable(entry.path.name),
    )


# ---------------------------------------------------------------------- verify


def _add_verify(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "verify",
        help="read a checkpoint whole and compare it with its checksums",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Read every byte of the checkpoint that was saved last, or of the one that is named, and compare\n"
        "it with its checksums. Each checkpoint gets one line, with the reason when it is damaged.",
        epilog="exit code: 0 all are sound, 1 at least one is damaged, 2 there is none\n\n" + _FIELDS,
    )
    add_run_arguments(parser, best=True)
    parser.add_argument("--all", action="store_true", help="verify every checkpoint in the folder")
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object per checkpoint")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    if args.all and args.best:
        raise ConfigError("--all and --best choose different checkpoints: leave one of them out")
    verified: list[CheckpointEntry] = []
    while not verified:
        found = _find(args)
        if args.best:
            best = _best(found)
            chosen = [entry for entry in found.entries if entry.path == best]
        else:
            chosen = found.entries if args.all or found.is_one else [_saved_last(found)]
        verified = _verify(found, chosen, args)
    if args.json:
        output.write(_as_json(verified, found.manager.latest_path(), found.manager.likely_best_path()))
    return 0 if all(entry.problem is None for entry in verified) else 1


def _verify(found: _Found, chosen: list[CheckpointEntry], args: argparse.Namespace) -> list[CheckpointEntry]:
    """The entries with the problems that their contents show, without those that a run has removed meanwhile."""
    from speedtronic.metrics.lines import short_bytes

    verified = []
    with output.reading_progress("verifying", sum(entry.size for entry in chosen)) as fs:
        for entry in chosen:
            entry = _verified(fs, entry)
            if entry.problem is not None and not found.is_one and not os.path.lexists(entry.path):
                continue
            verified.append(entry)
            if not args.json:
                sound = entry.problem is None
                status = f"sound, {short_bytes(entry.size)}" if sound else f"damaged: {printable(str(entry.problem))}"
                output.write(f"{printable(entry.path.name)}: {status}\n")
    return verified


def _best(found: _Found) -> Path:
    """The checkpoint that `--best` takes, sound or not as far as its contents are concerned.

    Raises:
        CheckpointError: none was evaluated.
        ConfigError: one checkpoint was named.
    """
    if found.is_one:
        raise ConfigError(f"{found.entries[0].path}: is one checkpoint; to take the best, name the folder of its run")
    return found.manager.likely_best_path() or found.manager.best_path()


def _saved_last(found: _Found) -> CheckpointEntry:
    """The newest checkpoint, sound or not: the one that `latest.json` names, else the newest by the manifests."""
    from speedtronic.checkpoint.entries import newest_first, of_run
    from speedtronic.checkpoint.manager import LATEST
    from speedtronic.checkpoint.manifest import read_pointer
    from speedtronic.durable.files import FileSystem

    entries = found.entries
    by_manifest = [*newest_first(entries), *reversed(entries)]
    try:
        pointer = read_pointer(FileSystem(), found.manager.directory / LATEST)
    except CheckpointError:
        return by_manifest[0]
    named = [entry for entry in entries if entry.path.name == pointer.checkpoint]
    return [*named, *of_run(entries, pointer.run_id), *by_manifest][0]


def _verified(fs: FileSystem, entry: CheckpointEntry) -> CheckpointEntry:
    """The entry, with the problem that its contents show."""
    from speedtronic.checkpoint.snapshot import check_files

    if entry.manifest is None or entry.problem is not None:
        return entry
    try:
        check_files(fs, entry.path, entry.manifest)
    except CheckpointError as error:
        return replace(entry, problem=str(error))
    except OSError as error:
        return replace(entry, problem=f"it cannot be read: {error.strerror or error}")
    return entry


# ---------------------------------------------------------------------- export


def _add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "export",
        help="write a checkpoint's weights for other programs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write the weights of the newest sound checkpoint, or of the one that is named.\n"
        "\n"
        "safetensors  one plain file with the model's own names, which safetensors.torch.load_model loads\n"
        "huggingface  a folder that transformers loads, with the tokenizer where it has that form: of the reference\n"
        "             transformer as a Llama (with qk_norm as a Qwen3), of a model of Hugging Face by its own\n"
        "             save_pretrained, with its adapters (model.lora) merged into its weights\n"
        "peft         a folder with the adapters alone, which peft loads beside the weights of model.hf_folder\n"
        "\n"
        "Where the run kept an average of the weights (optimizer.ema), the average is written, as it was evaluated.\n"
        "The copy is there in full or not at all.",
        epilog="exit code: 0 done, 1 it could not be written, 2 there is no sound checkpoint, or bad use",
    )
    add_run_arguments(parser, best=True)
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE|DIR",
        help="where to: a folder, or for safetensors a file that ends in .safetensors",
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "huggingface", "peft"),
        default="safetensors",
        help="(default: safetensors)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of floating-point weights (default: that of the model)",
    )
    parser.add_argument("--force", action="store_true", help="replace a former export")
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    import torch

    from speedtronic.metrics.lines import short_bytes, short_number

    with output.termination_unwinds():
        while True:
            model = _open(args)
            try:
                target, notes = _write(model, args)
                break
            except CheckpointError:
                if model.path.exists():
                    raise
                # A run that saves there has removed the checkpoint, and has saved another one before.

    kind = "weights"
    if model.average:
        optimizer = (model.config or {}).get("optimizer")
        decay = optimizer.get("ema") if isinstance(optimizer, dict) else None
        kind = "averaged weights" if decay is None else f"averaged weights (optimizer.ema {decay})"
    count = short_number(sum(torch.Size(place.shape).numel() for place in model.header.places))
    files = [target] if target.is_file() else list(target.iterdir())
    written = short_bytes(sum(file.stat().st_size for file in files))
    summary = f"exported: {printable(str(target))}: step {model.step}, {count} {kind}, {written}"
    output.write("\n".join([summary, *notes]) + "\n")
    return 0


def _write(model: SavedModel, args: argparse.Namespace) -> tuple[Path, list[str]]:
    """Write a model's export; what was written, and notes for the user."""
    import torch

    from speedtronic.checkpoint.export.files import export_hugging_face, export_pretrained, export_safetensors

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    size = sum(stored.place.end - stored.place.begin for stored in model.tensors().values())
    with output.reading_progress("exporting", size) as fs:
        if args.format == "safetensors":
            return export_safetensors(model, args.out, dtype=dtype, replace=args.force, fs=fs), []
        from speedtronic.model.hugging_face import check_base, has_adapters, merged
        from speedtronic.model.transformer import NORM_EPS

        tokenizer, notes = _tokenizer(model)
        options: dict[str, Any] = {"tokenizer": tokenizer, "dtype": dtype, "replace": args.force, "fs": fs}
        module = _custom_model(args)
        adapters = module is not None and has_adapters(module)
        if args.format == "peft" and not adapters:
            raise ConfigError("--format peft: this model has no adapters (model.lora); use --format huggingface")
        if module is None:
            return export_hugging_face(model, args.out, norm_eps=NORM_EPS, **options), notes
        check_base(module, model.base)
        merge = merged if adapters and args.format == "huggingface" else None
        options["tokenizer"] = _with_settings_of_folder(tokenizer, find_checkpoints(args).config.model.hf_folder)
        return export_pretrained(model, module, args.out, merge=merge, **options), notes


def _custom_model(args: argparse.Namespace) -> nn.Module | None:
    """The run's own model, which its plugins define; None for a built-in one, or where there is no configuration.

    Raises:
        ConfigError: the configuration is wrong, or the model cannot be built.
    """
    from speedtronic.config.checks import BUILT_IN_MODELS
    from speedtronic.registry import build_model
    from speedtronic.runtime import import_plugins

    found = find_checkpoints(args)
    if found.config.model.name in BUILT_IN_MODELS:
        return None
    import_plugins(found.config.plugins, found.folder)
    model = found.config.model
    if model.lora is not None and args.format == "huggingface":
        # Adapters are merged into the weights as the folder has them, not as training kept them in less memory.
        model.lora = model.lora.model_copy(update={"base": "float32"})
    return build_model(model)


def _open(args: argparse.Namespace) -> SavedModel:
    """The model in the newest or best sound checkpoint, or in the one that is named."""
    from speedtronic.checkpoint import CheckpointManager
    from speedtronic.checkpoint.export.files import open_model

    found = _find(args)
    if args.best:
        _best(found)  # refuses where there is none
    with output.reading_progress("verifying", max(entry.size for entry in found.entries)) as fs:
        if found.is_one:
            return open_model(found.entries[0].path, fs=fs)
        manager = CheckpointManager(found.manager.directory, warn=output.warn, fs=fs)
        model = manager.use_newest(partial(open_model, verify=False), best=args.best)
    if model is None:
        raise CheckpointError(f"{found.manager.directory}: the checkpoints were removed in the meantime")
    return model


def _tokenizer(model: SavedModel) -> tuple[HuggingFaceTokenizer | None, list[str]]:
    """The run's tokenizer as far as the folder can hold it, and notes for the user."""
    from speedtronic.checkpoint.export.files import HuggingFaceTokenizer
    from speedtronic.data.tokenizers.from_file import tokenizer_from_spec
    from speedtronic.data.tokenizers.tokenizer_json import tokenizer_json

    spec = model.tokenizer
    if spec is None:
        return None, ["without a tokenizer: the run had none"]
    separator_id = tokenizer_from_spec(spec).separator_id
    return HuggingFaceTokenizer(tokenizer_json(spec), separator_id), []


def _with_settings_of_folder(tokenizer: HuggingFaceTokenizer | None, folder: str | None) -> HuggingFaceTokenizer | None:
    """The tokenizer with what the folder of a fine-tuned model says of it, if the run used that of the folder."""
    from speedtronic.checkpoint.export.files import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
    from speedtronic.data.tokenizers.from_file import load_tokenizer

    if tokenizer is None or folder is None or not Path(folder, TOKENIZER).is_file():
        return tokenizer
    if load_tokenizer(folder).spec().get("json") != tokenizer.json:
        return tokenizer
    settings, template = Path(folder, TOKENIZER_CONFIG), Path(folder, CHAT_TEMPLATE)
    try:
        return tokenizer._replace(
            settings=json.loads(settings.read_bytes()) if settings.is_file() else {},
            chat_template=template.read_bytes() if template.is_file() else None,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.hf_folder: {folder}: its {TOKENIZER_CONFIG} cannot be read: {error}") from error


# ---------------------------------------------------------------------- publish


def _add_publish(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "publish",
        help="put a checkpoint's weights on the Hugging Face Hub, with a model card",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Export the newest sound checkpoint, or the one that is named, and put it into a repository of\n"
        "the Hugging Face Hub, in one commit, with a model card: step, losses, versions, fingerprint of the data,\n"
        "configuration (secrets hidden), and a picture of the loss. The repository is made, private, where it is\n"
        "missing. The token comes from HF_TOKEN or from `hf auth login`. HF_ENDPOINT names another Hub.",
        epilog="exit code: 0 done, 1 the Hub does not answer, 2 there is no sound checkpoint, no access, or bad use",
    )
    add_run_arguments(parser, best=True)
    parser.add_argument(
        "--format",
        choices=("safetensors", "huggingface"),
        default="huggingface",
        help="as of `checkpoints export` (default: huggingface)",
    )
    add_publish_arguments(parser)
    parser.set_defaults(run=run_publish, dtype=None, force=False)


def run_publish(args: argparse.Namespace) -> int:
    address = take_address(args.words)
    model = _open(args)
    with output.termination_unwinds(), new_folder() as folder:
        args.out = folder
        _, notes = _write(model, args)
        draw_losses(_run_folder(args, model), folder)
        write_card(folder, address.rpartition("/")[2], _facts(model), model.config)
        publish(args, folder, address, f"step {model.step}")
    if notes:
        output.write("\n".join(notes) + "\n")
    return 0


def _run_folder(args: argparse.Namespace, model: SavedModel) -> Path:
    """The folder whose log tells of the run: the one that was named, or that of the checkpoint."""
    named = Path(args.words[0])
    return named if named.is_dir() and not _CHECKPOINT_NAME.match(named.name) else model.path.parent.parent


def _facts(model: SavedModel) -> dict[str, object]:
    """What a model card says of a checkpoint."""
    from speedtronic.checkpoint.manifest import read_manifest
    from speedtronic.checkpoint.snapshot import read_trees, saved_parts
    from speedtronic.durable.files import FileSystem

    manifest = read_manifest(FileSystem(), model.path)
    state = read_trees(FileSystem(), model.path, manifest)
    samples, tokens = saved_parts(state, "samples", "tokens")
    return {
        "step": model.step,
        "samples": samples,
        "tokens": tokens,
        "loss of that step": manifest.loss,
        "loss on held-out data": manifest.eval_loss,
        "weights": "averaged (optimizer.ema)" if model.average else "of the step",
        "data": _fingerprint_in(state["state"].get("data")),
        "run": manifest.run_id,
        "saved": manifest.time,
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }


def _fingerprint_in(tree: object) -> str | None:
    """The fingerprint of the data in the state of a loader."""
    if not isinstance(tree, dict):
        return None
    own = tree.get("fingerprint")
    if isinstance(own, str):
        return f"fingerprint {own}"
    return next(filter(None, map(_fingerprint_in, tree.values())), None)
