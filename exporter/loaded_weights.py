"""The weights of a model as they came out of its files: numbers, and as wide as they claim to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from medusa_engine.exporter.text_decoder import decoder_name
from medusa_engine.runtime.errors import UserError

_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPE_HINT = "give weights in fp32, fp16 or bf16"
_FINITE_HINT = "fetch or train the checkpoint again"


def check_parameters(model: Any, files: Sequence[Path]) -> None:
    """Refuse parameters that were stored as something else than floating-point numbers, or that are not finite.

    Args:
        model: of transformers, loaded.
        files: what it was loaded from.

    Raises:
        UserError: names the file and the tensor.
    """
    names = dict(model.named_parameters())
    for file in files:
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                dtype = tensors.get_slice(name).get_dtype()
                used = {name, f"{model.base_model_prefix}.{name}", decoder_name(name)}
                if dtype not in _FLOATS and not used.isdisjoint(names):
                    raise UserError(f"{file}: {name} has dtype {dtype}", _DTYPE_HINT)
    check_finite(model, files[0])


def check_finite(model: Any, file: Path) -> None:
    """Refuse a model with parameters that are not finite.

    Raises:
        UserError: names the parameter, and the file it came of.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"{file}: {name} holds NaN or infinity", _FINITE_HINT)


def check_stored(file: Path) -> None:
    """Refuse a safetensors file with a tensor of something else than floating-point numbers, or of any not finite.

    Raises:
        UserError: names the file and the tensor.
    """
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dictionary
            dtype = tensors.get_slice(name).get_dtype()
            if dtype not in _FLOATS:
                raise UserError(f"{file}: {name} has dtype {dtype}", _DTYPE_HINT)
            if not torch.isfinite(tensors.get_tensor(name)).all():
                raise UserError(f"{file}: {name} holds NaN or infinity", _FINITE_HINT)
