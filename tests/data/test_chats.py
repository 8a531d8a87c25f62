"""Chats from a file to the loss: what is learned is what a hand computation says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from speedtronic.data import ShardSet
from speedtronic.data.loading.datasets import PackedDataset
from speedtronic.data.prepare.chat_template import load_chat_template
from speedtronic.data.prepare.encode import encode_samples
from speedtronic.data.prepare.prepare import prepare
from speedtronic.data.prepare.records import ChatRecords, PromptRecords
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.model import ReferenceTransformer
from tests.support.chat import CHATML, LLAMA3, MISTRAL, ids_by_hand, tokenizer_folder

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

TALKS = [
    [("user", "Hi"), ("assistant", "Héllo"), ("user", "Bye"), ("assistant", "See you")],
    [("user", "2 + 2?"), ("assistant", "4")],
]
Pieces = list[tuple[str, bool]]


def chatml(talk: Sequence[tuple[str, str]]) -> Pieces:
    pieces: Pieces = []
    for role, content in talk:
        own = role == "assistant"
        pieces += [("<|im_start|>", False), (f"{role}\n", False), (content, own), ("<|im_end|>", own), ("\n", own)]
    return [*pieces, ("<|endoftext|>", False)]


def llama3(talk: Sequence[tuple[str, str]]) -> Pieces:
    pieces: Pieces = [("<|begin_of_text|>", False)]
    for role, content in talk:
        own = role == "assistant"
        pieces += [("<|start_header_id|>", False), (role, False), ("<|end_header_id|>", False), ("\n\n", False)]
        pieces += [(content, own), ("<|eot_id|>", own)]
    return [*pieces, ("<|endoftext|>", False)]


def mistral(talk: Sequence[tuple[str, str]]) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    for role, content in talk:
        if role == "user":
            pieces.append((f"[INST] {content} [/INST]", False))
        else:
            pieces += [(f" {content}", True), ("</s>", True)]
    return [*pieces, ("<|endoftext|>", False)]


FORMS = {
    "chatml": (CHATML, chatml, {}),
    "llama3": (LLAMA3, llama3, {"bos_token": "<|begin_of_text|>"}),
    "mistral": (MISTRAL, mistral, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
}


def by_hand(pieces: Pieces) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    targets: list[bool] = []
    for text, own in pieces:
        found = [0] if text == "<|endoftext|>" else ids_by_hand([text])
        ids += found
        targets += [own] * len(found)
    return ids, targets


def read(shards: ShardSet) -> tuple[list[int], list[bool]]:
    ids, targets = np.empty(len(shards), np.int64), np.empty(len(shards), np.bool_)
    shards.read(0, ids)
    shards.read_targets(0, targets)
    return ids.tolist(), targets.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_the_masked_loss_of_chats_is_that_of_a_hand_computation(tmp_path: Path, form: str) -> None:
    template, expected, settings = FORMS[form]
    folder = tokenizer_folder(tmp_path / "tokenizer", template, **settings)
    messages = [[{"role": role, "content": content} for role, content in talk] for talk in TALKS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in messages))

    records = ChatRecords(load_chat_template(str(folder)))
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(folder), records=records)

    # The tokens and targets, written by hand.
    documents = [by_hand(expected(talk)) for talk in TALKS]
    shards = ShardSet(tmp_path / "out")
    assert read(shards) == (
        [each for ids, _ in documents for each in ids],
        [each for _, targets in documents for each in targets],
    )
    assert summary.targets == sum(sum(targets) for _, targets in documents)

    # The loss, from the logits of each document alone: the mean of -log p of the assistant's tokens.
    torch.manual_seed(0)
    model = ReferenceTransformer(vocab_size=shards.vocab_size, block_size=128, n_layer=1, n_head=2, d_model=32)
    losses = []
    with torch.no_grad():
        for ids, targets in documents:
            logits = model(torch.tensor([ids]))["logits"][0].double()
            for position in range(1, len(ids)):
                if targets[position]:
                    losses.append(float(logits[position - 1].logsumexp(0) - logits[position - 1, ids[position]]))
        dataset = PackedDataset(shards, 128, document_mask=True)
        assert len(dataset) == 1
        loss = float(model(**dataset.batch([0]))["loss"])
    assert loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")
def test_tokens_and_marks_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- for m in messages -%}\n<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}\n    {% if not loop.last %}\n{% endif %}{% endfor %}"
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    )
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    messages = [
        {"role": "user", "content": " Héy  <b>&"},
        {"role": "assistant", "content": " Hello\n\n 字"},
        {"role": "tool", "content": '{"x": 1}'},
        {"role": "assistant", "content": "See"},
    ]
    tools = [{"type": "function", "function": {"name": "é<", "parameters": {}}}]

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = ChatRecords(load_chat_template(str(folder))).read({"messages": messages, "tools": tools})
    assert sample is not None
    ((ids, targets),) = encode_samples([sample], load_tokenizer(str(folder)))

    assert ids.tolist() == expected["input_ids"]
    assert targets.astype(int).tolist() == expected["assistant_masks"]


def test_a_prompt_and_its_completion_end_where_the_document_does(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}\n{"prompt": "", "completion": "é"}\n')

    prepare([tmp_path / "a.jsonl"], tmp_path / "out", records=PromptRecords())

    ids, targets = read(ShardSet(tmp_path / "out"))
    assert ids == [*b"2+2=4\0", *"é\0".encode()]
    assert targets == [False] * 4 + [True] * 5


def test_a_tokenizer_without_special_tokens_reads_a_template_as_text(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "é"}]}))

    records = ChatRecords(load_chat_template("bytes", str(tmp_path / "own.jinja")))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", records=records)

    ids, targets = read(ShardSet(tmp_path / "out"))
    assert bytes(ids) == "<|im_start|>assistant\né<|im_end|>\n\0".encode()
    assert bytes(each for each, target in zip(ids, targets, strict=True) if target) == "é<|im_end|>\n".encode()


def test_a_token_that_begins_before_the_assistants_part_and_ends_in_it_is_learned(tmp_path: Path) -> None:
    from tests.support.tokenizers import bpe, description

    # The only merge is of the last character of a prompt with the first of an answer.
    parts = {"pre_tokenizer": None, "decoder": {"type": "Fuse"}}
    content = description(bpe(["a", "b", ":", ":b"], [(":", "b")]), **parts)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}a:{% generation %}{{ m.content }}{% endgeneration %}a{% endfor %}"
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "ba"}]}))

    name = str(tmp_path / "tokenizer.json")
    records = ChatRecords(load_chat_template(name, str(tmp_path / "own.jinja")))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=name, records=records)

    assert read(ShardSet(tmp_path / "out")) == ([1, 4, 1, 1, 0], [False, True, True, False, False])


def test_chats_of_several_shards_and_a_table_are_equal_to_those_of_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    messages = [
        [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}", "name": "a"},
        ]
        for number in range(40)
    ]
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.name if m.name is defined }}: {{ m.content }}{% endfor %}"
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in messages))
    table = pyarrow.table({"messages": messages})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    records = ChatRecords(load_chat_template("bytes", str(tmp_path / "own.jinja")))

    prepare([tmp_path / "a.jsonl"], tmp_path / "lines", records=records, shard_tokens=400, unit_bytes=200, processes=1)
    prepare([tmp_path / "a.parquet"], tmp_path / "table", records=records)

    found = read(ShardSet(tmp_path / "lines"))
    assert found == read(ShardSet(tmp_path / "table"))
    assert ShardSet(tmp_path / "lines").documents == 40
    assert bytes(each for each, target in zip(*found, strict=True) if target).startswith(b"a: answer 0a: answer 1")


@pytest.mark.slow
def test_several_processes_write_the_same_chats(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", CHATML)
    talks = [[{"role": "assistant", "content": f"answer {number}"}] for number in range(60)]
    content = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    records = ChatRecords(load_chat_template(str(folder)))

    for processes in (1, 2):
        options = {"tokenizer": str(folder), "records": records, "unit_bytes": 300, "processes": processes}
        prepare([tmp_path / "a.jsonl.gz"], tmp_path / f"by-{processes}", **options)

    one, two = tmp_path / "by-1", tmp_path / "by-2"
    assert {path.name for path in one.glob("shard_*")} == {f"shard_00000.{end}" for end in ("bin", "idx", "tgt")}
    for path in one.iterdir():
        assert (two / path.name).read_bytes() == path.read_bytes()
