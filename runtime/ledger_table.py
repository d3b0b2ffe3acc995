"""The ledger as text: counts, modelled times, and measured ones in a column of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from medusa_engine.runtime.cost import PARTS, HeadWork, Ledger
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.roofline import Machine, Measured, Modelled, ledger_seconds, part_seconds

_NONE = "-"
_HEADER = ("part", "GFLOP", "MB weights", "MB values", "modelled ms", "measured ms")


def ledger_table(
    ledger: Ledger, *, machine: Machine | None = None, measured: Mapping[str, Measured] | None = None
) -> str:
    """Lines of text, without a newline at the end.

    Args:
        machine: whose rates the modelled times come from; without, that column is empty.
        measured: seconds by part, and of the whole round under `round`. Parts that were not timed stay empty.

    Raises:
        TypeError: a value of `measured` was not measured.
        ValueError: it names a part that there is none of.
    """
    measured = measured or {}
    for name, value in measured.items():
        if not isinstance(value, Measured):
            raise TypeError(f"{name}: {value} was not measured")
        if name not in (*PARTS, "round"):
            raise ValueError(f"the ledger has no part {name!r}")
    rows = [_HEADER]
    for part in ledger.parts:
        modelled = part_seconds(part, machine) if machine else None
        columns = _counts(part.flops, part.weight_bytes, part.value_bytes)
        rows.append((part.name, *columns, _time(modelled), _time(measured.get(part.name))))
    weights, values = (sum(getattr(part, kind) for part in ledger.parts) for kind in ("weight_bytes", "value_bytes"))
    modelled = ledger_seconds(ledger, machine) if machine else None
    rows.append(("round", *_counts(ledger.flops, weights, values), _time(modelled), _time(measured.get("round"))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    table = [_line(row, widths) for row in rows]
    title = f"{ledger.tree}: {counted(ledger.rows, 'row')} behind {ledger.context} in the cache, counted"
    return "\n".join([title, *table, "", *_facts(ledger)])


def _facts(ledger: Ledger) -> list[str]:
    winning, all_rows = ledger.heads_on_winning_row, ledger.heads_on_all_rows
    facts = {
        "resident parameters": f"{ledger.resident_parameters:,}",
        "KV bytes, committed": f"{ledger.committed_kv_bytes:,}",
        "KV bytes, temporary": f"{ledger.temporary_kv_bytes:,}",
        "attention pairs": f"{ledger.dense_attention_pairs:,} computed, the mask allows"
        f" {ledger.allowed_attention_pairs:,}",
        "target logits": f"{ledger.target_logit_elements:,}; gathered path by path they would be"
        f" {ledger.gathered_path_logit_elements:,}",
        "heads, winning row": _work(winning),
        "heads, all rows": f"{_work(all_rows)}: not done",
    }
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {text}" for name, text in facts.items()]


def _work(work: HeadWork) -> str:
    return (
        f"{work.residual_flops:,} FLOPs in blocks, {work.projection_flops:,} in projections,"
        f" {work.logit_elements:,} logits"
    )


def _counts(flops: int, weight_bytes: int, value_bytes: int) -> tuple[str, str, str]:
    return f"{flops / 1e9:.4f}", f"{weight_bytes / 1e6:.2f}", f"{value_bytes / 1e6:.3f}"


def _time(seconds: Modelled | Measured | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds.value:.3f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)])
