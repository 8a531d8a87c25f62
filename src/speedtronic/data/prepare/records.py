"""What one record of a source holds: a text, a prompt with its completion, or the messages of a chat.

A record is an object of JSON or a row of a table. Its *document* is a text, or a *sample*: text of which a model learns
only some parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from speedtronic.data.prepare.chat_template import ChatTemplate, Part


class Sample(NamedTuple):
    """A text of which a model learns some parts.

    Attributes:
        parts: the pieces of the text, each with whether its tokens are targets.
        spells_tokens: whether special tokens are spelled in the text, as a template does.
        ends: whether the separator behind it is a target too.
    """

    parts: tuple[Part, ...]
    spells_tokens: bool
    ends: bool


Document = str | Sample


def pieces_of(document: Document) -> list[str]:
    """The pieces of its text."""
    return [document] if isinstance(document, str) else [text for text, _ in document.parts]


class _MissingError(ValueError):
    """A record has no such field."""


def field_of(record: Any, name: str) -> Any:
    """What a record has under a name. A name with dots leads into objects inside: `meta.text`. Null leads to null."""
    if isinstance(record, Mapping) and name in record:
        return record[name]
    value = record
    for key in name.split("."):
        if value is None and value is not record:
            return None
        if not isinstance(value, Mapping) or key not in value:
            raise _MissingError
        value = value[key]
    return value


def _text_of(record: Any, name: str, option: str) -> str | None:
    try:
        text = field_of(record, name)
        if not isinstance(text, str | None):
            raise _MissingError
    except _MissingError:
        raise ValueError(f"not an object with a text {name!r}; choose the field with {option}") from None
    if text is not None:
        text.encode("utf-8")  # fails for an escape such as \\ud800, which is not a character
    return text


@dataclass(frozen=True)
class TextRecords:
    """Each record has a text, which is a document."""

    text_field: str = "text"

    @property
    def text_columns(self) -> dict[str, str]:
        """The columns of a table that must hold text, with the options that name them."""
        return {self.text_field: "--text-field"}

    @property
    def other_columns(self) -> dict[str, str]:
        """Further columns that are read."""
        return {}

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides about the documents, apart from the records."""
        return {"text_field": self.text_field}

    def read(self, record: Any) -> str | None:
        """The document of a record; None or empty where there is none. ValueError for a record of another kind."""
        return _text_of(record, self.text_field, "--text-field")


@dataclass(frozen=True)
class PromptRecords:
    """Each record has a prompt and what is to follow it; the model learns the latter and where it ends."""

    prompt_field: str = "prompt"
    completion_field: str = "completion"

    @property
    def text_columns(self) -> dict[str, str]:
        return {self.prompt_field: "--prompt-field", self.completion_field: "--completion-field"}

    @property
    def other_columns(self) -> dict[str, str]:
        return {}

    @property
    def recipe(self) -> dict[str, Any]:
        return {"records": "prompt", "fields": [self.prompt_field, self.completion_field]}

    def read(self, record: Any) -> Sample | None:
        prompt = _text_of(record, self.prompt_field, "--prompt-field") or ""
        completion = _text_of(record, self.completion_field, "--completion-field")
        if not completion:
            return None
        return Sample(((prompt, False), (completion, True)), spells_tokens=False, ends=True)


@dataclass(frozen=True)
class ChatRecords:
    """Each record has the messages of a chat, which a template turns into text; the model learns the assistant's part.

    Attributes:
        template: of the text.
        messages_field: the list of messages.
        tools_field: a list of tools that the assistant may call, or its JSON; may be missing.
    """

    template: ChatTemplate
    messages_field: str = "messages"
    tools_field: str = "tools"

    @property
    def text_columns(self) -> dict[str, str]:
        return {}

    @property
    def other_columns(self) -> dict[str, str]:
        return {self.messages_field: "--messages-field", self.tools_field: ""}

    @property
    def recipe(self) -> dict[str, Any]:
        return {
            "records": "chat",
            "fields": [self.messages_field, self.tools_field],
            "template": self.template.checksum,
        }

    def read(self, record: Any) -> Sample | None:
        try:
            messages = field_of(record, self.messages_field)
        except _MissingError:
            raise ValueError(
                f"not an object with messages {self.messages_field!r}; choose the field with --messages-field"
            ) from None
        if not messages and isinstance(messages, list | None):
            return None
        try:
            tools = field_of(record, self.tools_field)
        except _MissingError:
            tools = None
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the tools are a text that is not JSON: {error}") from error
        parts = self.template.parts(_messages(messages), _list_of_objects(tools, "tools") if tools else None)
        return Sample(parts, spells_tokens=True, ends=False)


def _messages(value: Any) -> list[dict[str, Any]]:
    messages = _list_of_objects(value, "messages")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(
                f'message {number} has no "role"; a message is such as {{"role": "user", "content": "Hi"}}'
            )
    return messages


def _list_of_objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"the {name} are not a list of objects")
    return value


Records = TextRecords | PromptRecords | ChatRecords

TEXT_RECORDS = TextRecords()
"""The usual ones: lines like `{"text": "…"}`."""
