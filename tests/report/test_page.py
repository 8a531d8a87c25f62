"""The page is one safe file, and works in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speedtronic import report, runs
from speedtronic.report.live import LiveReport
from speedtronic.report.page import data_text, report_page
from tests.support.chromium import Browser, needs_chromium
from tests.support.logs import LogWriter, write_long_log

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028{{data}}"


def write_run(folder: Path, name: str, *, factor: float = 1.0) -> Path:
    log = LogWriter(folder)
    log.start(0, target=200)
    for step in range(1, 201):
        log.step(
            step, loss=factor * (1 + 4 / step), lr=1e-3 / step, lr_applied=1e-3 / step, grad_norm=1.0 + step % 7,
            tokens=64 * step, samples=step, interval_tokens_per_sec=1000.0 + step % 11,
            interval_steps_per_sec=20.0 + step % 5,
            peak_memory_bytes=5e8 + step,
        )  # fmt: skip
        if step % 50 == 0:
            log.write("eval", step=step, loss=factor * (1.2 + 4 / step))
            log.write("checkpoint", step=step, path=f"/runs/step_{step}")
    log.write("log", level="WARNING", message=f"beware of {name}")
    log.write("sample", step=200, prompt=name, text=name)
    config = {"run": {"name": name}, "model": {"extra": {name: name}}, "optimizer": {"lr": factor}}
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    return folder


def page_of(*folders: Path) -> str:
    return report_page([runs.load(folder) for folder in folders])


def embedded(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


# ---------------------------------------------------------------------- the file


def test_what_a_run_says_cannot_end_the_data_or_become_markup(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / HOSTILE.replace("/", "_"), HOSTILE))
    assert embedded(page)["runs"][0]["label"] == HOSTILE
    assert "<img" not in page
    assert page.count("</script") == 2, "that of the data and that of the script"
    assert "\u2028" not in embedded_text(page)


def embedded_text(page: str) -> str:
    start = page.index('id="data">')
    return page[start : page.index("</script", start)]


def test_data_in_html_is_ascii_and_has_no_character_that_begins_markup() -> None:
    text = data_text({"<a>&": ["\u2028\u2029é", 1.5, None]})
    assert (json.loads(text), text.isascii()) == ({"<a>&": ["\u2028\u2029é", 1.5, None]}, True)
    assert not set("<>&") & set(text)


def test_the_policy_allows_this_script_and_this_style_and_nothing_else(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, "run"))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert not {"connect-src", "unsafe-inline", "unsafe-eval", "http"} & set(re.findall(r"[\w-]+", policy))
    assert "style=" not in page.split("<script")[0]


def test_the_files_of_uplot_are_those_that_were_published() -> None:
    folder = Path(report.__file__).parent / "page/uplot"
    sums = dict(re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", (folder / "SOURCE.md").read_text(encoding="utf-8")))
    assert len(sums) == 2
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_a_long_run_is_thinned_and_its_spikes_stay(tmp_path: Path) -> None:
    write_long_log(tmp_path, 20_000, {7: 77.0, 12_345: -55.0})
    page = page_of(tmp_path)
    table = embedded(page)["runs"][0]["tables"]["steps"]
    losses = list(memoryview(base64.b64decode(table["columns"]["loss"]["data"])).cast("f"))
    assert (table["of"], max(losses), min(losses)) == (20_000, 77, -55)
    assert table["rows"] < 9_000


@pytest.mark.slow
def test_a_million_steps_become_a_page_of_less_than_three_megabytes(tmp_path: Path) -> None:
    write_long_log(tmp_path, 1_000_000, {654_321: 99.0})
    page = page_of(tmp_path)
    assert len(page) < 3e6
    table = embedded(page)["runs"][0]["tables"]["steps"]
    losses = list(memoryview(base64.b64decode(table["columns"]["loss"]["data"])).cast("f"))
    assert (table["of"], max(losses)) == (1_000_000, 99)


# ---------------------------------------------------------------------- in a browser


def in_a_browser(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = needs_chromium(pytest.mark.browser(pytest.mark.slow(test)))
    return marked


CENTRE = """(() => {
  const box = document.querySelectorAll(".chart .u-over")[%d].getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2, box.width];
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def open_page(browser: Browser, tmp_path: Path, *folders: Path, width: int = 1280) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(*folders), encoding="utf-8")
    browser.problems.clear()
    browser.requests.clear()
    browser.resize(width, 900)
    browser.open(file.as_uri())
    assert browser.requests == [file.as_uri()], "the page asks for nothing"


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(f"[...document.querySelectorAll({selector!r})].map((found) => found.textContent)")
    return found


def press(browser: Browser, text: str) -> None:
    buttons = "[...document.querySelectorAll('button')]"
    browser.run(f"{buttons}.find((each) => each.textContent === {text!r}).click()")


@in_a_browser
def test_the_page_draws_hovers_toggles_and_zooms_without_a_complaint(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two", factor=2.0))
    assert texts(browser, ".chart h3") == [
        "Loss", "Events", "Learning rate", "Gradient norm", "Throughput", "Time of a step", "Memory",
    ]  # fmt: skip
    x, y, width = browser.run(CENTRE % 0)
    browser.point(x, y)
    (tip,) = [text for text in texts(browser, ".tip") if text]
    assert "Step 1" in tip
    assert "one: held out" in tip
    assert "two: training, smoothed" in tip

    press(browser, "two")
    browser.point(x, y + 1)
    assert not any("two" in text for text in texts(browser, ".tip"))
    press(browser, "two")

    for words, first in (("tokens", "Tokens "), ("time", "Time "), ("log", "Time ")):
        press(browser, words)
        x, y, width = browser.run(CENTRE % 0)
        browser.point(x, y)
        assert texts(browser, ".tip")[0].startswith(first), words
    press(browser, "linear")
    press(browser, "step")

    assert browser.run("document.getElementById('reset').hidden")
    browser.drag(x - width / 4, y, x + width / 4)
    assert not browser.run("document.getElementById('reset').hidden")
    press(browser, "Reset zoom")
    assert browser.run("document.getElementById('reset').hidden")

    press(browser, "different")
    assert "optimizer.lr" in texts(browser, ".keys tbody th")
    assert browser.problems == []


@in_a_browser
def test_hostile_names_and_texts_stay_text(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, write_run(tmp_path / "a", HOSTILE))
    assert texts(browser, "h1") == [HOSTILE]
    assert HOSTILE in texts(browser, ".keys td")
    assert f"beware of {HOSTILE}" in texts(browser, "td")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.problems == []


@in_a_browser
def test_the_csv_has_the_numbers_of_the_log(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, write_run(tmp_path / "a", "one"))
    browser.run("URL.createObjectURL = (blob) => { window.kept = blob; return '#'; }")
    browser.run("document.querySelector('a[download$=\"steps.csv\"]').click()")
    head, first, *rest = browser.run("window.kept.text()").splitlines()
    record = dict(zip(head.split(","), first.split(","), strict=True))
    assert (record["step"], record["tokens"], record["loss"], record["lr"]) == ("1", "64", "5", "0.001")
    assert len(rest) == 199


CONTRAST = """
const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => channel(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!colour.endsWith(", 0)")) return colour;
  }
  return "rgb(255, 255, 255)";
};
const ratio = (one, other) => {
  const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
};
"""


@in_a_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_curves_have_the_contrast_of_wcag_aa(theme: str, browser: Browser, tmp_path: Path) -> None:
    """Text 4.5 to 1, graphics 3 to 1: https://www.w3.org/TR/WCAG22/#contrast-minimum and #non-text-contrast."""
    open_page(browser, tmp_path, write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two"))
    if browser.run("document.documentElement.dataset.theme") != theme:
        browser.run("document.getElementById('theme').click()")
    faint = browser.run(f"""(() => {{ {CONTRAST}
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      const faint = [];
      let seen = 0;
      while (walker.nextNode()) {{
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
        seen += 1;
        const found = ratio(getComputedStyle(element).color, behind(element));
        if (found < 4.5) faint.push([walker.currentNode.data, found]);
      }}
      const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
      const probe = document.body.appendChild(document.createElement("i"));
      for (let number = 1; number <= 8; number++) {{
        probe.style.color = `var(--c${{number}})`;
        const found = ratio(getComputedStyle(probe).color, card);
        if (found < 3) faint.push([number, found]);
      }}
      return seen > 100 ? faint : ["no text was found"];
    }})()""")
    assert faint == []


@in_a_browser
@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_page_needs_no_scrolling_sideways(width: int, browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path, write_run(tmp_path / "a", "one" * 30), write_run(tmp_path / "b", "two"), width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert (
        browser.run("Math.max(...[...document.querySelectorAll('canvas')].map((c) => c.getBoundingClientRect().right))")
        <= width
    )
    browser.resize(1280, 900)


@in_a_browser
def test_the_live_page_follows_the_log(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "one")
    browser.problems.clear()
    with LiveReport([runs.RunReader(folder)]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        browser.open(server.url)
        assert "200" in texts(browser, ".tiles dd")[1]
        log = LogWriter(folder)
        log.step(201)
        changed = browser.run("""new Promise((done) => {
          const look = () => document.querySelectorAll(".tiles dd")[1].textContent.startsWith("201") && done(true);
          new MutationObserver(look).observe(document.getElementById("summary"), { childList: true });
          look();
        })""")
        server.shutdown()
        thread.join()
    assert changed
    assert browser.problems == []
