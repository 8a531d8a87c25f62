"""The report as one file: markup, style, scripts and data, and a policy that lets nothing else in."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from speedtronic.report.contents import contents, labels
from speedtronic.runs import Run


def report_page(runs: Sequence[Run], *, live: bool = False) -> str:
    """The report of some runs: one HTML page that needs no other file and no network.

    Args:
        runs: as `speedtronic.runs.load` reads them.
        live: whether the page asks its own server for newer numbers.
    """
    shown = contents(runs)
    style, script = (
        _asset("uplot/uPlot.min.css") + _asset("page.css"),
        _asset("uplot/uPlot.iife.min.js") + _asset("page.js"),
    )
    parts = {
        # The browser runs the script and takes the style with these sums, and loads nothing. So what stands in the data
        # cannot act, even if it were read as HTML.
        "policy": "; ".join(
            [
                "default-src 'none'",
                f"script-src '{_sum(script)}'",
                f"style-src '{_sum(style)}'",
                "img-src data:",
                *(["connect-src 'self'"] if live else []),
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
        "title": html.escape(" and ".join(labels(runs))),
        "style": style,
        "data": data_text({**shown, "live": live}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def data_text(data: Mapping[str, Any]) -> str:
    """Data as JSON that may stand in HTML: in ASCII, and without the characters that end a script or begin a tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("speedtronic.report").joinpath("page", name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
