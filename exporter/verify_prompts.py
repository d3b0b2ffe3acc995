"""The prompts that an engine is verified on: lines of text, or a JSON file of texts, conversations and token ids."""

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

OWN_TEXTS = (
    "The lighthouse keeper climbed the stairs, as he had done every evening, and",
    "Question: What is the difference between a lake and a pond?\nAnswer:",
    "def largest(numbers):\n",
)

_MAX_JSON_BYTES = 64 << 20
_RANDOM_TOKENS = 12
_HINT = (
    "write one prompt per line, or a .json list of texts, lists of token ids, lists of messages, or objects with one of"
    ' "text", "input_ids", "messages"'
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and what reports call it."""

    name: str
    ids: list[int]


def read_prompts(path: Path | None, engine: Engine, *, chat: bool) -> list[Prompt]:
    """The prompts of a file; without one, texts of our own, or random tokens for a bundle without tokenizer.

    Args:
        chat: apply the chat template to texts; of a JSON file, an object's own `chat` says so as well.

    Raises:
        UserError: the file cannot be read or holds no prompts, or one of them cannot be encoded or leaves no room;
            `chat` for an engine without tokenizer, which has no texts.
    """
    if chat and engine.tokenizer is None:
        raise UserError("--chat is given, but the engine has no tokenizer", "leave it out: prompts are token ids")
    if path is None:
        return _own_prompts(engine, chat=chat)
    if path.suffix.lower() == ".json":
        document = read_json(path, max_bytes=_MAX_JSON_BYTES, hint=_HINT)
        if not isinstance(document, list):
            raise UserError(f"{path}: is not a list of prompts but {shown(document)}", _HINT)
        entries = [(f"entry {number}", entry) for number, entry in enumerate(document)]
    else:
        lines = enumerate(read_prompt_file(path).split("\n"), 1)
        entries = [(f"line {number}", line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not entries:
        raise UserError(f"{path}: holds no prompts", _HINT)
    return [_prompt(entry, f"{path}: {where}", engine, chat=chat) for where, entry in entries]


def _own_prompts(engine: Engine, *, chat: bool) -> list[Prompt]:
    """Cut to leave half of a small cache to the answer."""
    most = max(1, engine.limits.max_length // 2)
    if engine.tokenizer is None:
        size = (len(OWN_TEXTS), _RANDOM_TOKENS)
        random = np.random.default_rng(0).integers(0, engine.limits.vocab_size, size=size)
        return [Prompt("random tokens", ids[:most]) for ids in random.tolist()]
    texts = ([{"role": "user", "content": text}] if chat else text for text in OWN_TEXTS)
    encoded = [engine.encode(text) for text in texts]
    return [Prompt(" ".join(text.split()), ids[:most]) for text, ids in zip(OWN_TEXTS, encoded, strict=True)]


def _prompt(entry: Any, where: str, engine: Engine, *, chat: bool) -> Prompt:
    if isinstance(entry, dict):
        chat = chat or bool(entry.get("chat"))
        kinds = [kind for kind in ("text", "input_ids", "messages") if kind in entry]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "other keys"
            raise UserError(f"{where}: an object with {found}, not with one of text, input_ids and messages", _HINT)
        entry = entry[kinds[0]]
    return Prompt(*encode_entry(entry, where, engine, chat=chat, answer_tokens=1, hint=_HINT))
