from __future__ import annotations

import pytest

from speedtronic.config.root import SpeedtronicConfig, sections
from speedtronic.config.shorthands import HOMES, NAMED_BY_TEXT, SECTION_NAMES, full_path, in_full


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ((), ()),
        (("max_steps",), ("run", "max_steps")),
        (("muon_plus",), ("optimizer", "muon_plus")),
        (("hub", "token"), ("distributed", "token")),
        (("diloco",), ("distributed",)),
        (("run", "seed"), ("run", "seed")),
        (("plugins", 0), ("plugins", 0)),
    ],
)
def test_a_short_path_leads_to_its_full_one(short: tuple[str | int, ...], full: tuple[str | int, ...]) -> None:
    assert full_path(short) == full


def test_shorthands_stand_for_keys_that_exist_and_hide_none() -> None:
    tree = SpeedtronicConfig().to_dict()
    assert all(key in tree[section] for key, section in HOMES.items())
    assert all(key in tree[section] for section, key in NAMED_BY_TEXT.items())
    assert all(name in tree for name in SECTION_NAMES.values())
    assert not tree.keys() & {*HOMES, *SECTION_NAMES}


def test_the_full_form_is_its_own_full_form() -> None:
    full, problems = in_full({"seed": 1, "hub": None, "optimizer": "muon", "compile": {"enabled": True}}, sections())
    assert problems == []
    assert full == {"run": {"seed": 1}, "distributed": {}, "optimizer": {"name": "muon"}, "compile": True}
    assert in_full(full, sections()) == (full, [])
