"""`speedtronic checkpoints export`: a checkpoint's weights for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output
from speedtronic.cli.checkpoints_found import add_path_argument, find, printable, reading_progress, warn
from speedtronic.cli.interrupts import sigterm_unwinds

if TYPE_CHECKING:
    from speedtronic.checkpoint.export.files import HuggingFaceTokenizer, SavedModel


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "export",
        help="write a checkpoint's weights for other programs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write the weights of the newest sound checkpoint, or of the one that is named.\n"
        "\n"
        "safetensors  one plain file with the model's own names, which safetensors.torch.load_model loads\n"
        "huggingface  a folder that transformers loads as a Llama, with the tokenizer where it has that form;\n"
        "             for the reference transformer\n"
        "\n"
        "Where the run kept an average of the weights (optimizer.ema), the average is written, as it was evaluated.\n"
        "The copy is there in full or not at all.",
        epilog="exit code: 0 done, 1 it could not be written, 2 there is no sound checkpoint, or bad use",
    )
    add_path_argument(parser)
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE|DIR",
        help="where to: a folder, or for safetensors a file that ends in .safetensors",
    )
    parser.add_argument(
        "--format", choices=("safetensors", "huggingface"), default="safetensors", help="(default: safetensors)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of floating-point weights (default: that of the model)",
    )
    parser.add_argument("--force", action="store_true", help="replace a former export")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from speedtronic.checkpoint.export.files import export_llama, export_safetensors

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    with sigterm_unwinds():
        model = _open(args.path)
        with reading_progress("exporting", _size(model)) as fs:
            if args.format == "safetensors":
                target = export_safetensors(model, args.out, dtype=dtype, replace=args.force, fs=fs)
                notes: list[str] = []
            else:
                from speedtronic.model.transformer import NORM_EPS

                tokenizer, notes = _tokenizer(model)
                target = export_llama(
                    model, args.out, norm_eps=NORM_EPS, tokenizer=tokenizer, dtype=dtype, replace=args.force, fs=fs
                )
    output.write("\n".join([_summary(model, target), *notes]) + "\n")
    return 0


def _open(path: Path) -> SavedModel:
    """The model in the newest sound checkpoint, or in the one that is named."""
    from speedtronic.checkpoint import CheckpointManager
    from speedtronic.checkpoint.export.files import open_model
    from speedtronic.errors import CheckpointError

    found = find(path)
    with reading_progress("verifying", max(entry.size for entry in found.entries)) as fs:
        if found.is_one:
            return open_model(found.entries[0].path, fs=fs)
        newest = CheckpointManager(found.manager.directory, warn=warn, fs=fs).verified_path()
    if newest is None:
        raise CheckpointError(f"{found.manager.directory}: the checkpoints were removed in the meantime")
    return open_model(newest, verify=False)


def _tokenizer(model: SavedModel) -> tuple[HuggingFaceTokenizer | None, list[str]]:
    """What the folder says of the run's tokenizer, and what is to be said about it."""
    from speedtronic.checkpoint.export.files import HuggingFaceTokenizer
    from speedtronic.data.tokenizers.from_file import tokenizer_from_spec

    spec = model.tokenizer
    if spec is None:
        return None, ["without a tokenizer: the model was trained on bare token ids"]
    separator_id = tokenizer_from_spec(spec).separator_id
    if spec["type"] == "tokenizers":
        return HuggingFaceTokenizer(spec["json"], separator_id), []
    return HuggingFaceTokenizer(None, separator_id), [_without_tokenizer(spec)]


def _without_tokenizer(spec: Any) -> str:
    reasons = {
        "bytes": "token ids are the UTF-8 bytes of the text",
        "chars": "token ids are the places of the characters in the sorted alphabet of the training text",
    }
    reason = reasons.get(spec["type"], f"the run's tokenizer, of type {spec['type']!r}, has no such form")
    return f"without a tokenizer.json: {printable(reason)}"


def _size(model: SavedModel) -> int:
    return sum(stored.place.end - stored.place.begin for stored in model.tensors().values())


def _summary(model: SavedModel, target: Path) -> str:
    import torch

    from speedtronic.metrics.lines import short_bytes, short_number

    weights = sum(torch.Size(place.shape).numel() for place in model.header.places)
    files = [target] if target.is_file() else list(target.iterdir())
    size = short_bytes(sum(file.stat().st_size for file in files))
    return f"exported: {printable(str(target))}: step {model.step}, {short_number(weights)} {_kind(model)}, {size}"


def _kind(model: SavedModel) -> str:
    if not model.average:
        return "weights"
    optimizer = (model.config or {}).get("optimizer")
    decay = optimizer.get("ema") if isinstance(optimizer, dict) else None
    return "averaged weights" if decay is None else f"averaged weights (optimizer.ema {decay})"
