"""The files of a checkpoint's weights, looked at from outside before a library reads them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.gguf_header import MAGIC, check_gguf
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.file_place import check_inside
from medusa_engine.runtime.strict_json import read_json, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_INDEX_BYTES = 16 << 20
_LONGEST_NAME = 200  # the system refuses longer ones in every call
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
_MOST_HEADER_BYTES = 1 << 24  # those of the largest models are a tenth of it; the library reads any of 100 MB
_LFS_POINTER = b"version https://git-lfs"
_FETCH_HINT = "fetch the checkpoint again"


def weight_files(folder: Path, *, experts: int = 0) -> list[Path]:
    """The safetensors files of a Hugging Face folder: the one, or the shards that its index names.

    Args:
        folder: of the checkpoint.
        experts: as many as a layer with experts has at least.

    Raises:
        UserError: the index is damaged or names a file outside the folder, maybe by a link; a tensor of an expert is
            missing; otherwise as `check_weights`.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    paths = [single]
    if index.is_file() and not single.is_file():
        paths = [folder / name for name in _shard_names(index)]
        for path in paths:
            check_inside(path)
    for path in paths:
        check_weights(path)
    _check_experts(folder, paths, experts)
    return paths


def check_weights(path: Path) -> None:
    """Look at the header and length of a safetensors or GGUF file, or at the first bytes of another one.

    Raises:
        UserError: the file is missing, empty, cut short, a Git LFS pointer, or not what its name says.
    """
    if not path.is_file():
        raise UserError(f"{path}: the weights are missing", f"{_FETCH_HINT}; weights are read as safetensors or GGUF")
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
        if not start:
            raise UserError(f"{path}: the file is empty", _FETCH_HINT)
        if start == _LFS_POINTER:
            raise UserError(f"{path}: a Git LFS pointer, not the weights", "fetch the weights with git lfs pull")
        if path.suffix == ".gguf":
            if not start.startswith(MAGIC):
                raise UserError(f"{path}: not a GGUF file", _FETCH_HINT)
            check_gguf(path)
        if path.suffix == ".safetensors":
            size = int.from_bytes(start[:8], "little")
            if len(start) >= 8 and size > _MOST_HEADER_BYTES:
                raise UserError(f"{path}: not a safetensors file, or damaged: a header of {size} bytes", _FETCH_HINT)
            with safe_open(path, framework="pt"):
                pass  # opening checks that header and length agree
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot read the weights: {first_line(error)}", _FETCH_HINT) from error


def _check_experts(folder: Path, paths: Sequence[Path], experts: int) -> None:
    """Name a missing tensor of an expert: transformers joins those of all experts, and does not say which it lacks."""
    found: dict[tuple[str, str], set[int]] = {}  # before and behind the expert's number -> the numbers
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for match in filter(None, map(_EXPERT.fullmatch, file.keys())):
                found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    counts: dict[str, int] = {}  # of each layer
    for (before, _), numbers in found.items():
        counts[before] = max(counts.get(before, experts), 1 + max(numbers))
    for (before, behind), numbers in sorted(found.items()):
        if len(numbers) < counts[before]:
            first = next(number for number in itertools.count() if number not in numbers)
            raise UserError(
                f"{folder}: the tensor {before}{first}{behind} is missing", f"{_FETCH_HINT}: weights are never made up"
            )


def _shard_names(index: Path) -> list[str]:
    document = read_json(index, max_bytes=_MAX_INDEX_BYTES, hint=_FETCH_HINT)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f'{index}: "weight_map" names no files', _FETCH_HINT)
    for name in weight_map.values():
        if (
            not isinstance(name, str)
            or len(name) > _LONGEST_NAME
            or not name.endswith(".safetensors")
            or any(mark in name for mark in "/\\\0")
        ):
            raise UserError(f"{index}: {shown(name)} is not the plain name of a safetensors file", _FETCH_HINT)
    return sorted(set(weight_map.values()))
