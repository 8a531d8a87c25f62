"""Chat templates: from messages to text, and which parts of the text the assistant has written.

A template is a program in the language of Jinja, as tokenizers of Hugging Face carry one. It runs in Jinja's sandbox,
without access to files, modules and the attributes of Python's objects.

The assistant's parts are those between `{% generation %}` and `{% endgeneration %}` in the template, as in the
`transformers` library. A template without these marks is run on growing beginnings of the chat: what an assistant's
message adds behind the prompt for it is the assistant's. That holds only if a beginning of the chat gives a beginning
of the text. Where it does not, the template is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from speedtronic.data.tokenizers.from_file import JSON_FILE, load_tokenizer
from speedtronic.data.tokenizers.huggingface import JsonTokenizer
from speedtronic.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.parser import Parser

ASSISTANT = "assistant"

Part = tuple[str, bool]
"""A piece of text, and whether the assistant has written it."""

# Characters that Unicode keeps for a program's own use. They are refused in messages.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"[{_BEGIN}{_END}]")

_LARGEST_FILE = 16 * 2**20


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the values that its tokenizer gives it.

    Attributes:
        source: the program.
        variables: names with values, such as `eos_token`.
        special_tokens: what a message may not spell: it would end a turn, or speak as somebody else.
    """

    source: str
    variables: tuple[tuple[str, str], ...] = ()
    special_tokens: tuple[str, ...] = ()

    @property
    def checksum(self) -> str:
        """Equal for templates that give equal texts."""
        return hashlib.sha256(json.dumps([self.source, sorted(self.variables)]).encode()).hexdigest()

    def parts(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Part, ...]:
        """The text of a chat, in pieces.

        Raises:
            ValueError: the chat does not fit the template, has no message of the assistant, or spells special tokens.
            DataError: a text of the template changes when messages follow.
        """
        for number, message in enumerate(messages):
            self._check_strings(f"message {number}", message)
        self._check_strings("the tools", tools or [])
        if not any(message["role"] == ASSISTANT for message in messages):
            raise ValueError(f"no message has the role {ASSISTANT!r}, so there is nothing to learn")
        text = self._rendered(messages, tools)
        if has_generation_marks(self.source):
            parts = _marked_parts(text)
        else:
            parts = self._parts_by_prefix(text, messages, tools)
        if not any(text and assistants for text, assistants in parts):
            raise ValueError("the template gives the assistant no text, so there is nothing to learn")
        return tuple((text, assistants) for text, assistants in parts if text)

    def _parts_by_prefix(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[Part]:
        parts: list[Part] = []
        position = 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._rendered(messages[:number], tools, add_generation_prompt=True)
            through = self._rendered(messages[: number + 1], tools)
            if not (text.startswith(through) and through.startswith(before) and len(before) >= position):
                _refuse_changing_prefix(number)
            parts += [(text[position : len(before)], False), (text[len(before) : len(through)], True)]
            position = len(through)
        return [*parts, (text[position:], False)]

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        template = _compiled(self.source)
        try:
            return template.render(
                **dict(self.variables),
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # noqa: BLE001 - a template is somebody's program and may raise anything
            raise ValueError(f"the chat template cannot be applied: {error}") from error

    def _check_strings(self, place: str, value: Any) -> None:
        for text in _strings(value):
            text.encode("utf-8")  # fails for a lone surrogate
            if _MARK.search(text):
                raise ValueError(f"{place} has U+FDD0 or U+FDD1, which are not for the exchange of text; remove them")
            for token in self.special_tokens:
                if token in text:
                    raise ValueError(
                        f"{place} spells the special token {token!r}, and the model would read it as one; change the "
                        "text, or leave such chats out with --bad-lines skip"
                    )


def load_chat_template(tokenizer: str, file: str | None = None) -> ChatTemplate:
    """The template of a tokenizer, or that of a file with the tokenizer's special tokens.

    Args:
        tokenizer: as `load_tokenizer` takes it. A folder of Hugging Face's may have a `chat_template.jinja`, or a
            `chat_template` in its `tokenizer_config.json`, where the special tokens are named too.
        file: a file with another template.

    Raises:
        DataError: there is no template, it is not one, or it uses a special token that nothing names.
        MissingExtraError: `jinja2` or the tokenizer's library is not installed.
    """
    loaded = load_tokenizer(tokenizer)
    folder = Path(tokenizer)
    if folder.name == JSON_FILE and folder.is_file():
        folder = folder.parent
    settings_file = folder / "tokenizer_config.json"
    settings = _json_object(settings_file) if settings_file.is_file() else {}

    source: str | None
    if file is not None:
        origin, source = file, _read(Path(file))
    elif (folder / "chat_template.jinja").is_file():
        origin, source = str(folder / "chat_template.jinja"), _read(folder / "chat_template.jinja")
    else:
        origin, source = str(settings_file), _template_in(settings.get("chat_template"))
    if source is None:
        raise DataError(
            f"{tokenizer}: this tokenizer has no chat template; name a file with one by --chat-template, such as the "
            "chat_template.jinja of the model that the weights come from"
        )
    variables = {
        name: "" if value is None else value["content"] if isinstance(value, Mapping) else str(value)
        for name, value in settings.items()
        if name.endswith("_token")
    }
    try:
        unknown = sorted(name for name in _undeclared(source) if name.endswith("_token") and name not in variables)
    except ValueError as error:
        raise DataError(f"{origin}: {error}") from error
    if unknown:
        raise DataError(
            f"{origin}: the template uses {', '.join(unknown)}, and nothing says what that is; write it into the "
            f"template, or into the tokenizer_config.json of the tokenizer's folder"
        )
    specials = loaded.special_tokens if isinstance(loaded, JsonTokenizer) else ()
    return ChatTemplate(source, tuple(sorted(variables.items())), specials)


def has_generation_marks(source: str) -> bool:
    """Whether a template marks what the assistant writes."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def _template_in(value: Any) -> str | None:
    """The template of a `tokenizer_config.json`: one, or several of which one is the default."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _marked_parts(text: str) -> list[Part]:
    parts: list[Part] = []
    start, inside = 0, False
    for mark in _MARK.finditer(text):
        if inside == (mark[0] == _BEGIN):
            raise ValueError("the template has {% generation %} inside another one")
        parts.append((text[start : mark.start()], inside))
        start, inside = mark.end(), not inside
    return [*parts, (text[start:], inside)]


def _refuse_changing_prefix(number: int) -> NoReturn:
    raise DataError(
        f"the chat template writes what comes before message {number} in another way when messages follow, so that it "
        "does not show which part is the assistant's; mark that part with {% generation %} and {% endgeneration %} in "
        "a copy of the template, and name the copy by --chat-template"
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(f"{path}: larger than {_LARGEST_FILE} bytes")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not an object of JSON")
    return content


# ---------------------------------------------------------------------- Jinja


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """An environment with what the templates of `transformers` may use. White space is handled as there."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("a chat template needs jinja2; install speedtronic[chat]") from error

    class Generation(Extension):
        """Puts marks around what `{% generation %}` encloses."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes for HTML.
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _undeclared(source: str) -> set[str]:
    """The names that a template uses and does not set. Raises ValueError if it is not a template."""
    environment = _environment()
    import jinja2
    from jinja2 import meta

    try:
        return meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} is not valid in a Jinja template: {error.message}") from error
