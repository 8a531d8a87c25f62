"""Checks the links of the built site: every page, file and place on a page that a link names is there.

It also refuses whatever a reader's browser would fetch from elsewhere: a script, a style, a font or an image. Links to
other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

_FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
_NOT_FETCHED_RELS = {"canonical", "next", "prev", "edit", "alternate"}


class _Page(HTMLParser):
    """The links and the names of places on a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[bool, str]] = []  # whether a browser fetches it by itself, and where to
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := given.get(name))}
        for name in ("href", "src"):
            if link := given.get(name):
                fetched = (tag, name) in _FETCHED and given.get("rel") not in _NOT_FETCHED_RELS
                self.links.append((fetched, link))


def problems(site: Path) -> list[str]:
    """What is wrong with the links of a site, one line for each."""
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        for fetched, link in page.links:
            where = f"{file.relative_to(site)}: {link}"
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if fetched and parts.scheme != "data":
                    found.append(f"{where}: fetched from another site")
                continue
            path, place = urldefrag(link)
            # The page of what is not found is shown at any address, so its links begin at the root.
            target = site / unquote(path).lstrip("/") if path.startswith("/") else file.parent / unquote(path)
            target = file if not path else target.resolve()
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{where}: no such file")
            elif place and target in pages and unquote(place) not in pages[target].places | {"__top"}:
                found.append(f"{where}: no such place on that page")
    return found


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    lines = problems(site)
    print("\n".join(lines) or f"{len(list(site.rglob('*.html')))} pages, no broken link, nothing from other sites")
    sys.exit(bool(lines))
