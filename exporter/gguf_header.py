"""The header of a GGUF file, walked before a library reads it: every count and length fits the file."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from medusa_engine.runtime.errors import UserError

_HINT = "fetch the file again"
MAGIC = b"GGUF"
_MOST_DIMENSIONS = 4  # ggml's
_MOST_NESTED = 4  # arrays of arrays
_DEFAULT_ALIGNMENT = 32

# <gguf.h>: sizes of the scalar types by number, and the two others
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """What a header says of sizes, and its texts.

    Attributes:
        shapes: of every tensor by name, outermost dimension first.
        layers: the model's `block_count`; 0 where it has none.
        texts: fields that are texts, by their whole names.
    """

    shapes: dict[str, tuple[int, ...]]
    layers: int
    texts: dict[str, str]


def check_gguf(path: Path) -> GgufHeader:
    """Refuse a GGUF file whose counts, lengths or tensors reach past its end.

    Raises:
        UserError: names the file and what does not fit.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data).check()
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{path}: damaged, or not a GGUF file: {error}", _HINT) from error


class _Walk:
    """Goes through a file from front to back; ValueError where it ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def check(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version & 0xFFFF or version >> 16} or byte order is not supported")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        alignment, layers, texts = _DEFAULT_ALIGNMENT, 0, dict[str, str]()
        for _ in range(pairs):
            key, kind = self._text(), self._number("<I")
            begin = self._at
            self._skip_value(kind, nested=0)
            if key == b"general.alignment" and kind == 4:
                (alignment,) = struct.unpack_from("<I", self._data, begin)
            if kind == _TEXT:
                texts[key.decode("utf-8", "replace")] = self._data[begin + 8 : self._at].decode("utf-8", "replace")
            if key.endswith(b".block_count") and kind in _SCALAR_BYTES:
                layers = max(layers, int.from_bytes(self._data[begin : self._at], "little"))
        if not alignment or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment}")
        found = [self._tensor() for _ in range(tensors)]
        begin = -(-self._at // alignment) * alignment
        for name, _, end in found:
            if begin + end > len(self._data):
                raise ValueError(f"cut short: tensor {name} ends at byte {begin + end} of {len(self._data)}")
        return GgufHeader({name: shape for name, shape, _ in found}, layers, texts)

    def _tensor(self) -> tuple[str, tuple[int, ...], int]:
        """A tensor's name, its shape, and where its data end behind the header."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text().decode("utf-8", "replace")[:100]
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} of {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return name, shape, offset + math.prod(shape) * size // values

    def _skip_value(self, kind: int, *, nested: int) -> None:
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        elif kind == _TEXT:
            self._text()
        elif kind == _ARRAY and nested < _MOST_NESTED:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SCALAR_BYTES:
                self._skip(count * _SCALAR_BYTES[inner])
                return
            for _ in range(count):  # each takes eight bytes or more
                self._skip_value(inner, nested=nested + 1)
        else:
            raise ValueError(f"a value of type {kind}")

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack(form, self._take(size))[0])

    def _text(self) -> bytes:
        return self._take(self._number("<Q"))

    def _take(self, size: int) -> bytes:
        begin = self._at
        self._skip(size)
        return self._data[begin : self._at]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"cut short at byte {len(self._data)}")
        self._at += size
