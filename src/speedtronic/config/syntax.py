"""What is wrong with the syntax of a YAML, in the words of someone who writes one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ruamel.yaml.error import MarkedYAMLError

_KEY = re.compile(r"""\s*(- +)*(["']?)[\w./-]+\2\s*:(?P<value>\s.*|$)""")
_SAME = "keys of one section begin in the same column"


def syntax_error(error: MarkedYAMLError, lines: Sequence[str]) -> str:
    """What the parser says, and what most likely led to it.

    Args:
        error: of the parser.
        lines: those of the document.
    """
    said = " ".join(part for part in (error.context, error.problem) if part)
    mark = error.problem_mark or error.context_mark
    at = mark.line if mark is not None else len(lines)
    line = lines[at] if at < len(lines) else ""
    if line[: len(line) - len(line.lstrip())].count("\t"):
        return f"the syntax is wrong: {said}; indent with spaces, YAML takes no tabs"

    problem = str(error.problem)
    if "<block end>" in problem or "<document start>" in problem or problem.startswith("mapping values"):
        wrong = _indentation(lines, at)
        if wrong is not None:
            return f"the indentation is wrong: {wrong}"
    hint = _hint(error, lines, at)
    return f"the syntax is wrong: {said}" + (f"; {hint}" if hint else "")


def _indentation(lines: Sequence[str], at: int) -> str | None:
    """What is wrong with the indentation of a line, if it is that."""
    # The columns in which the keys and items around the line begin, as a reader from the top finds them.
    columns: list[int] = []
    above = -1
    for number, line in enumerate(lines[:at]):
        if line.strip() and not line.lstrip().startswith("#"):
            above, column = number, _column(line)
            columns = [*(open_ for open_ in columns if open_ < column), column]
    if above < 0:
        return None
    column = _column(lines[at])
    if column > columns[-1]:
        key = _KEY.match(lines[above])
        if key is not None and key["value"].strip():
            return f"{_spaces(column)}, more than the {columns[-1]} of line {above + 1}, which has its value; {_SAME}"
        return None
    if column not in columns:
        others = " or ".join(map(str, columns))
        return f"{_spaces(column)}, and the lines above begin after {others}; {_SAME}"
    is_item, beside_items = _is_item(lines[at]), _is_item(_last_at(lines[:at], column))
    if is_item != beside_items:
        kinds = ("a key", "an item that begins with '-'")
        return f"this line is {kinds[is_item]}, and above it in the same column is {kinds[beside_items]}"
    return None


def _hint(error: MarkedYAMLError, lines: Sequence[str], at: int) -> str | None:
    problem, context = str(error.problem), str(error.context)
    opened = error.context_mark.line if error.context_mark is not None else at
    if "flow" in context:
        return f"the bracket that opens in line {opened + 1} is not closed before this"
    if "quoted" in context:
        return f"the quote that opens in line {opened + 1} is not closed"
    if problem.startswith("mapping values"):
        before = next((number for number in range(at - 1, -1, -1) if lines[number].strip()), None)
        if lines[at].count(": ") > 1 and _KEY.match(lines[at]):
            return "a value that contains ': ' needs quotes"
        if before is not None and _KEY.match(lines[before]) is None:
            return f"in line {before + 1} a key needs ': ' behind it, with the space"
    if "expected ':'" in problem:
        if re.match(r"\s*-\S", lines[opened]):
            return f"in line {opened + 1} an item needs a space behind its '-'"
        return f"in line {opened + 1} a key needs ': ' behind it"
    if problem.startswith("found character") and "cannot start" in problem:
        return "a value that begins with this character needs quotes"
    return None


def _last_at(lines: Sequence[str], column: int) -> str:
    """The last line above that begins in a column, not counting comments; there is one."""
    return next(
        line
        for line in reversed(lines)
        if line.strip() and not line.lstrip().startswith("#") and _column(line) == column
    )


def _is_item(line: str) -> bool:
    return re.match(r"\s*-(\s|$)", line) is not None


def _column(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _spaces(count: int) -> str:
    return "this line begins after 1 space" if count == 1 else f"this line begins after {count} spaces"
