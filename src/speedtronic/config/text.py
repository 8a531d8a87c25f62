"""YAML 1.2 and JSON text → plain values, with the line of each key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from speedtronic.config.problems import Path, Place, Problem
from speedtronic.config.syntax import syntax_error
from speedtronic.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_UNREAD = object()
# Far more than any configuration holds. A few lines with aliases of aliases can reach it, and are refused.
_MOST_VALUES = 100_000


@dataclass
class Parsed:
    """Plain values, their places, and the problems that they have although the syntax is right."""

    data: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(text: str, source: str, *, at: Path = (), numbered: bool = True) -> Parsed:
    """Read one document of YAML 1.2, which includes JSON. Only plain values are ever constructed.

    Args:
        text: the document.
        source: its name in errors. With a name that ends in `.json`, the text must be JSON.
        at: the path of the document in the configuration.
        numbered: whether places have line numbers.

    Raises:
        ConfigError: the syntax is wrong. The message has `source`, the line and what was expected.
    """
    reader = _Reader(YAML(typ="safe", pure=True), source, numbered)
    try:
        return reader.read(_as_yaml(text, source), at)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = reader.place(mark.line) if mark else Place(source)
        raise ConfigError(f"{place}: {syntax_error(error, text.splitlines())}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: the syntax is wrong: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None


class _Representer(SafeRepresenter):
    """Writes text that a reader of YAML 1.2 reads as the same text."""

    def represent_str(self, data: str) -> ScalarNode:
        # The library writes U+0085 as it stands, which its own reader takes for the end of a line.
        style = '"' if "\x85" in data else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def write_yaml(tree: dict[str, Any]) -> str:
    """Plain values → YAML 1.2, keys in the order of the tree."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False  # before the representer is created, which copies it
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.width = 4096
    stream = StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()


def _as_yaml(text: str, source: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if source.endswith(".json") and text.strip():
            raise ConfigError(f"{Place(source, error.lineno)}: the syntax is wrong: {error.msg}") from None
        return text
    # JSON may be indented with tabs, YAML may not. Inside a JSON string no tab can stand.
    return text.replace("\t", " ")


class _Reader:
    """Turns the nodes of one document into plain values.

    The library's own constructors would run tags, drop line numbers and turn text such as dates into objects.
    """

    def __init__(self, yaml: YAML, source: str, numbered: bool) -> None:
        self._yaml = yaml
        self._source = source
        self._numbered = numbered
        self._parsed = Parsed()
        self._open: set[int] = set()
        self._values = 0

    def read(self, text: str, at: Path) -> Parsed:
        node = self._yaml.compose(text)
        value = None if node is None else self._value(node, at)
        self._parsed.data = None if value is _UNREAD else value
        return self._parsed

    def place(self, line: int) -> Place:
        return Place(self._source, line + 1 if self._numbered else None)

    def _value(self, node: Node, path: Path) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise ConfigError(
                f"{self._source}: has more than {_MOST_VALUES:,} values, counting what its aliases repeat"
            )
        if id(node) in self._open:
            return self._problem(node, path, "an alias refers to a value that contains it")
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
                return dict(self._items(node, path))
            if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
                return list(self._elements(node, path))
            if isinstance(node, ScalarNode):
                return self._scalar(node, path)
            return self._problem(node, path, f"the tag {node.tag} is not read; write a plain value")
        finally:
            self._open.discard(id(node))

    def _elements(self, node: SequenceNode, path: Path) -> Iterator[Any]:
        for index, item in enumerate(node.value):
            here = (*path, index)
            self._parsed.places[here] = self.place(item.start_mark.line)
            value = self._value(item, here)
            if value is not _UNREAD:
                yield value

    def _items(self, node: MappingNode, path: Path) -> Iterator[tuple[Any, Any]]:
        given: set[Any] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._problem(key_node, path, "a key must be text")
                continue
            key = key_node.value if key_node.tag == f"{_TAG}merge" else self._scalar(key_node, path)
            here = (*path, str(key))
            if key in given:
                self._problem(key_node, here, f"given twice; first at {self._parsed.places[here]}")
                continue
            given.add(key)
            self._parsed.places[here] = self.place(key_node.start_mark.line)
            value = self._value(value_node, here)
            if value is not _UNREAD:
                yield key, value

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        construct = self._yaml.constructor
        kind = str(node.tag).removeprefix(_TAG)
        try:
            match kind:
                case "null":
                    return None
                case "bool":
                    return construct.construct_yaml_bool(node)
                case "int":
                    return construct.construct_yaml_int(node)
                case "float":
                    return construct.construct_yaml_float(node)
                case "str" | "timestamp":  # the core schema of YAML 1.2 has no dates
                    # JSON writes some characters as a pair of escapes, which YAML reads as two characters: join them.
                    return node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except (ValueError, KeyError, ConstructorError):
            return self._problem(node, path, f"cannot be read as {kind}")
        return self._problem(node, path, f"the tag {node.tag} is not read; write a plain value")

    def _problem(self, node: Node, path: Path, message: str) -> object:
        self._parsed.problems.append(Problem(path, message, self.place(node.start_mark.line)))
        return _UNREAD
