"""The configuration described from its own definition: JSON Schema for editors, a page for readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from string import Template
from typing import Any

from speedtronic.config.checks import NOT_BUILT
from speedtronic.config.problems import short_number
from speedtronic.config.root import SpeedtronicConfig, sections
from speedtronic.config.shorthands import HOMES, NAMED_BY_TEXT, SECTION_NAMES

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_INTRODUCTION = Template("""\
# Configuration

<!-- Written by `speedtronic schema --format markdown`. Change `speedtronic.config`, not this page. -->

One YAML (or JSON) file drives a run. Every key has a default, so a file names only what differs:

```yaml
run: {max_steps: 2000, output_dir: runs/first}
model: {n_layer: 6, n_head: 6, d_model: 384}
data: {text_path: data/input.txt, micro_batch_size: 8, target_batch_size: 32, shuffle: true}
optimizer: {lr: 1e-3, grad_clip: 1.0}
```

`speedtronic validate FILE` prints the whole resolved configuration, with secrets hidden. If anything is wrong, it
prints every problem instead, with file, line, key and the nearest key that exists:

```text
configs/a.yaml:12: data.micro_batchsize: unknown key; did you mean data.micro_batch_size?
configs/a.yaml:14: data.shuffle: must be true or false, not the text 'no'; write true or false without quotes
```

Values are read as YAML 1.2: `1e-4` is a number, and `no`, `on` and dates are text. Types are strict: no value is
converted to another type, except a whole number where a number is expected. An empty section or file means all
defaults.

**From the command line**, `section.key=value` arguments replace values of the file. Values are read as YAML. A
mapping for a section replaces the keys that it names and keeps the others of the file:

```text
speedtronic train FILE optimizer.lr=3e-4 model.extra.width=2 max_steps=100
```

A path that begins with `~` lies in the home folder.

**From Python**, `load_config` takes a path, text, a mapping or a `SpeedtronicConfig`. Edit a configuration by
attribute (`config.run.max_steps = 20`). `config.validate()` checks it again, and updates the keys that follow
others, unless they were given.

**Shorthands** at the top level (a key that is given both ways must have the same value in both places):

- $run_keys are keys of `run`; $optimizer_keys are keys of `optimizer`
- $section_names mean `distributed:`
- `optimizer: muon` is `optimizer: {name: muon}`, and `precision: bf16` is `precision: {mode: bf16}`
- `compile: {enabled: true}` is `compile: true`

**Secrets** belong in the environment. Wherever a configuration is shown or saved, `<redacted>` replaces
`distributed.token`, the values of keys such as `password` or `api_key` in `model.extra`, and each of
`distributed.store_options` and `checkpoint.mirror_options` except endpoint, endpoint_url, region, profile, account,
use_ssl, anon, addressing_style, checksum, part_size and commits_an_hour. The user and password
are removed from addresses. `<redacted>` is read as null.

**In an editor**: write the output of `speedtronic schema` to `speedtronic.schema.json` and put this on the
first line of a YAML file. The editor then completes and checks it as you type.

```yaml
# yaml-language-server: $$schema=speedtronic.schema.json
```
""")


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a configuration file, shorthands included."""
    schema: dict[str, Any] = _with_nulls(_without_titles(SpeedtronicConfig.model_json_schema()))
    definitions: dict[str, Any] = schema["$defs"]
    properties: dict[str, Any] = schema["properties"]
    section_keys = {name: definitions[kind.__name__]["properties"] for name, kind in sections().items()}
    for key, values in NOT_BUILT.items():
        section, _, leaf = key.rpartition(".")
        described = (section_keys[section] if section else properties)[leaf]
        which = f": {', '.join(values)}" if values else ""
        described["description"] += f" Not part of this version yet{which}."
    for name, kind in sections().items():
        forms: list[dict[str, Any]] = [{"$ref": f"#/$defs/{kind.__name__}"}, {"type": "null"}]
        if name in NAMED_BY_TEXT:
            forms.insert(1, section_keys[name][NAMED_BY_TEXT[name]])
        properties[name] = {"description": definitions[kind.__name__]["description"], "anyOf": forms}
    switch = {
        "type": "object",
        "properties": {"enabled": {"type": "boolean"}},
        "required": ["enabled"],
        "additionalProperties": False,
    }
    rest = {key: value for key, value in properties["compile"].items() if key != "type"}
    properties["compile"] = {**rest, "anyOf": [{"type": "boolean"}, switch]}
    for short, name in SECTION_NAMES.items():
        properties[short] = properties[name] | {"description": f"The same as {name}."}
    for key, section in HOMES.items():
        properties[key] = section_keys[section][key]
    return {"$schema": _DIALECT, "title": "Speedtronic configuration"} | schema


def _without_titles(schema: Any) -> Any:
    """Drop the titles that pydantic makes of names; a key of the configuration may itself be called `title`."""
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(item) for name, item in value.items()}
            if key in ("properties", "$defs")
            else _without_titles(value)
            for key, value in schema.items()
            if key != "title"
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


def _with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow null wherever it is the default: the types of keys that follow others do not allow it themselves."""
    for definition in schema["$defs"].values():
        for key, value in definition["properties"].items():
            if value.get("default", ...) is None and "anyOf" not in value:
                kept = {name: value.pop(name) for name in ("default", "description")}
                definition["properties"][key] = {"anyOf": [value, {"type": "null"}], **kept}
    return schema


def markdown() -> str:
    """The reference page: a table of keys for the top level and for each section."""
    schema = json_schema()
    top = {
        key: value
        for key, value in schema["properties"].items()
        if key in SpeedtronicConfig.model_fields and key not in sections()
    }
    introduction = _INTRODUCTION.substitute(
        run_keys=_listed(key for key, home in HOMES.items() if home == "run"),
        optimizer_keys=_listed(key for key, home in HOMES.items() if home == "optimizer"),
        section_names=_listed(f"{name}:" for name in SECTION_NAMES),
    )
    parts = [introduction, _table("Top level", "", top)]
    for name, kind in sections().items():
        definition = schema["$defs"][kind.__name__]
        parts.append(_table(f"`{name}`", definition["description"], definition["properties"]))
    return "\n".join(parts)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _table(heading: str, description: str, properties: Mapping[str, Any]) -> str:
    rows = [
        f"| `{key}` | {_kind(value)} | `{json.dumps(value['default'], ensure_ascii=False)}` "
        f"| {value['description'].replace('|', chr(92) + '|')} |"
        for key, value in properties.items()
    ]
    lines = [f"## {heading}", "", *([description, ""] if description else []), *_HEAD, *rows, ""]
    return "\n".join(lines)


_HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true, false",
    "null": "null",
    "object": "mapping",
}


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return ", ".join(_kind(form) for form in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        return "mapping"
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    bounds = [f"{sign} {short_number(schema[bound])}" for bound, sign in _SIGNS.items() if bound in schema]
    return " ".join([_NAMES[schema["type"]], ", ".join(bounds)]).strip()
