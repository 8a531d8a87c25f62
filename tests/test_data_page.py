"""What `docs/data.md` shows is what happens."""

from __future__ import annotations

import gzip
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.config import SpeedtronicConfig, load_config
from speedtronic.data import ShardSet, build_data
from tests.support.chat import tokenizer_folder

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

PAGE = (Path(__file__).parents[1] / "docs/data.md").read_text(encoding="utf-8")
PAGES = b'{"page": {"body": "one"}}\n{"page": {}}\n{"page": {"body": "three"}}\n'


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the page takes for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))
    (template,) = blocks("jinja")
    Path("chatml.jinja").write_text(template)
    tokenizer_folder(Path("model"), template)
    Path("tokenizer.json").write_bytes(Path("model/tokenizer.json").read_bytes())
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("some text")
    Path("pages.json.gz").write_bytes(gzip.compress(PAGES))
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    piped, _, rest = command.rpartition(" | ")
    if piped:
        assert piped.startswith("gzip -dc "), piped
        content = gzip.decompress(Path(piped.split()[-1]).read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    program, *arguments = shlex.split(rest)
    assert program == "speedtronic"
    assert main(arguments) == 0, command


def test_the_commands_of_the_page_do_what_it_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks("console"):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE):
            if command.startswith("cat "):
                Path(command.removeprefix("cat ")).write_text(shown)
                continue
            run(command, monkeypatch)
            printed = capsys.readouterr().out
            if shown:
                assert printed == shown

    counts = {name: ShardSet(folder / "data" / name).documents for name in ("corpus", "pages", "sums", "talk")}
    assert counts == {"corpus": 1, "pages": 2, "sums": 2, "talk": 1}


def test_the_configurations_of_the_page_open_their_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (talk,) = re.findall(r"^\$ cat talk\.jsonl\n(.*)\n", PAGE, flags=re.MULTILINE)
    Path("talk.jsonl").write_text(talk)
    for name in ("web", "code"):
        Path(f"{name}.txt").write_text(name * 40)
        run(f"speedtronic data prepare {name}.txt --out data/{name}", monkeypatch)
    opened = []
    for block in blocks("yaml"):
        Path("page.yaml").write_text(block)
        raw = load_config("page.yaml").data.plain()
        model = {"vocab_size": 300, "max_seq_len": 64}
        sources = {key: raw[key] for key in ("chat", "mixture", "tokenizer", "packing", "document_mask")}
        data = build_data(SpeedtronicConfig.from_dict({"model": model, "data": sources}), pin_memory=False)
        opened.append((len(data.train), next(iter(data.train)).keys()))
    assert opened == [(1, {"input_ids", "labels", "document_ids"}), (6, {"input_ids", "labels"})]
