"""Read the stop tokens of a checkpoint's `generation_config.json`."""

from __future__ import annotations

from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json, shown

_MAX_BYTES = 1 << 20
ID_LIMIT = 1 << 31  # every token id is below
_HINT = 'give "eos_token_id" as one token id, a list of token ids, or null'


def read_stop_token_ids(path: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of a generation config: no, one or several ids, in the file's order.

    A missing or null `eos_token_id` gives `()`: the file then says nothing about stop tokens.

    Raises:
        UserError: the file cannot be read or is not a JSON object, or an id is not an integer in 0 … 2**31 - 1.
    """
    document = read_json(path, max_bytes=_MAX_BYTES, hint=_HINT)
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a JSON object, found {shown(document)}", _HINT)
    value = document.get("eos_token_id")
    if value is None:
        return ()
    ids: list[int] = []
    for token_id in value if isinstance(value, list) else [value]:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < ID_LIMIT:
            raise UserError(f"{path}: eos_token_id {shown(token_id)} is not a token id", _HINT)
        ids.append(token_id)
    return tuple(ids)
