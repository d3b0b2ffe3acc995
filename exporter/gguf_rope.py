"""The rope of a model that was loaded from a GGUF file: what the file says, of which transformers leaves some out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from medusa_engine.exporter.gguf_config import ROPE_BASE
from medusa_engine.exporter.gguf_fields import FOLDER_HINT, GGUFFields
from medusa_engine.runtime.errors import UserError

FACTORS = "rope_freqs.weight"  # llama.cpp writes what "llama3" makes of the frequencies as one divisor for each
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_UNSCALED_IN_WINDOWS = ("gemma3",)  # layers with a window keep their frequencies
_WINDOWED = "sliding_attention"


def scale_rope(model: Any, fields: GGUFFields) -> None:
    """Divide a loaded model's rope frequencies as its GGUF file says; in place.

    Raises:
        UserError: the file asks for a scaling that is not a division of the frequencies, or for another base or width
            than the model's; or the fields that say so are damaged.
    """
    divisor = _divisor(fields)
    for layers, frequencies in _frequencies(model, fields):
        _check_frequencies(model, fields, layers, frequencies)
        if divisor.dim() and divisor.shape != frequencies.shape:
            raise UserError(
                f"{fields.path}: {FACTORS} has shape {list(divisor.shape)}, not {list(frequencies.shape)}", FOLDER_HINT
            )
        if layers != _WINDOWED:
            frequencies.div_(divisor)
        elif fields.architecture not in _UNSCALED_IN_WINDOWS and bool((divisor != 1).any()):
            _refuse_scaled(model, fields)


def _divisor(fields: GGUFFields) -> torch.Tensor:
    """One number, or one for each frequency."""
    kind = fields.text("rope.scaling.type")
    if kind not in (None, "none", "linear") or any(name in fields.tensors for name in _LONGROPE):
        what = "longrope" if kind in (None, "none", "linear") else kind
        raise UserError(f"{fields.path}: its rope is scaled ({what}), which is not read from GGUF files", FOLDER_HINT)
    factor = fields.positive("rope.scaling.factor")
    if factor is None:
        factor = fields.positive("rope.scale_linear")  # its former name
    if kind == "linear" and factor is None:
        fields.refuse_missing("rope.scaling.factor")
    divisor = torch.tensor(1.0 if kind == "none" or factor is None else factor)  # a factor without a type is linear
    if FACTORS in fields.tensors:
        from gguf import dequantize

        tensor = fields.tensors[FACTORS]
        factors = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise UserError(
                f"{fields.path}: {FACTORS} holds something else than numbers above 0", "fetch the file again"
            )
        divisor = divisor * factors
    return divisor


def _frequencies(model: Any, fields: GGUFFields) -> Iterator[tuple[str, torch.Tensor]]:
    """Of each rope in a model: the type of the layers that share it, or "", and its frequencies."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        for layers, kind in (kinds if isinstance(kinds, dict) else {"": kinds}).items():
            if kind != "default":
                _refuse_scaled(model, fields)
            yield layers, getattr(module, f"{layers}_inv_freq" if layers else "inv_freq")


def _refuse_scaled(model: Any, fields: GGUFFields) -> NoReturn:
    raise UserError(f"{fields.path}: its rope is scaled, and {type(model).__name__} rotates otherwise", FOLDER_HINT)


def _check_frequencies(model: Any, fields: GGUFFields, layers: str, frequencies: torch.Tensor) -> None:
    base = fields.positive("rope.freq_base") or ROPE_BASE
    if layers == _WINDOWED:
        base = fields.positive("rope.freq_base_swa") or ROPE_BASE
    width = int(fields.positive("rope.dimension_count") or 2 * frequencies.numel())
    expected = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if expected.shape != frequencies.shape or not torch.allclose(expected, frequencies.double(), rtol=1e-4, atol=0):
        name = type(model).__name__
        raise UserError(
            f"{fields.path}: its rope has base {base:g} over {width} values, and {name} rotates otherwise", FOLDER_HINT
        )
