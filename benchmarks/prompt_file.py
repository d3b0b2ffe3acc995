"""Prompts to measure on: our own by category, or those of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.prompt_entry import encode_entry
from medusa_engine.runtime.strict_json import read_json, shown
from medusa_engine.runtime.text import read_prompt_file

OWN_PROMPTS = Path(__file__).parent / "prompts" / "categories.json"
UNSORTED = "all"  # the category of prompts that have none

_MAX_BYTES = 64 << 20
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
    """

    category: str
    name: str
    ids: list[int]


def read_prompts(path: Path | None, engine: Engine) -> list[BenchPrompt]:
    """The prompts of a file, or our own; random tokens for a bundle without tokenizer.

    Texts become a user's message where the model has a chat template.

    Raises:
        UserError: the file cannot be read or holds no prompts, or one of them cannot be encoded or leaves no room.
    """
    if path is None and engine.tokenizer is None:
        most = max(1, engine.limits.max_length // 2)
        drawn = np.random.default_rng(0).integers(0, engine.limits.vocab_size, size=_RANDOM)
        return [
            BenchPrompt(UNSORTED, f"random tokens {number}", ids[:most]) for number, ids in enumerate(drawn.tolist())
        ]
    path = path or OWN_PROMPTS
    if path.suffix.lower() == ".json":
        document = read_json(path, max_bytes=_MAX_BYTES, hint=_HINT)
        document = {UNSORTED: document} if isinstance(document, list) else document
        if not isinstance(document, dict) or not all(isinstance(entries, list) for entries in document.values()):
            raise UserError(f"{path}: {shown(document)} is not an object of lists", _HINT)
        entries = [(category, entry) for category, listed in document.items() for entry in listed]
    else:
        lines = (line.removesuffix("\r") for line in read_prompt_file(path).split("\n"))
        entries = [(UNSORTED, line) for line in lines if line.strip()]
    if not entries:
        raise UserError(f"{path}: holds no prompts", _HINT)
    return [
        _prompt(category, entry, f"{path}: prompt {number}", engine)
        for number, (category, entry) in enumerate(entries, 1)
    ]


def _prompt(category: str, entry: Any, where: str, engine: Engine) -> BenchPrompt:
    chat = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    return BenchPrompt(category, *encode_entry(entry, where, engine, chat=chat, answer_tokens=2, hint=_HINT))
