"""Read tensors from files that a user got from somewhere: nothing in them is executed, nothing is taken on trust."""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.gguf_header import MAGIC
from medusa_engine.exporter.weight_files import check_weights
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

_HINT = "fetch the file again, as .safetensors or as a weights-only .pt file"
_WEB_PAGE = b"<"
_SNIFFED_BYTES = 64


class TensorFiles:
    """The tensors of one or more `.safetensors` or `.pt` files, read one by one when asked for.

    Args:
        paths: the files; a name may stand in one of them only.

    Attributes:
        names: of all tensors, in file order.
        metadata: what the headers of `.safetensors` files say beside the tensors.

    Raises:
        UserError: a file is damaged, is not such a file, or would have to execute code.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._read: dict[str, Callable[[str], torch.Tensor]] = {}
        self.metadata: dict[str, str] = {}
        for path in paths:
            names, read, metadata = _open(path)
            self.metadata |= metadata
            for name in names:
                if name in self._read:
                    raise UserError(f"{path}: {shown(name)} stands in another file too", _HINT)
                self._read[name] = read

    @property
    def names(self) -> list[str]:
        return list(self._read)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor as stored, dtype included."""
        return self._read[name](name)


_Opened = tuple[Iterable[str], Callable[[str], torch.Tensor], dict[str, str]]


def _open(path: Path) -> _Opened:
    check_weights(path)
    with path.open("rb") as file:
        start = file.read(_SNIFFED_BYTES)
    if start.lstrip().startswith(_WEB_PAGE):
        raise UserError(f"{path}: a web page, not a checkpoint", "download the file itself")
    if start.startswith(MAGIC):
        hint = "give the .safetensors or .pt file of the heads; a GGUF model is for --model"
        raise UserError(f"{path}: a GGUF file, which holds no heads", hint)
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path) -> _Opened:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot read the tensors: {first_line(error)}", _HINT) from error
    return file.keys(), file.get_tensor, file.metadata() or {}


def _open_torch(path: Path) -> _Opened:
    check_archive(path, _HINT)
    try:
        with warnings.catch_warnings():  # about pickles of older Python versions
            warnings.simplefilter("ignore")
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise their own
        # torch's own text advises to load such a file anyway.
        raise UserError(
            f"{path}: not a weights-only checkpoint: damaged, or holds other objects than tensors", _HINT
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    ):
        raise UserError(f"{path}: does not hold a dictionary of tensors", _HINT)
    for name, tensor in loaded.items():
        _check_stored(path, name, tensor)
    return loaded, loaded.__getitem__, {}


def _check_stored(path: Path, name: str, tensor: torch.Tensor) -> None:
    """A tensor may claim to be of any size where its elements are not all in the file, and cannot be computed with."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = tensor.device.type if tensor.device.type != "cpu" else str(tensor.layout).removeprefix("torch.")
        raise UserError(f"{path}: {shown(name)} is a {kind} tensor", "save the heads as ordinary tensors")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        shape = list(tensor.shape)
        raise UserError(f"{path}: {shown(name)} has shape {shape}, but not as many elements in the file", _HINT)


def check_archive(path: Path, hint: str) -> None:
    """Refuse a zip archive that would not be as large unpacked as it is: torch and numpy do not compress theirs.

    Raises:
        UserError: names the file; a file that is no archive is fine.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            compressed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
        raise UserError(f"{path}: a damaged archive: {first_line(error)}", hint) from error
    if compressed:
        raise UserError(f"{path}: entry {shown(compressed[0])} is compressed, as no file of weights or data is", hint)
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise UserError(f"{path}: a damaged archive: its entries lie over one another", hint)
