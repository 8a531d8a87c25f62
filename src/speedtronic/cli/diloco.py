"""`speedtronic diloco master | status | pull`: training over a store that all nodes share."""

from __future__ import annotations

import argparse

from speedtronic.cli import diloco_master, diloco_pull, diloco_status


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("diloco", help="average the weights of many nodes, and see what they do")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for action in (diloco_master, diloco_status, diloco_pull):
        action.add_parser(actions)
