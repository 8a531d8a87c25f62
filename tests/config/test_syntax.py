from __future__ import annotations

import pytest

from speedtronic.config import ConfigError, load_config
from speedtronic.config.text import parse

SAME = "keys of one section begin in the same column"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "run:\n  max_steps: 10\n seed: 3\n",
            f"f:3: the indentation is wrong: this line begins after 1 space, and the lines above begin after 0 or 2; "
            f"{SAME}",
        ),
        (
            "run:\n    seed: 3\n  max_steps: 1\nmodel:\n  n_layer: 1\n",
            f"f:3: the indentation is wrong: this line begins after 2 spaces, and the lines above begin after 0 or 4; "
            f"{SAME}",
        ),
        (
            "  run:\n    seed: 1\nmodel:\n  n_layer: 1\n",
            f"f:3: the indentation is wrong: this line begins after 0 spaces, and the lines above begin after 2 or 4; "
            f"{SAME}",
        ),
        (
            "run:\n  max_steps: 10\n   seed: 3\n",
            "f:3: the indentation is wrong: this line begins after 3 spaces, more than the 2 of line 2, which has its "
            f"value; {SAME}",
        ),
        (
            "run:\n  seed: 1\n\n  # a comment\n      max_steps: 2\n",
            "f:5: the indentation is wrong: this line begins after 6 spaces, more than the 2 of line 2, which has its "
            f"value; {SAME}",
        ),
        (
            "run:\n  - seed: 1\n  max_steps: 3\n",
            "f:3: the indentation is wrong: this line is a key, and above it in the same column is an item that begins "
            "with '-'",
        ),
        (
            "run:\n  seed: 1\n- a\n",
            "f:3: the indentation is wrong: this line is an item that begins with '-', and above it in the same column "
            "is a key",
        ),
    ],
)
def test_a_wrong_indentation_is_said_in_columns(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("run:\n\tseed: 3\n", "; indent with spaces, YAML takes no tabs"),
        ("run\n  max_steps: 10\n", "; in line 1 a key needs ': ' behind it, with the space"),
        ("run:\n  seed:3\n  max_steps: 1\n", "; in line 2 a key needs ': ' behind it, with the space"),
        ("plugins:\n  - a\n  -b\n", "; in line 3 an item needs a space behind its '-'"),
        ("run:\n  max_steps: 1\n  seed\nmodel: {}\n", "; in line 3 a key needs ': ' behind it"),
        ("a: b: c\n", "; a value that contains ': ' needs quotes"),
        ("a: @x\n", "; a value that begins with this character needs quotes"),
        ("run: {seed: 3\nmodel: {}\n", "; the bracket that opens in line 1 is not closed before this"),
        ("run:\n  name: 'a\nmodel:\n  n_layer: 2\n", "; the quote that opens in line 2 is not closed"),
    ],
)
def test_other_wrong_syntax_has_a_hint_behind_what_the_parser_says(text: str, end: str) -> None:
    with pytest.raises(ConfigError, match="the syntax is wrong: ") as caught:
        load_config(text)
    assert str(caught.value).endswith(end)
    assert "\n" not in str(caught.value)
