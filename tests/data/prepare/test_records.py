from __future__ import annotations

import json
from typing import Any

import pytest

from speedtronic.data.prepare.chat_template import ChatTemplate
from speedtronic.data.prepare.records import ChatRecords, PromptRecords, TextRecords, field_of

TEMPLATE = ChatTemplate(
    "{{ tools | tojson if tools }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)


def test_a_name_with_dots_leads_into_objects_unless_a_field_has_it() -> None:
    assert field_of({"a": {"b": {"c": 1}}}, "a.b.c") == 1
    assert field_of({"a.b": 2, "a": {"b": 1}}, "a.b") == 2
    assert field_of({"a": None}, "a.b.c") is None


@pytest.mark.parametrize("record", [{}, {"a": 1}, {"a": {}}, [], None, "a"])
def test_a_text_that_is_not_there_is_an_error_that_names_the_option(record: Any) -> None:
    with pytest.raises(ValueError, match="not an object with a text 'a.b'; choose the field with --text-field"):
        TextRecords("a.b").read(record)


def test_of_a_prompt_and_its_completion_only_the_latter_is_learned() -> None:
    sample = PromptRecords("q", "a.text").read({"q": "2+2=", "a": {"text": "4"}})

    assert sample is not None
    assert sample.parts == (("2+2=", False), ("4", True))
    assert sample.ends
    assert PromptRecords().read({"prompt": "x", "completion": None}) is None
    with pytest.raises(ValueError, match="'completion'; choose the field with --completion-field"):
        PromptRecords().read({"prompt": "x"})


def test_tools_may_be_a_list_or_its_json_or_missing() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    tools = [{"name": "add"}]
    for record in ({"messages": messages, "tools": tools}, {"messages": messages, "tools": json.dumps(tools)}):
        sample = ChatRecords(TEMPLATE).read(record)
        assert sample is not None
        assert sample.parts[0] == ('[{"name": "add"}]', False)
    sample = ChatRecords(TEMPLATE).read({"messages": messages})
    assert sample is not None
    assert sample.parts == (("x", True),)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "x"}, "not an object with messages 'messages'; choose the field with --messages-field"),
        ({"messages": "x"}, "the messages are not a list of objects"),
        ({"messages": [{"from": "human", "value": "x"}]}, 'message 0 has no "role"'),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": "{"}, "the tools are a text that is not JSON"),
    ],
)
def test_what_is_no_chat_says_why(record: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChatRecords(TEMPLATE).read(record)


@pytest.mark.parametrize("messages", [None, []])
def test_an_empty_chat_is_no_document(messages: Any) -> None:
    assert ChatRecords(TEMPLATE).read({"messages": messages}) is None
