from __future__ import annotations

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from speedtronic.data.prepare.chat_template import ChatTemplate, _environment, load_chat_template
from speedtronic.errors import DataError, MissingExtraError
from tests.support.chat import CHATML, LLAMA3, MISTRAL, tokenizer_folder

pytest.importorskip("jinja2")

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
MARKED = (
    "{% for message in messages %}"
    "{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}.{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
)
CHANGING = "{% for m in messages %}{{ m.role + (' (last)' if loop.last else '') + ': ' + m.content }}{% endfor %}"


def written(template: str, messages: list[dict[str, Any]] = TALK, **variables: str) -> list[str]:
    """What the assistant has written."""
    parts = ChatTemplate(template, tuple(variables.items())).parts(messages, None)
    return [text for text, assistants in parts if assistants]


def test_marks_say_what_the_assistant_has_written() -> None:
    parts = ChatTemplate(MARKED).parts(TALK, None)

    assert parts == (
        ("user: Hi\nassistant: ", False),
        ("Hello.", True),
        ("\nuser: Bye\nassistant: ", False),
        ("See you.", True),
        ("\n", False),
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Hello<|im_end|>\n", "See you<|im_end|>\n"]),
        (LLAMA3, ["Hello<|eot_id|>", "See you<|eot_id|>"]),
        (MISTRAL, [" Hello</s>", " See you</s>"]),
    ],
    ids=["chatml", "llama3", "mistral"],
)
def test_without_marks_it_is_what_a_message_adds_behind_its_prompt(template: str, expected: list[str]) -> None:
    assert written(template, bos_token="<s>", eos_token="</s>") == expected


def test_a_template_whose_prefix_changes_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"before message 1 in another way .* mark that part with {% generation %}"):
        written(CHANGING)


def test_a_marked_template_may_change_its_prefix() -> None:
    marked = CHANGING.replace("m.content }}", "'' }}{% generation %}{{ m.content }}{% endgeneration %}")

    assert written(marked, TALK[:2]) == ["Hi", "Hello"]


def test_messages_of_tools_and_tools_reach_the_template() -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        "{{ m.content or '' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]
    parts = ChatTemplate(template).parts(messages, [{"name": "add"}])

    assert parts == (
        ('[{"name": "add"}]<user>1 + 2<assistant>', False),
        (json.dumps([call], ensure_ascii=False), True),
        ("<tool>3<assistant>", False),
        ("It is 3", True),
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "Hi"}], "no message has the role 'assistant'"),
        ([{"role": "assistant", "content": ""}], "gives the assistant no text"),
        ([*TALK, {"role": "user", "content": "a<|end|>b"}], r"message 4 spells the special token '<\|end\|>'"),
        ([{"role": "assistant", "content": "a\ufdd0"}], "message 0 has U\\+FDD0"),
        ([{"role": "assistant", "content": "\ud800"}], "surrogates not allowed"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"n": "<|end|>"}]}], "message 0 spells the special"),
    ],
)
def test_a_chat_that_cannot_be_learned_says_why(messages: list[dict[str, Any]], reason: str) -> None:
    template = ChatTemplate(MARKED.replace("}}.{%", "}}{%"), special_tokens=("<|end|>",))

    with pytest.raises(ValueError, match=reason):
        template.parts(messages, None)


def test_what_a_template_raises_is_an_error_of_the_chat() -> None:
    with pytest.raises(ValueError, match="cannot be applied: only user and assistant take turns"):
        written(MISTRAL, [{"role": "system", "content": "x"}, *TALK], bos_token="", eos_token="")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_runs_in_a_sandbox(attack: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be applied: .*(unsafe|not safely|undefined)"):
        written(attack + CHATML)


def test_a_template_can_be_sent_to_another_process() -> None:
    template = ChatTemplate(CHATML, (("eos_token", "</s>"),), ("<s>",))

    assert pickle.loads(pickle.dumps(template)).parts(TALK, None) == template.parts(TALK, None)


# ---------------------------------------------------------------------- files


def test_a_tokenizers_own_template_is_found_with_its_special_tokens(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", CHATML, bos_token=None, eos_token={"content": "<|im_end|>"})

    for name in (folder, folder / "tokenizer.json"):
        found = load_chat_template(str(name))
        assert found.source == CHATML
        assert dict(found.variables) == {"bos_token": "", "eos_token": "<|im_end|>"}
        assert "<|im_start|>" in found.special_tokens


def test_the_default_of_several_templates_and_a_file_beside_the_tokenizer_are_found(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    folder = tokenizer_folder(tmp_path / "t", chat_template=several)
    assert load_chat_template(str(folder)).source == CHATML

    (folder / "chat_template.jinja").write_text(MARKED)
    assert load_chat_template(str(folder)).source == MARKED

    (tmp_path / "own.jinja").write_text(LLAMA3.replace("{{ bos_token }}", ""))
    assert load_chat_template(str(folder), str(tmp_path / "own.jinja")).source.startswith("{% for")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template; name a file with one by --chat-template"),
        ("{% for m in messages %}", r"tokenizer_config\.json: line 1 is not valid in a Jinja template"),
        ("{{ eos_token }}", "the template uses eos_token, and nothing says what that is"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(tmp_path: Path, template: str | None, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        load_chat_template(str(tokenizer_folder(tmp_path / "t", template)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jinja: cannot be read: No such file"):
        load_chat_template("bytes", str(tmp_path / "gone.jinja"))


def test_a_missing_jinja_says_which_extra_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "jinja2":
            raise ImportError(name)
        return imported(name, *rest)

    (tmp_path / "own.jinja").write_text(CHATML)
    _environment.cache_clear()
    monkeypatch.setattr("builtins.__import__", without)

    with pytest.raises(MissingExtraError, match=r"install speedtronic\[chat\]"):
        load_chat_template("bytes", str(tmp_path / "own.jinja"))
