"""The scaling of a GGUF file's rope, which transformers leaves out when it loads one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from medusa_engine.runtime.errors import UserError

_FACTORS = "rope_freqs.weight"  # llama.cpp writes what "llama3" makes of the frequencies as one divisor for each
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_HINT = "give the model's Hugging Face folder, whose config.json says how its rope is scaled"


def scale_rope(model: Any, path: Path) -> None:
    """Divide a loaded model's rope frequencies as its GGUF file says; in place.

    Raises:
        UserError: the file asks for a scaling that is not a division of the frequencies.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture = _text(reader, "general.architecture")
    scaling = _text(reader, f"{architecture}.rope.scaling.type") or "none"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if scaling not in ("none", "linear") or any(name in tensors for name in _LONGROPE):
        what = "longrope" if scaling in ("none", "linear") else scaling
        raise UserError(f"{path}: its rope is scaled ({what}), which is not read from GGUF files", _HINT)
    divisor = torch.ones(())
    if scaling == "linear":
        divisor = divisor * float(reader.fields[f"{architecture}.rope.scaling.factor"].contents())
    if _FACTORS in tensors:
        divisor = divisor * torch.from_numpy(tensors[_FACTORS].data.copy()).float()
    if bool((divisor == 1).all()):
        return
    ropes = [module for module in model.modules() if hasattr(module, "rope_type")]
    for rope in ropes:
        if rope.rope_type != "default" or (divisor.dim() and divisor.shape != rope.inv_freq.shape):
            raise UserError(f"{path}: its rope is scaled, and {type(model).__name__} rotates otherwise", _HINT)
        rope.inv_freq.div_(divisor)


def _text(reader: Any, key: str) -> str | None:
    field = reader.fields.get(key)
    return None if field is None else str(field.contents())
