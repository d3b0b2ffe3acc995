"""Values of a GGUF file's fields, each of the kind that its reader expects."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

_HINT = "fetch the file again, or convert the model anew"
FOLDER_HINT = "give the model's Hugging Face folder, whose config.json says how it computes"


class GGUFFields:
    """The fields of a file's architecture, by their names behind it.

    Attributes:
        path: of the file.
        architecture: as the file calls it.
        tensors: of the file by name, as `gguf.GGUFReader` gives them.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        self._reader = GGUFReader(path)
        self.architecture = str(self._reader.fields["general.architecture"].contents())
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def names(self) -> list[str]:
        """Of all fields, in the file's order."""
        begin = f"{self.architecture}."
        return [key.removeprefix(begin) for key in self._reader.fields if key.startswith(begin)]

    def key(self, name: str) -> str:
        """A field's whole name."""
        return f"{self.architecture}.{name}"

    def text(self, name: str) -> str | None:
        """Raises: UserError: it is something else than text."""
        value = self._contents(name)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{self._said(name, value)}, not text", _HINT)
        return value

    def number(self, name: str) -> float | None:
        """A number, or what is the same for all layers where the file gives one for each; True counts as 1.

        Raises:
            UserError: it is not a finite number, or not the same for all layers.
        """
        value = self._contents(name)
        each = value if isinstance(value, list) else [value]
        if value is None or not each:
            return None
        for one in each:
            if not isinstance(one, int | float) or not math.isfinite(one):
                raise UserError(f"{self._said(name, one)}, not a finite number", _HINT)
        if len(set(each)) > 1:
            raise UserError(f"{self.path}: {self.key(name)} differs from layer to layer", FOLDER_HINT)
        return each[0]

    def positive(self, name: str) -> float | None:
        """A number above 0; errors as in `number`, or where it is not."""
        value = self.number(name)
        if value is not None and value <= 0:
            raise UserError(f"{self._said(name, value)}, not a number above 0", _HINT)
        return value

    def flags(self, name: str) -> list[bool] | int | None:
        """One for each layer, or a number of layers."""
        value = self._contents(name)
        if isinstance(value, list) and all(isinstance(one, int) for one in value):
            return [bool(one) for one in value]
        if value is not None and not (isinstance(value, int) and value >= 0):
            raise UserError(f"{self._said(name, value)}, not a number of layers", _HINT)
        return value

    def refuse_missing(self, name: str) -> NoReturn:
        """Raises: UserError: always."""
        raise UserError(f"{self.path}: {self.key(name)} is missing", _HINT)

    def refuse_other(self, name: str, value: object, config: object) -> NoReturn:
        """Raises: UserError: always."""
        kind = type(config).__name__
        raise UserError(f"{self._said(name, value)}, which a {kind} of transformers cannot say", FOLDER_HINT)

    def _said(self, name: str, value: object) -> str:
        return f"{self.path}: {self.key(name)} is {shown(value)}"

    def _contents(self, name: str) -> Any:
        field = self._reader.fields.get(self.key(name))
        return None if field is None else field.contents()
