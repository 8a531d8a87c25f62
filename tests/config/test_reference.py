from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speedtronic.config.base import Section
from speedtronic.config.checks import NOT_BUILT
from speedtronic.config.reference import json_schema, markdown
from speedtronic.config.root import SpeedtronicConfig, sections
from speedtronic.config.shorthands import HOMES, SECTION_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _parts(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _parts(value)


def test_the_page_in_the_docs_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "write it anew: speedtronic schema --format markdown > docs/configuration.md"
    )


def test_the_schema_has_every_key_and_every_shorthand() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {*SpeedtronicConfig.model_fields, *HOMES, *SECTION_NAMES}
    for kind in sections().values():
        assert set(schema["$defs"][kind.__name__]["properties"]) == set(kind.model_fields)


def test_the_schema_refuses_unknown_keys_at_every_level() -> None:
    schema = json_schema()
    closed = [schema, *(definition for definition in schema["$defs"].values())]
    assert all(part["additionalProperties"] is False for part in closed)


def test_every_property_of_the_schema_is_described() -> None:
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        assert [key for key, value in part["properties"].items() if not value.get("description")] == []


def test_every_reference_in_the_schema_leads_somewhere() -> None:
    schema = json_schema()
    named = {part["$ref"].removeprefix("#/$defs/") for part in _parts(schema) if "$ref" in part}
    assert named == set(schema["$defs"])


def test_the_schema_has_types_bounds_choices_and_nulls() -> None:
    schema = json_schema()
    definitions = schema["$defs"]
    assert definitions["RunConfig"]["properties"]["seed"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**32 - 1,
        "default": 1234,
        "description": "Seed of every random number of the run.",
    }
    assert definitions["ModelConfig"]["properties"]["n_kv_head"]["anyOf"] == [
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**31 - 1},
        {"type": "null"},
    ]
    assert definitions["SchedulerConfig"]["properties"]["name"]["anyOf"][0]["enum"] == [
        "cosine",
        "constant",
        "linear",
        "wsd",
    ]
    assert definitions["OptimizerConfig"]["properties"]["betas"]["maxItems"] == 2
    assert re.fullmatch(definitions["RunConfig"]["properties"]["device"]["pattern"], "cuda:1")
    assert schema["properties"]["optimizer"]["anyOf"][1]["anyOf"][0]["enum"] == ["adamw", "adamw8bit", "muon"]
    assert schema["properties"]["compile"]["anyOf"][0] == {"type": "boolean"}
    assert schema["properties"]["max_steps"] == definitions["RunConfig"]["properties"]["max_steps"]
    assert schema["properties"]["hub"]["anyOf"] == schema["properties"]["distributed"]["anyOf"]


def test_the_schema_is_json() -> None:
    assert json.loads(json.dumps(json_schema(), allow_nan=False)) == json_schema()


@pytest.mark.parametrize("name", sorted(Section.known_keys))
def test_the_page_has_a_row_for_every_key(name: str) -> None:
    heading = f"## `{name}`" if name else "## Top level"
    table = markdown().split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    wanted = [key for key in Section.known_keys[name] if key not in sections()]
    assert rows == wanted


def test_the_defaults_on_the_page_are_those_of_the_classes() -> None:
    assert "| `lr` | number ≥ 0 | `0.0003` | Peak learning rate. |" in markdown()
    assert "| `n_kv_head` | whole number > 0, ≤ 2147483647, null | `null` |" in markdown()


def test_the_page_and_the_schema_mark_what_is_not_built_yet() -> None:
    schema, page = json_schema(), markdown()
    for key, values in NOT_BUILT.items():
        section, _, leaf = key.rpartition(".")
        keys = schema["$defs"][sections()[section].__name__]["properties"] if section else schema["properties"]
        which = f": {', '.join(values)}" if values else ""
        assert keys[leaf]["description"].endswith(f" Not part of this version yet{which}.")
        assert f"| {keys[leaf]['description']} |" in page
    assert page.count("Not part of this version yet") == len(NOT_BUILT)
