"""`speedtronic diloco pull`: the global weights as a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from speedtronic.cli import output
from speedtronic.cli.diloco_store import add_store_arguments, opened_store
from speedtronic.cli.interrupts import sigterm_unwinds


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "pull",
        help="write the global weights to a safetensors file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Fetch the global weights, compare their size and checksum with the manifest, and write them to a\n"
        "safetensors file with the model's own names. run.init_from starts a training from it.\n"
        "The file is there in full or not at all.",
        epilog="exit code: 0 done, 1 the store does not answer or the file cannot be written,\n"
        "2 there is no such version, or bad use",
    )
    add_store_arguments(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("model.safetensors"),
        metavar="FILE|DIR",
        help="where to: a file that ends in .safetensors, or a folder (default: model.safetensors)",
    )
    parser.add_argument("--version", type=int, metavar="N", help="of the weights (default: the newest)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from speedtronic.distributed.pull import pull, target
    from speedtronic.metrics.lines import short_bytes

    with sigterm_unwinds(), opened_store(args) as store:
        manifest = pull(store, args.out, version=args.version, replace=args.force)
        size = short_bytes(manifest.weights.size)
        output.write(f"pulled: {target(args.out)}: version {manifest.version} of {store.url}, {size}\n")
    return 0
