"""What a bundle takes of a checkpoint beside its weights: the tokenizer's files, and the stop tokens."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from medusa_engine.exporter.checkpoint import Source
from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.gguf_tokenizer import split_as_gguf_says
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation_config import ID_LIMIT
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.tokenizer_errors import refusing


def stop_token_ids(model: Any, tokenizer: Any | None) -> list[int]:
    """Every stop token that the generation settings, the config or the tokenizer name, ascending.

    Raises:
        UserError: one of them is not a token id.
    """
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    named = [getattr(source, "eos_token_id", None) for source in sources]
    ids: set[int] = set()
    for value in named:
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int or not 0 <= token_id < ID_LIMIT:
                raise UserError(
                    f"{model.name_or_path}: eos_token_id {shown(token_id)} is not a token id",
                    "correct config.json and generation_config.json: one token id, a list of them, or null",
                )
            ids.add(token_id)
    return sorted(ids)


def save_tokenizer(source: Source, folder: Path) -> Any | None:
    """Write `tokenizer.json`, its config and the chat template into `folder`; None if there is no tokenizer.

    What is odd about it is noted on standard error.

    Raises:
        UserError: the tokenizer's files are damaged or have no fast form.
    """
    if not source.has_tokenizer:
        return None
    from transformers import AutoTokenizer

    hint = "repair the tokenizer's files, or remove them to export an engine that runs by token ids"
    with refusing(f"{source.path}: cannot load the tokenizer", hint):
        tokenizer = AutoTokenizer.from_pretrained(**source.load_options())
        if source.gguf and (note := split_as_gguf_says(tokenizer.backend_tokenizer, source.path)):
            print(f"note: {source.path}: {note}", file=sys.stderr)
    try:
        written = {Path(name).name for name in tokenizer.save_pretrained(folder)}
    except OSError:
        raise  # of the disk
    except Exception as error:
        if system := re.search(r"os error (\d+)", str(error)):  # the disk's too, out of the library's own language
            raise OSError(int(system[1]), os.strerror(int(system[1]))) from error
        raise UserError(
            f"{source.path}: cannot save the tokenizer: {first_line(error)}", "repair the tokenizer's files"
        ) from error
    if "tokenizer.json" not in written:
        raise UserError(
            f"{source.path}: the tokenizer has no fast form (tokenizer.json)",
            "convert it with transformers, or remove its files to export an engine that runs by token ids",
        )
    for name in written - {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}:
        (folder / name).unlink(missing_ok=True)
    return tokenizer


def write_generation_config(path: Path, stop_ids: list[int]) -> None:
    """Write the generation settings the runtime reads: every stop id."""
    path.write_text(json.dumps({"eos_token_id": stop_ids}, indent=2) + "\n", encoding="utf-8")
