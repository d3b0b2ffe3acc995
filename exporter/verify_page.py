"""What `medusa-verify` found, as one HTML page that needs nothing but itself."""

from __future__ import annotations

import math
from html import escape

from medusa_engine.exporter.verify import Subject, Verification
from medusa_engine.exporter.verify_report import (
    explained,
    figures,
    first_divergence,
    headline,
    shortened,
    verdict_of,
    versions,
)
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.manifest import number_formats

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; }
.same { color: #18682f; } .near-ties { color: #8a5a00; } .fault { color: #b00020; }
svg { width: 100%; height: auto; border: 1px solid #ddd; } svg text { font-size: 11px; fill: #555; }
"""
_WIDTH, _HEIGHT, _MARGIN = 800, 220, 40
_VERDICTS = {"same": "The same, token for token", "near-ties": "The same up to near-ties", "fault": "FAULT"}


def page(found: Verification) -> str:
    """The whole document."""
    facts = {
        "checkpoint": f"{found.model}, {counted(found.layers, 'layer')}",
        "engine": f"{found.engine}, {number_formats(found.weights, found.dtype)}",
        "tolerance": f"{found.tolerance:.0e} of a row's largest logit",
        "versions": ", ".join(f"{tool} {number}" for tool, number in versions().items()),
    }
    notes = "".join(f"<p>note: {escape(note)}</p>" for note in found.notes)
    body = [
        f'<h1 class="{found.verdict}">{_VERDICTS[found.verdict]}</h1>',
        _table(facts),
        notes,
        *(_subject(found, subject) for subject in found.subjects),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>medusa-verify: {escape(found.engine)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _subject(found: Verification, subject: Subject) -> str:
    first = first_divergence(subject)
    parts = [
        f'<h2 class="{verdict_of(subject)}">{escape(subject.name)}</h2>',
        f"<p>{escape(headline(found, subject))}</p>",
        _table(figures(found, subject)),
    ]
    if first is not None:
        parts += ["<h3>First divergence</h3>", _table(explained(found, *first))]
    if subject.errors:
        parts.append(_errors(found, subject))
    rows = ["<tr><th>prompt</th><th>tokens</th><th>rounds</th><th>published</th><th>differences</th></tr>"]
    for number, (prompt, counts) in enumerate(zip(found.prompts, subject.published, strict=True), 1):
        here = [difference for at, difference in subject.differences if at == number]
        told = ", ".join(
            f"{'fault' if one.fault else 'near-tie'} ({one.kind}) in round {one.round}, row {one.row}" for one in here
        )
        cells = (f"{number}: {shortened(prompt.name, 60)}", len(prompt.ids), len(counts), sum(counts), told or "none")
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return "\n".join([*parts, f"<table>{''.join(rows)}</table>"])


def _table(facts: dict[str, str]) -> str:
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _errors(found: Verification, subject: Subject) -> str:
    """Relative error of the logits, pass by pass on a logarithmic axis, and the tolerance as a line."""
    exponents = [_exponent(error) for _, _, error in subject.errors]
    limit = _exponent(found.tolerance)
    low, high = math.floor(min(*exponents, limit)) - 0.2, math.ceil(max(*exponents, limit)) + 0.2

    def y(exponent: float) -> float:
        return _MARGIN / 2 + (high - exponent) / (high - low) * (_HEIGHT - _MARGIN)

    def x(index: int) -> float:
        return _MARGIN + (index + 0.5) / len(exponents) * (_WIDTH - 1.5 * _MARGIN)

    dots = []
    for index, ((prompt, number, error), exponent) in enumerate(zip(subject.errors, exponents, strict=True)):
        colour = "#b00020" if not error <= found.tolerance else "#2a5db0"
        title = f"prompt {prompt}, round {number}: {error:.1e}"
        place = f'cx="{x(index):.1f}" cy="{y(exponent):.1f}" r="2.5"'
        dots.append(f'<circle {place} fill="{colour}"><title>{title}</title></circle>')
    ticks = [
        f'<text x="2" y="{y(tick) + 4:.1f}">1e{tick}</text>'
        for tick in range(math.ceil(low), math.floor(high) + 1, max(1, round((high - low) / 6)))
    ]
    line = (
        f'<line x1="{_MARGIN}" x2="{_WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="#b00020"'
        f' stroke-dasharray="4"/><text x="{_WIDTH - 62}" y="{y(limit) - 4:.1f}">tolerance</text>'
    )
    return (
        "<p>Relative error of the logits, pass by pass:</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="errors by pass">'
        + "".join([*ticks, line, *dots])
        + "</svg>"
    )


def _exponent(error: float) -> float:
    """Decimal exponent; what is not finite is drawn at 1e3, and 0 at 1e-9."""
    return math.log10(min(max(error, 1e-9), 1e3)) if error == error else 3.0
