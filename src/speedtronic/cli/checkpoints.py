"""`speedtronic checkpoints list | verify | export`: what a run has saved."""

from __future__ import annotations

import argparse

from speedtronic.cli import checkpoints_export, checkpoints_list, checkpoints_verify


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("checkpoints", help="list, verify or export saved checkpoints")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for action in (checkpoints_list, checkpoints_verify, checkpoints_export):
        action.add_parser(actions)
