"""A page of the documentation, done as a reader would do it: its files written, its commands typed, in its order.

What a block is follows from its language. `yaml` and `python` blocks whose first line names a file (`# my_run.yaml`)
are that file; other ones must load, or run. In `console` blocks, lines that begin with `$` are commands, and the lines
below one are what it shows, where `…` stands for anything and lines may be folded. `text` is for reading.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"# ([\w./-]+\.(?:py|yaml|txt|jsonl|jinja))\s*\n")
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        line: where it begins in its page.
        language: what its fence says.
    """

    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is."""
        named = NAMED.match(self.text)
        return named.group(1) if named else None


@dataclass(frozen=True)
class Command:
    """A line that a reader types, and what the page says it shows."""

    line: int
    words: list[str]
    shown: str

    @property
    def must_fail(self) -> bool:
        return re.search(r"^\S* ?error: |^Traceback|^\w+Error: ", self.shown, re.MULTILINE) is not None

    def missing_from(self, output: str) -> str | None:
        """What the page shows, unless it is in the output."""
        wanted = ".*?".join(re.escape(" ".join(part.split())) for part in self.shown.split("…"))
        found = re.search(wanted, " ".join(output.split()), re.DOTALL)
        return None if found else " ".join(self.shown.split())


def blocks(page: str) -> list[Block]:
    """The blocks of a page, named from the root of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start()) + 1, found.group(2).strip(), textwrap.dedent(found.group(3)))
        for found in _FENCE.finditer(text)
    ]


def block_of(page: str, file: str) -> str:
    """The text of the one block that is a file."""
    (text,) = (block.text for block in blocks(page) if block.file == file)
    return text


def commands(block: Block) -> Iterator[Command]:
    """The commands of a `console` block."""
    lines = block.text.replace("\\\n", " " * 2).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[:1] == [0], f"line {block.line}: a console block begins with a command"
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        words = shlex.split(lines[start].removeprefix("$ "), comments=True)
        yield Command(block.line + 1 + start, words, "\n".join(lines[start + 1 : end]))
