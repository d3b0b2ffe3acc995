"""Counts in messages and reports."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 lookup node`, `6 lookup nodes`: a count of things whose plural ends in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
