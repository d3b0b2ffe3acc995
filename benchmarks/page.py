"""What `medusa-bench` measured, as one HTML page that needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from medusa_engine.benchmarks.answers import ADAPTIVE
from medusa_engine.benchmarks.bench import Results
from medusa_engine.benchmarks.text import (
    answer_rows,
    category_rows,
    category_title,
    exactness,
    facts,
    hit_rows,
    lookup_rows,
    spread,
    stage_rows,
    sweep_rows,
)
from medusa_engine.runtime.counted import counted

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1b2733; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; } p.note { color: #6b7885; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #dde3e8; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } table.facts td { text-align: left; }
tr.optimum td { font-weight: 600; color: #1f5f9e; } div.wide { overflow-x: auto; }
.exact { color: #18682f; } .differs { color: #b00020; } .big { font-size: 2.2rem; font-weight: 650; color: #1f5f9e; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { color: #6b7885; }
pre { background: #f4f6f8; padding: 1rem; overflow-x: auto; font-size: 13px; }
"""


_TAG = re.compile(r"<[^<>]*>")
_ID = re.compile(r"""(\sid="|href="#|url\(#)""")  # where an id begins, and where one is referred to


def page(found: Results, pictures: Mapping[str, bytes]) -> str:
    """The whole document.

    Args:
        pictures: name -> SVG file, as `figures.pictures` gives them.
    """
    name = found.manifest["name"]
    body = [
        f"<h1>{escape(name)}: speculative decoding, measured</h1>",
        _headline(found),
        f"<p>{escape(_best_tree(found))}</p>",
        f'<p id="exactness" class="{"exact" if found.exact else "differs"}">{escape(exactness(found))}</p>',
        *(f'<p class="note">note: {escape(note)}</p>' for note in found.notes),
        _facts(facts(found)),
        "<h2>Speed-up against nodes</h2>",
        _figure(pictures, "speed_up", "A tree pays off where E[G] lies above T(N)/T(1); the star is the optimum."),
        _table("sweep", sweep_rows(found)),
        f'<p class="note">T(N) is timed at context {found.sweep.context}. E[G] is counted by replaying'
        f" {counted(found.sweep.judged_on, 'answer')}; trees were grown on"
        f" {counted(found.sweep.grown_on, 'answer')}.</p>",
        "<h2>T(N)</h2>",
        _figure(pictures, "roofline", _roofline_caption(found)),
        _table("contexts", _context_rows(found)),
        "<h2>Tokens per round</h2>",
        _figure(pictures, "published", "Distribution of the tokens that a round published."),
        _table("answers", answer_rows(found)),
        "<h2>Categories</h2>",
        f'<p class="note">{_categories_note(found)}</p>',
        _table("categories", category_rows(found)),
        *_hits(found, pictures),
        "<h2>Trees</h2>",
        *(
            _figure(pictures, f"tree_{index}", f"{tree.name}: share of its rounds in which each node was accepted.")
            for index, tree in enumerate(found.trees)
        ),
        "<h2>Where the time goes</h2>",
        _figure(pictures, "stages", "Time per stage, from ONNX Runtime's profiler."),
        _table("stages", stage_rows(found)),
    ]
    if found.costs is not None:
        body += ["<h2>Cost ledger</h2>", *(f"<pre>{escape(table)}</pre>" for table in found.costs.tables())]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>medusa-bench: {escape(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _hits(found: Results, pictures: Mapping[str, bytes]) -> list[str]:
    parts = []
    if found.hits.rates:
        caption = "Share of the positions at which a head is right at a rank."
        parts += ["<h2>Heads</h2>", _figure(pictures, "hit_rates", caption), _table("hits", hit_rows(found))]
    if found.hits.lookup:
        note = (
            "Share of the positions at which a key is the longest that occurred before, and share of those at which all"
            " tokens looked up are right down to a depth."
        )
        parts += ["<h2>Lookup</h2>", f'<p class="note">{note}</p>', _table("lookup", lookup_rows(found))]
    return parts


def _headline(found: Results) -> str:
    answers = found.answers
    (default,) = (way for way in answers.ways if way.kind == ADAPTIVE)
    among = f" in {answers.repeats} repeats{spread(found, default, answers.everything)}" if answers.repeats > 1 else ""
    return (
        f'<p id="headline"><span class="big">{answers.speed_up(default, answers.everything):.2f} ×</span> plain'
        f" decoding: whole answers to {counted(len(answers.prompts), 'prompt')}{among}, as the engine writes them by"
        " default.</p>"
    )


def _categories_note(found: Results) -> str:
    if found.answers.repeats == 1:
        return "Tokens per second over plain steps, and in brackets tokens per round."
    title = category_title(found)
    return f"{title[0].upper()}{title[1:]}."


def _best_tree(found: Results) -> str:
    best = found.sweep.optimum
    told = (
        f"Of {counted(len(found.sweep.points), 'tree')}, {best.tree.name} of {counted(best.tree.nodes, 'node')} does"
        f" best: {best.published.mean:.2f} tokens per round that takes {best.overhead.median:.2f} plain steps,"
        f" {best.speed_up:.2f} ×."
    )
    return told if best.pays else f"{told} No tree pays here."


def _roofline_caption(found: Results) -> str:
    if found.costs is None:
        return "Time of a round by nodes, median and spread."
    machine = found.costs.rates.machine
    return (
        f"Time of a round by nodes, median and spread. The dashed line is modelled: bytes and FLOPs as counted, at the"
        f" {machine.bytes_per_second / 1e9:.1f} GB/s and {machine.flops_per_second / 1e9:.0f} GFLOP/s measured here."
    )


def _context_rows(found: Results) -> list[tuple[str, ...]]:
    rows = [("context", "prefill ms", "tok/s", "plain step ms", *(f"{tree.name} ms" for tree in found.trees))]
    for at in found.contexts:
        speed = f"{1000 * at.tokens / at.prefill.median:.0f}"
        passes = (at.step, *at.rounds.values())
        cells = (f"{one.median:.2f} ({min(one.values):.2f} to {max(one.values):.2f})" for one in passes)
        rows.append((f"{at.tokens}", f"{at.prefill.median:.1f}", speed, *cells))
    return rows


def _facts(named: Mapping[str, str]) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in named.items())
    return f'<table class="facts" id="facts">{"".join(rows)}</table>'


def _table(name: str, rows: Sequence[Sequence[str]]) -> str:
    heading, *others = rows
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in heading) + "</tr>"]
    for row in others:
        mark = ' class="optimum"' if row[-1].startswith("<-") else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="wide"><table id="{name}">{"".join(lines)}</table></div>'


def _figure(pictures: Mapping[str, bytes], name: str, caption: str) -> str:
    """A picture in the page, its ids behind its name: each counts its own parts from 1."""
    if name not in pictures:
        return f'<p class="note">{escape(caption)} Too large to be drawn.</p>'
    drawn = pictures[name].decode("utf-8")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = _TAG.sub(lambda tag: _ID.sub(rf"\g<1>{name}-", tag[0]), drawn)
    drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f'<figure id="figure-{name}">{drawn}<figcaption>{escape(caption)}</figcaption></figure>'
