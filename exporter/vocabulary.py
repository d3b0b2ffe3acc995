"""Whether a tokenizer is the one of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown


def check_vocabulary(path: Path, tokenizer: Any, vocab_size: int) -> None:
    """Refuse a tokenizer that gives tokens the model does not have; a model may have more than its tokenizer gives.

    Raises:
        UserError: it gives one.
    """
    outside = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= vocab_size}
    if outside:
        first = min(outside)
        raise UserError(
            f"{path}: the tokenizer has {counted(len(outside), 'token')} that the model's vocabulary of {vocab_size}"
            f" lacks, the first is {shown(outside[first])} ({first})",
            "give the tokenizer of this model, or add rows for these tokens to its embeddings",
        )
