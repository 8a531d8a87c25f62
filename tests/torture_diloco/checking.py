"""Holds what a run left in its store against what must be."""

from __future__ import annotations

from tests.torture_diloco.audit import Audit, Objects, Position, Rules
from tests.torture_diloco.places import Place
from tests.torture_diloco.setting import BATCH, CONTEXT, NODES, Size


def audited(place: Place, size: Size) -> Audit:
    """The history of a run, recomputed."""
    objects = Objects(place.gather())
    audit = Audit(Rules(expected=len(NODES)), objects)
    audit.faults += [f"{name} was changed" for name in objects.changed()]
    return audit.run(dict.fromkeys(NODES, Position(size.steps, size.steps * BATCH, size.steps * BATCH * CONTEXT)))
