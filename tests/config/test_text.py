from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.config.problems import Place
from speedtronic.config.text import parse, write_yaml
from speedtronic.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("100_000", 100_000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("[1, [a], {b: c}]", [1, ["a"], {"b": "c"}]),
        ('"\\ud83d\\ude42 \\u00fc"', "🙂 ü"),
    ],
)
def test_values_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    read = parse(text, "x").data
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_and_infinity_are_read() -> None:
    assert math.isnan(parse(".nan", "x").data)
    assert parse("-.inf", "x").data == -math.inf


def test_each_key_and_item_knows_its_line() -> None:
    parsed = parse("a: 1\nb:\n  c: [1,\n    2]\n", "f.yaml")
    assert {path: place.line for path, place in parsed.places.items()} == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 3,
        ("b", "c", 1): 4,
    }


def test_json_may_be_indented_with_tabs() -> None:
    parsed = parse('{\n\t"a": {\n\t\t"b": "c\\td"\n\t}\n}', "x.json")
    assert parsed.data == {"a": {"b": "c\td"}}
    assert parsed.places["a", "b"] == Place("x.json", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3: a: given twice; first at f:1"),
        ("a:\n  b: 1\n  b: 1\n", "f:3: a.b: given twice; first at f:2"),
        (
            "a: !!python/object:os.x []\n",
            "f:1: a: the tag tag:yaml.org,2002:python/object:os.x is not read; write a plain value",
        ),
        ("a: !mine 3\n", "f:1: a: the tag !mine is not read; write a plain value"),
        ("a: !!set {b}\n", "f:1: a: the tag tag:yaml.org,2002:set is not read; write a plain value"),
        ("a: [!mine 3]\n", "f:1: a[0]: the tag !mine is not read; write a plain value"),
        ("a: !!int x\n", "f:1: a: cannot be read as int"),
        ("a: !!bool x\n", "f:1: a: cannot be read as bool"),
        ("a: !!float x\n", "f:1: a: cannot be read as float"),
        ("a: !!binary x\n", "f:1: a: the tag tag:yaml.org,2002:binary is not read; write a plain value"),
        (f"a: {'9' * 5000}\n", "f:1: a: cannot be read as int"),
        ("a: &x [1, *x]\n", "f:1: a[1]: an alias refers to a value that contains it"),
        ("[a, b]: 1\n", "f:1: a key must be text"),
        ('a: "\\ud83d"\n', "f:1: a: cannot be read as str"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_its_place(text: str, message: str) -> None:
    parsed = parse(text, "f")
    assert [str(problem) for problem in parsed.problems] == [message]


def test_an_alias_gives_the_value_again() -> None:
    assert parse("a: &x {b: 1}\nc: *x\n", "f").data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: [1", "f:1: the syntax is wrong: while parsing a flow sequence expected ',' or ']'"),
        ("a: 1\nb: c: d\n", "f:2: the syntax is wrong: mapping values are not allowed here"),
        ("a:\n\tb: 1\n", "f:2: the syntax is wrong:"),
        ("a: 1\n---\nb: 2\n", "f:2: the syntax is wrong: expected a single document in the stream"),
        ("a: *b\n", "f:1: the syntax is wrong: found undefined alias 'b'"),
        ("a: \x00", "f: the syntax is wrong:"),
        ("[" * 3000, "f: nested too deeply"),
    ],
)
def test_wrong_syntax_is_one_line_with_its_place(text: str, start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_json_files_keep_to_json() -> None:
    with pytest.raises(ConfigError, match=r"^f\.json:2: the syntax is wrong: Expecting property name"):
        parse("{\n  a: 1}", "f.json")


def test_yaml_is_written_in_blocks_and_in_order() -> None:
    text = write_yaml({"b": {"z": None, "a": [1e-8, "no", "1e-4"]}, "a": {}, "word": "true"})
    assert text == "b:\n  z: null\n  a:\n  - 1e-08\n  - no\n  - '1e-4'\na: {}\nword: 'true'\n"


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029", "\ufeff", "\x00", "\x7f", "\xa0", "\r", "\t"])
def test_text_with_any_character_comes_back_from_yaml_as_it_was(character: str) -> None:
    tree = {"a": [f"x{character}y", f"{character} x", f"x {character}"], f"k{character}k": f"x\n{character}\n"}
    assert parse(write_yaml(tree), "x").data == tree


@given(st.dictionaries(st.text(min_size=1), st.text() | st.lists(st.text(), max_size=2), max_size=4))
def test_any_text_comes_back_from_yaml_as_it_was(tree: dict[str, object]) -> None:
    assert parse(write_yaml(tree), "x").data == tree


def test_aliases_of_aliases_end_before_they_fill_the_memory() -> None:
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    with pytest.raises(ConfigError, match=r"^f: has more than 100,000 values"):
        parse("\n".join(["a0: &a0 x", *levels]), "f")
