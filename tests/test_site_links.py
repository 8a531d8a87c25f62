"""The check of the built site's links."""

from __future__ import annotations

from pathlib import Path

from docs.site_links import problems


def test_a_sound_site_has_no_problems(tmp_path: Path) -> None:
    (tmp_path / "style.css").write_text("", encoding="utf-8")
    head = '<link rel="stylesheet" href="style.css"><link rel="canonical" href="https://example.com/">'
    (tmp_path / "index.html").write_text(f'{head}<a href="other.html#there">x</a><a href="https://a.b">y</a>', "utf-8")
    (tmp_path / "other.html").write_text(
        '<h2 id="there">there</h2><a href="#there">up</a><a href=".">home</a>', "utf-8"
    )
    assert problems(tmp_path) == []


def test_what_is_missing_and_what_comes_from_elsewhere_is_named(tmp_path: Path) -> None:
    links = [
        '<a href="gone.html">',
        '<a href="#gone">',
        '<script src="https://cdn.example/x.js"></script>',
        '<img src="a%20b.png">',
    ]
    (tmp_path / "index.html").write_text("\n".join(links), encoding="utf-8")
    assert problems(tmp_path) == [
        "index.html: gone.html: no such file",
        "index.html: #gone: no such place on that page",
        "index.html: https://cdn.example/x.js: fetched from another site",
        "index.html: a%20b.png: no such file",
    ]
