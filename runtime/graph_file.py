"""A graph file of a bundle, looked at before ONNX Runtime reads it: where it says its weights lie.

ONNX Runtime has rules of its own about that, which differ from version to version, and know nothing of a manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

_HINT = "export the model again with medusa-export (--force replaces a bundle)"
_MOST_BYTES = 1 << 30  # the weights lie in another file

# <onnx.proto>: the fields of each message that lead to a tensor, and to what kind of message
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_KEY, _VALUE = 1, 2  # of an entry of `external_data`

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MOST_VARINT_BYTES = 10


def check_external_data(path: Path, weights_name: str) -> None:
    """Refuse a graph that would read another file than the bundle's weights.

    Args:
        path: the ONNX file.
        weights_name: the one file that tensors may lie in, beside the graph.

    Raises:
        UserError: not an ONNX file, or one that names another place; names both.
    """
    try:
        data = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}", "check the file") from error
    try:
        if not data:
            raise ValueError("empty, or too large for a graph")
        for location in _locations(memoryview(data)):
            if location != weights_name:
                raise UserError(f"{path}: its weights lie in {shown(location)}, not in {weights_name}", _HINT)
    except ValueError as error:
        raise UserError(f"{path}: damaged, or not an ONNX graph", _HINT) from error


def _locations(data: memoryview) -> Iterator[str]:
    """Every place outside the file that a tensor names.

    Raises:
        ValueError: not a protobuf message.
    """
    waiting = [("model", data)]
    while waiting:
        kind, message = waiting.pop()
        if kind == "entry":
            entry = {number: bytes(value).decode("utf-8") for number, value in _submessages(message)}
            if entry.get(_KEY) == "location":
                yield entry.get(_VALUE, "")
            continue
        fields = _FIELDS[kind]
        waiting.extend((fields[number], value) for number, value in _submessages(message) if number in fields)


def _submessages(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and bytes of each field that holds bytes: a message, a text or packed numbers."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, position = _varint(message, position)
            continue
        if wire_type == _BYTES:
            size, position = _varint(message, position)
        elif wire_type in _FIXED_SIZES:
            size = _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"wire type {wire_type}")
        if size > len(message) - position:
            raise ValueError("cut short")
        if wire_type == _BYTES:
            yield number, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """The number at a position, and the position behind it."""
    value = 0
    for index in range(_MOST_VARINT_BYTES):
        if position + index >= len(message):
            raise ValueError("cut short")
        byte = message[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("a number without end")
