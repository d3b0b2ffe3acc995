"""Prompts to measure on: our own by category, or those of a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.prompt_entry import encode_entry
from medusa_engine.runtime.strict_json import read_json, shown
from medusa_engine.runtime.text import read_prompt_file

_FOLDER = Path(__file__).parent / "prompts"
OWN_PROMPTS = _FOLDER / "categories.json"
GROUNDED_PROMPTS = _FOLDER / "grounded.json"
MIXED, GROUNDED = "mixed set", "grounded tasks"  # our own
TOGETHER = "together"  # all categories, in tables
UNSORTED = "all"  # the category of prompts that have none

_MAX_BYTES = 64 << 20
_ANSWER_TOKENS = 2
_RANDOM = (4, 12)  # prompts and tokens of each, for a bundle without tokenizer
_HINT = (
    "write one prompt per line, or a .json object of categories, each a list of texts, of lists of token ids or of"
    " conversations"
)


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as token ids.

    Attributes:
        category: that results are reported by.
        name: its text, or what stands for it.
        group: of categories, which are reported together too; empty where there is one alone.
    """

    category: str
    name: str
    ids: list[int]
    group: str = ""


def read_prompts(path: Path | None, engine: Engine) -> tuple[list[BenchPrompt], int]:
    """The prompts of a file, or our own, mixed ones and grounded ones; random tokens for a bundle without tokenizer.

    Texts become a user's message where the model has a chat template.

    Returns:
        The prompts, and how many of our own the engine has no room for.

    Raises:
        UserError: the file cannot be read or holds no prompts, or one of them cannot be encoded or leaves no room.
    """
    if path is None and engine.tokenizer is None:
        most = max(1, engine.limits.max_length // 2)
        drawn = np.random.default_rng(0).integers(0, engine.limits.vocab_size, size=_RANDOM).tolist()
        return [BenchPrompt(UNSORTED, f"random tokens {number}", ids[:most]) for number, ids in enumerate(drawn)], 0
    if path is not None:
        return _read(path, engine), 0
    own = [
        replace(prompt, group=group)
        for group, file in ((MIXED, OWN_PROMPTS), (GROUNDED, GROUNDED_PROMPTS))
        for prompt in _read(file, engine, fitting=False)
    ]
    fitting = [prompt for prompt in own if len(prompt.ids) <= engine.limits.max_length - _ANSWER_TOKENS]
    if not fitting:
        raise UserError("none of our own prompts leaves room for an answer", "give --prompts with shorter ones")
    return fitting, len(own) - len(fitting)


def _read(path: Path, engine: Engine, *, fitting: bool = True) -> list[BenchPrompt]:
    """The prompts of a file; those that leave no room for an answer are refused if all have to be fitting."""
    if path.suffix.lower() == ".json":
        document = read_json(path, max_bytes=_MAX_BYTES, hint=_HINT)
        document = {UNSORTED: document} if isinstance(document, list) else document
        if not isinstance(document, dict):
            raise UserError(f"{path}: is {shown(document)}, not a list of prompts or an object of such lists", _HINT)
        for category, listed in document.items():
            if not isinstance(listed, list):
                raise UserError(f"{path}: category {shown(category)} is {shown(listed)}, not a list of prompts", _HINT)
            if category == TOGETHER or not category.isprintable():
                raise UserError(f"{path}: a category is called {shown(category)}", "give it another name")
        entries = [(category, entry) for category, listed in document.items() for entry in listed]
    else:
        lines = (line.removesuffix("\r") for line in read_prompt_file(path).split("\n"))
        entries = [(UNSORTED, line) for line in lines if line.strip()]
    if not entries:
        raise UserError(f"{path}: holds no prompts", _HINT)
    return [
        _prompt(category, entry, f"{path}: prompt {number}", engine, fitting=fitting)
        for number, (category, entry) in enumerate(entries, 1)
    ]


def _prompt(category: str, entry: Any, where: str, engine: Engine, *, fitting: bool) -> BenchPrompt:
    chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    room = _ANSWER_TOKENS if fitting else None
    return BenchPrompt(category, *encode_entry(entry, where, engine, chat=chat, answer_tokens=room, hint=_HINT))
