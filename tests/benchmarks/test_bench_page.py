"""The page of medusa-bench in a real browser: nothing is fetched, and everything is there to be seen."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_run import PROMPTS, SWEEP, Benched
from headless import CHROMIUM, evaluated, screenshot

FIGURES = ("speed_up", "roofline", "published", "hit_rates", "tree_0", "tree_1", "stages")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")

SEEN = """({
  title: document.title,
  headings: [...document.querySelectorAll("h2")].map(one => one.innerText),
  figures: Object.fromEntries([...document.querySelectorAll("figure")].map(one => {
    const box = one.querySelector("svg").getBoundingClientRect();
    return [one.id, [box.width, box.height, box.right <= innerWidth]];
  })),
  rows: Object.fromEntries([...document.querySelectorAll("table")].map(one => [one.id, one.rows.length])),
  optimum: [...document.querySelectorAll("tr.optimum")].map(one => one.cells[0].innerText),
  categories: [...document.querySelectorAll("#categories tr")].map(one => one.cells[0].innerText),
  headline: document.getElementById("headline").innerText,
  exactness: document.getElementById("exactness").innerText,
  colour: getComputedStyle(document.getElementById("exactness")).color,
  nodes: [...document.querySelectorAll("g[id^=tree_1-node-]")].map(one => one.id),
  cells: document.querySelectorAll("#figure-hit_rates text").length,
  model: document.querySelectorAll("#roofline-model path").length,
  overflow: document.documentElement.scrollWidth - innerWidth,
  fetched: performance.getEntriesByType("resource").map(one => one.name),
  ledger: [...document.querySelectorAll("pre")].map(one => one.innerText.split("\\n")[0]),
})"""


@needs_chromium
def test_page_shows_everything_in_a_browser(benched: Benched, tmp_path: Path) -> None:
    seen = evaluated(benched.report, SEEN, tmp_path)
    assert seen["title"] == "medusa-bench: bundle"
    assert seen["fetched"] == []
    assert list(seen["figures"]) == [f"figure-{name}" for name in FIGURES]
    for width, height, inside in seen["figures"].values():
        assert width > 200 and height > 80 and inside
    assert seen["overflow"] <= 0
    assert seen["rows"] == {
        "facts": 4,
        "sweep": 1 + len(SWEEP) + 2,
        "contexts": 3,
        "answers": 6,
        "categories": 2 + len(PROMPTS),
        "hits": 5,
        "lookup": 6,
        "stages": 9,
    }
    assert seen["optimum"] == [benched.document["sweep"]["optimum"]]
    assert seen["categories"] == ["category", *PROMPTS, "together"]
    (adaptive,) = (way for way in benched.document["answers"]["ways"] if way["kind"] == "adaptive")
    assert seen["headline"].startswith(f"{adaptive['speed_up']:.2f} × plain decoding: whole answers to 5 prompts")
    assert seen["exactness"].startswith("exact: each of 5 answers") and seen["colour"] == "rgb(24, 104, 47)"
    assert seen["nodes"] == [f"tree_1-node-{node}" for node in ("root", "0", "0-0", "0-0-0", "0-0-0-0")]
    assert seen["cells"] >= 4 * 10  # heads and ranks
    assert seen["model"] == 1
    assert len(seen["ledger"]) == 3 and seen["ledger"][1].startswith("a_tree: 4 rows behind")


@needs_chromium
def test_page_is_drawn(benched: Benched, tmp_path: Path) -> None:
    picture = screenshot(benched.report, tmp_path / "page.png", tmp_path)
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000  # an empty page is some 5 kB


def test_page_refers_to_nothing_outside(benched: Benched) -> None:
    page = benched.report.read_text()

    class References(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[tuple[str, str]] = []
            self.ids: list[str] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base"), tag
            for name, value in attributes:
                if name == "id":
                    self.ids.append(value or "")
                if name in ("src", "href", "xlink:href", "data", "action"):
                    self.found.append((tag, value or ""))

    references = References()
    references.feed(page)
    assert all(value.startswith("#") for _, value in references.found)
    assert not re.search(r"url\((?!#)|@import", page)
    used = {value[1:] for _, value in references.found} | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used and used <= set(references.ids)
    assert len(set(references.ids)) == len(references.ids)  # pictures do not take one another's parts


def test_names_of_users_do_not_become_markup(benched: Benched) -> None:
    page = benched.report.read_text()
    assert "odd &lt;&amp;&gt; category" in page and "odd <&>" not in page
    assert ' id="figure_1"' in unescape(page)
