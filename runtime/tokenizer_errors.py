"""Whatever the tokenizers library trips over in a checkpoint's files is a user error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from medusa_engine.runtime.errors import UserError

CONFIG_HINT = "save the tokenizer again with the checkpoint's save_pretrained"


@contextlib.contextmanager
def refusing(problem: str, hint: str = CONFIG_HINT) -> Iterator[None]:
    """Turn any failure of the library in the block into a `UserError` of this problem; what it says goes behind it."""
    try:
        yield
    except BaseException as error:
        # The library raises no narrower type, for a missing file too; its panics are no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{problem}: {error}", hint) from error
