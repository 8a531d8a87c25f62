"""Holds what a run left in its folder against what must be."""

from __future__ import annotations

from pathlib import Path

from speedtronic.distributed.protocol import Position
from tests.torture_diloco import history, setting
from tests.torture_diloco.setting import BATCH, CONTEXT, NODES, Size

# How far float32, in which the master computes, may lead away from float64 in some hundred versions.
_ROUNDING = 1e-5


def faults_of(folder: Path, size: Size) -> list[str]:
    past = history.read(setting.store_of(folder), setting.kept_of(folder))
    whole = Position(size.steps, size.steps * BATCH, size.steps * BATCH * CONTEXT)
    found = list(history.faults(past, NODES, whole))
    if found:
        return found
    distance = history.distance(past, nodes=len(NODES))
    return [f"the weights are {distance:.1e} away from what the deltas make"] if distance > _ROUNDING else []
