"""Feature shards: conversations with the hidden states and distributions that heads are trained on, on disk.

A shard is one `.npz`; T tokens of C conversations lie one behind the other:

    numbers [C] int64, lengths [C] int64        conversation ids and token counts
    tokens [T] int32, owned [T] bool            owned: written by the assistant
    hidden [T, H] float16                       final hidden state behind each token, which the LM head reads
    top_ids [T, 8] int32, top_logprobs [T, 8] float16   the target's distribution for the next token

Behind a token that was not fed, as the last of a conversation that was being written, the state is zero and the
log probabilities are -inf. `data.json` beside the shards says what they were made from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.tensor_file import check_archive
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.runtime.strict_json import read_json
from medusa_engine.training.json_file import write_json

KEPT_TOP = 8  # of the target's distribution, stored per position
MANIFEST_NAME = "data.json"
_SHARD = "shard-{:05d}.npz"
_OTHER_FOLDER = "give another output folder"


class StoredConversation(NamedTuple):
    """What a shard holds of one conversation; the fields are described above."""

    number: int
    tokens: npt.NDArray[np.int32]  # [T]
    owned: npt.NDArray[np.bool_]  # [T]
    hidden: npt.NDArray[np.float16]  # [T, H]
    top_ids: npt.NDArray[np.int32]  # [T, KEPT_TOP]
    top_logprobs: npt.NDArray[np.float16]  # [T, KEPT_TOP]


class ShardWriter:
    """Collects finished conversations and writes them in files that appear complete or not at all.

    Args:
        folder: of the shards; those that are there are counted and kept.
        conversations_per_shard: a file is written as soon as that many wait.

    Attributes:
        written: numbers of the conversations on disk.
        shards, tokens, owned_tokens: how much is on disk.

    Raises:
        UserError: a shard that is there is damaged.
    """

    def __init__(self, folder: Path, conversations_per_shard: int) -> None:
        self._folder = folder
        self._size = conversations_per_shard
        self._waiting: list[StoredConversation] = []
        self.written: set[int] = set()
        self.tokens = self.owned_tokens = self.shards = 0
        for path in sorted(folder.glob("shard-*.npz")):
            self._count(read_shard(path))

    def add(self, conversation: StoredConversation) -> bool:
        """Keep a finished conversation; True when that completed a shard."""
        self._waiting.append(conversation)
        if len(self._waiting) < self._size:
            return False
        self.flush()
        return True

    @property
    def waiting(self) -> int:
        """Conversations that are finished and in no shard yet."""
        return len(self._waiting)

    def flush(self) -> None:
        """Write what is waiting; nothing where nothing is."""
        if not self._waiting:
            return
        path = self._free_path()
        partial = path.with_suffix(".partial")
        arrays = _arrays(self._waiting)
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"{path}: cannot write: {error.strerror or error}", "free space there") from error
        self._count(arrays)
        self._waiting.clear()

    def _free_path(self) -> Path:
        index = 0
        while (path := self._folder / _SHARD.format(index)).exists():
            index += 1
        return path

    def _count(self, shard: Mapping[str, npt.NDArray[Any]]) -> None:
        self.written.update(shard["numbers"].tolist())
        self.tokens += len(shard["owned"])
        self.owned_tokens += int(shard["owned"].sum())
        self.shards += 1


def read_shard(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a shard by name.

    Raises:
        UserError: the file is damaged or lacks an array.
    """
    hint = "remove the file; medusa-distill with the same options writes it again"
    check_archive(path, hint)
    try:
        with np.load(path, allow_pickle=False) as file:
            shard = {name: file[name] for name in ("numbers", "lengths", *StoredConversation._fields[1:])}
    except Exception as error:  # numpy and zip raise their own, for memory that a header asks for too
        raise UserError(f"{path}: damaged, or not a shard: {first_line(error)}", hint) from error
    total = len(shard["tokens"]) if shard["tokens"].ndim == 1 else -1
    shapes = {
        "numbers": shard["lengths"].shape,
        "tokens": (total,),
        "owned": (total,),
        "hidden": (total, *shard["hidden"].shape[1:2]),
        "top_ids": (total, KEPT_TOP),
        "top_logprobs": (total, KEPT_TOP),
    }
    wrong = [name for name, shape in shapes.items() if shard[name].shape != shape]
    wrong += [name for name in ("numbers", "lengths", "tokens", "top_ids") if shard[name].dtype.kind not in "iu"]
    wrong += [name for name in ("hidden", "top_logprobs") if shard[name].dtype.kind != "f"]
    if wrong or shard["owned"].dtype != np.bool_ or shard["hidden"].ndim != 2:
        raise UserError(f"{path}: damaged: {wrong[0] if wrong else 'owned'} has another shape or dtype", hint)
    if not total or shard["lengths"].min() < 1 or shard["lengths"].sum() != total:
        raise UserError(f"{path}: damaged: lengths do not sum to the {counted(total, 'token')}", hint)
    if min(shard["tokens"].min(), shard["top_ids"].min()) < 0 or not np.isfinite(shard["hidden"]).all():
        raise UserError(f"{path}: damaged: a negative token, or hidden states that are not finite", hint)
    return shard


def read_manifest(folder: Path, weights: Sequence[Path]) -> dict[str, Any]:
    """What the shards of a folder were made from.

    Args:
        weights: files of the model that is to be trained on them.

    Raises:
        UserError: there is no manifest, or the hidden states are another model's.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise UserError(f"{folder}: has no {MANIFEST_NAME}", "give a data folder that medusa-distill wrote")
    document = read_json(path, max_bytes=1 << 20, hint="write the data with medusa-distill")
    target = document.get("target_sha256") if isinstance(document, dict) else None
    if not isinstance(target, dict):
        raise UserError(f"{path}: does not say which model the data is of", "write the data with medusa-distill")
    if sorted(map(str, target.values())) != sorted(file_sha256(file) for file in weights):
        raise UserError(f"{path}: the data is of another model: its weights have other hashes", "give that model")
    assert isinstance(document, dict)
    return document


def claim_folder(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Make a data folder that holds, or will hold, shards made from these things and no others.

    Args:
        made_from: JSON values; they go into the manifest, and a folder whose manifest has others is refused.

    Raises:
        UserError: the folder cannot be made, holds other files, or data made from something else.
    """
    path = folder / MANIFEST_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder}: cannot write there: {error.strerror or error}", _OTHER_FOLDER) from error
    if empty:
        write_json(path, dict(made_from), indent=2)
        return
    if not path.exists():
        raise UserError(f"{folder}: holds files, but no {MANIFEST_NAME}", "give an empty output folder")
    document = read_json(path, max_bytes=1 << 20, hint=_OTHER_FOLDER)
    wanted: dict[str, Any] = json.loads(json.dumps(dict(made_from)))  # as it reads when it comes from a file
    if not isinstance(document, dict) or any(document.get(key) != value for key, value in wanted.items()):
        raise UserError(f"{path}: was written with another target or other settings", _OTHER_FOLDER)


def write_manifest(folder: Path, made_from: Mapping[str, Any], writer: ShardWriter) -> None:
    """Write what the shards were made from and how much they hold."""
    counts = {
        "shards": writer.shards,
        "conversations": len(writer.written),
        "tokens": writer.tokens,
        "owned_tokens": writer.owned_tokens,
    }
    assert not counts.keys() & made_from.keys()
    write_json(folder / MANIFEST_NAME, {**made_from, **counts}, indent=2)


def _arrays(conversations: list[StoredConversation]) -> dict[str, npt.NDArray[Any]]:
    names = StoredConversation._fields[1:]
    return {
        "numbers": np.array([conversation.number for conversation in conversations]),
        "lengths": np.array([len(conversation.tokens) for conversation in conversations]),
        **{name: np.concatenate([getattr(part, name) for part in conversations]) for name in names},
    }
