"""`speedtronic diloco cost`: what a store will see, before anybody has to pay for it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_from_arguments
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.distributed.cost import Load, Sizes

_HUB_BUDGET = 100  # commits an hour that a repository on the Hub should see; beyond about 128 it refuses them


def add_cost_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "cost",
        help="say what requests, bytes and storage a run will ask of its store",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Count what nodes and a master will ask of the store: requests of each kind, bytes each way, what\n"
        "lies there at the end, and commits an hour, if the store were a Git repository on the Hub. Nothing is asked\n"
        "of the store. The nodes are taken to be equally fast, and each to need --hours for its run.max_steps (or\n"
        "data.max_steps): `speedtronic train CONFIG --dry-run` says how long that takes on a machine. Retries come on\n"
        "top. A service charges by its own price list: creations and listings usually cost ten times what reads do,\n"
        "deletions nothing, and bytes that leave its network cost most.",
        epilog="exit code: 0 done, 2 bad use",
    )
    add_config_arguments(parser)
    parser.add_argument("--nodes", required=True, metavar="N", help="how many nodes train")
    parser.add_argument("--hours", required=True, metavar="H", help="how long each of them trains")
    parser.add_argument("--json", action="store_true", help="print a JSON object: for an hour, sizes in bytes")
    parser.set_defaults(run=run_cost)


def run_cost(args: argparse.Namespace) -> int:
    config, folder = load_from_arguments(args)
    nodes, hours = _number(args.nodes, "--nodes", whole=True), _number(args.hours, "--hours")

    from speedtronic.config.checks import refuse_what_is_not_built
    from speedtronic.distributed.cost import Sizes, expected_load
    from speedtronic.distributed.schema import Schema
    from speedtronic.metrics import MetricLogger
    from speedtronic.runtime import build_initial_model, import_plugins

    section = config.distributed
    section.enabled = True  # asked for by the command, so that what is not built is refused
    refuse_what_is_not_built(config)
    import_plugins(config.plugins, folder)
    config.run.init_from = None  # sizes do not depend on it
    sizes = Sizes.of(Schema.of(build_initial_model(config, MetricLogger(level="ERROR"))), section.codec)
    quorum = section.quorum or -(-int(nodes) // 2)
    load = expected_load(
        sizes,
        nodes=int(nodes),
        hours=hours,
        steps=config.data.max_steps or config.run.max_steps,
        inner_steps=section.inner_steps,
        poll_interval=section.poll_interval,
        quorum=quorum,
        keep=section.keep_versions,
    )
    if args.json:
        output.write(json.dumps(_as_object(sizes, load), indent=2) + "\n")
        return 0
    _print(sizes, load, hours)
    return 0


def _number(word: str, option: str, *, whole: bool = False) -> float:
    try:
        number = float(int(word) if whole else float(word))
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ConfigError(f"{option} must be a {'whole number' if whole else 'number'} over 0, not {word}")
    return number


def _as_object(sizes: Sizes, load: Load) -> dict[str, object]:
    return {
        **{f"{name}_bytes": size for name, size in asdict(sizes).items()},
        **{**asdict(load), "requests": load.requests._asdict()},
    }


def _print(sizes: Sizes, load: Load, hours: float) -> None:
    from speedtronic.metrics.lines import short_bytes, short_number

    output.write_facts(
        [
            ("a delta", short_bytes(sizes.delta)),
            ("weights, momentum", f"{short_bytes(sizes.weights)}, {short_bytes(sizes.momentum)}"),
        ]
    )
    headings = ("", "AN HOUR", f"IN {hours:g} HOURS")
    counts = [("deltas", load.deltas), ("versions", load.versions)]
    counts += [(f"{kind} requests", count) for kind, count in load.requests._asdict().items()]
    rows = [(name, short_number(round(count)), short_number(round(count * hours))) for name, count in counts]
    rows += [
        (name, short_bytes(round(size)), short_bytes(round(size * hours)))
        for name, size in (("bytes put", load.sent), ("bytes read", load.received))
    ]
    output.write_table(headings, rows)
    output.write(
        f"at the end the store holds {short_bytes(round(load.stored))} in "
        f"{output.counted(round(load.objects), 'object')}\n"
        f"a repository on the Hub would see {load.commits:.3g} commits an hour, or {load.commits_in_one:.3g} if all "
        "nodes write to one"
        + ("" if load.commits_in_one <= _HUB_BUDGET else f": more than {_HUB_BUDGET}; raise distributed.inner_steps")
        + "\n"
    )
