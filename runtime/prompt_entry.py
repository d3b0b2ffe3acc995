"""One prompt of a JSON file of prompts: a text, token ids, or a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

if TYPE_CHECKING:
    from medusa_engine.runtime.engine import Engine


def encode_entry(
    entry: Any, where: str, engine: Engine, *, chat: bool, answer_tokens: int | None, hint: str
) -> tuple[str, list[int]]:
    """A name for people, on one line, and the token ids.

    Args:
        entry: what stands in the file.
        where: it stands, for messages.
        engine: that will run it.
        chat: send a text through the chat template, as the user's message.
        answer_tokens: that the cache has to leave room for; None to take a prompt of any length.
        hint: what prompts look like, for an entry that is none.

    Raises:
        UserError: it is no prompt, has a token of another model, or is too long.
    """
    messages = isinstance(entry, list) and any(isinstance(part, dict) for part in entry)
    if engine.tokenizer is None and (isinstance(entry, str) or messages):
        what = "a conversation" if messages else "a text"
        raise UserError(f"{where}: is {what}, but the engine has no tokenizer", "give lists of token ids")
    if isinstance(entry, str):
        name, ids = entry, engine.encode([{"role": "user", "content": entry}] if chat else entry)
    elif isinstance(entry, list) and entry and all(type(token) is int for token in entry):
        name, ids = "token ids", entry
        if not all(0 <= token < engine.limits.vocab_size for token in ids):
            raise UserError(f"{where}: a token id is not below {engine.limits.vocab_size}", "give ids of this model")
    elif isinstance(entry, list) and entry and all(_is_message(message) for message in entry):
        name, ids = entry[-1]["content"], engine.encode(entry)
    else:
        raise UserError(f"{where}: is {_found(entry)}, not a text, a list of token ids or a list of messages", hint)
    if answer_tokens is None:
        return " ".join(name.split()), ids
    most = engine.limits.max_length - answer_tokens
    if not 0 < len(ids) <= most:
        raise UserError(
            f"{where}: has {counted(len(ids), 'token')}; 1 to {most} leave room for an answer",
            "shorten the prompt, or export with a larger medusa-export --max-length",
        )
    return " ".join(name.split()), ids


def _found(entry: Any) -> str:
    """What stands in the place of a prompt, by the first part that is wrong."""
    if not isinstance(entry, list):
        return shown(entry)
    if not any(isinstance(part, dict) for part in entry):
        return next((f"a list with {shown(part)} in it" for part in entry if type(part) is not int), "an empty list")
    number, part = next((number, part) for number, part in enumerate(entry, 1) if not _is_message(part))
    what = "a message without texts as role and content" if isinstance(part, dict) else shown(part)
    return f"a list with {what} as its entry {number}"


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("role", "content"))
