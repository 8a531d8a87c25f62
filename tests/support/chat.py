"""Chat templates of the usual forms, written anew, and a tokenizer for them whose ids can be told by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speedtronic.data.tokenizers.huggingface import bytes_of_characters
from tests.support.tokenizers import END, bpe, description

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant take turns') }}{% endif %}"
    "{% endfor %}"
)
SPECIAL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"),
)


def ids_by_hand(pieces: Iterable[str]) -> list[int]:
    """The ids of pieces, each a special token or plain text: id 0 ends a document, byte b has the id b + 1."""
    ids: list[int] = []
    for piece in pieces:
        if piece in SPECIAL_TOKENS:
            ids.append(257 + SPECIAL_TOKENS.index(piece))
        else:
            ids += [byte + 1 for byte in piece.encode()]
    return ids


def tokenizer_folder(folder: Path, template: str | None = None, **settings: Any) -> Path:
    """A folder as Hugging Face's models have, with a tokenizer of bytes and special tokens."""
    spelled = {byte[0]: character for character, byte in bytes_of_characters().items()}
    added = [{**END, "content": token} for token in SPECIAL_TOKENS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"pre_tokenizer": byte_level, "decoder": byte_level, "added": added}
    folder.mkdir()
    model = bpe([spelled[byte] for byte in range(256)])
    (folder / "tokenizer.json").write_text(json.dumps(description(model, **parts)), encoding="utf-8")
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
