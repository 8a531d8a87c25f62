"""lm-eval's own harness runs tasks on our models, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speedtronic.errors import ConfigError
from speedtronic.evaluation.lm_eval_tasks import run_tasks
from speedtronic.evaluation.text_scorer import TextScorer
from speedtronic.generation import TextGenerator
from tests.evaluation.test_text_scorer import by_hand, small

QUESTIONS = [
    {"question": "ab", "choices": ["cd", "zz", "q"], "answer": 0},
    {"question": "two", "choices": [" one", " three"], "answer": 1},
    {"question": "xy", "choices": ["z", "w"], "answer": 0},
    {"question": "k", "choices": ["l", "m", "n", "o"], "answer": 3},
    {"question": "aaa", "choices": ["a", "b"], "answer": 1},
]

GREEDY = {"until": ["\n"], "max_gen_toks": 4}

CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXTS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}]
"""
WRITTEN = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: written
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; speedtronic[lm-eval] has it")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "questions.jsonl"
    # What is to be written is right for two of the five.
    written = TextScorer(small()).generate_until([(question["question"], GREEDY) for question in QUESTIONS])
    texts = [text if number < 2 else f"not {text}" for number, text in enumerate(written)]
    lines = [json.dumps({**one, "written": text}) for one, text in zip(QUESTIONS, texts, strict=True)]
    file.write_text("\n".join(lines) + "\n")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in (("our_choices", CHOICES), ("our_texts", TEXTS), ("our_writing", WRITTEN)):
        (tasks / f"{name}.yaml").write_text(text.format(name=name, file=file))
    return tasks


def most_likely(generator: TextGenerator, question: dict[str, Any]) -> int:
    before = question["question"]
    totals = [by_hand(generator, list((before + choice).encode()), len(before))[0] for choice in question["choices"]]
    return totals.index(max(totals))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_offline_tasks_have_the_scores_that_a_computation_by_hand_has(folder: Path) -> None:
    generator = small()
    found = run_tasks(generator, ["our_choices", "our_texts", "our_writing"], include_path=folder, batch_size=3)
    hits = [most_likely(generator, question) == question["answer"] for question in QUESTIONS]
    assert found["our_choices"]["acc"] == pytest.approx(sum(hits) / len(hits))
    nats = sum(by_hand(generator, [0, *question["question"].encode()], 1)[0] for question in QUESTIONS)
    size = sum(len(question["question"]) for question in QUESTIONS)
    assert found["our_texts"]["bits_per_byte"] == pytest.approx(-nats / size / 0.6931471805599453, rel=1e-4)
    assert found["our_writing"]["exact_match"] == pytest.approx(2 / 5)
    limited = run_tasks(generator, ["our_choices"], include_path=folder, limit=2)
    assert limited["our_choices"]["acc"] == pytest.approx(sum(hits[:2]) / 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_is_not_there_is_an_error_with_a_near_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task 'our_choise'; did you mean our_choices\?"):
        run_tasks(small(), ["our_choise"], include_path=folder)
    with pytest.raises(ConfigError, match="there is no such folder"):
        run_tasks(small(), ["our_choices"], include_path=folder / "nowhere")
