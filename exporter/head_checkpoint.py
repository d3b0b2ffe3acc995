"""Read Medusa heads from a checkpoint file, strictly: every tensor is known, present and of the right shape.

The original layout, own or shared projections: `{h}.{l}.linear.weight`, `{h}.{l}.linear.bias`, and where head h
has its own projection `{h}.{L}.weight`, L being the number of residual blocks. A `medusa_head.` prefix is allowed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from medusa_engine.exporter.heads import HeadWeights
from medusa_engine.exporter.weight_files import check_weights, first_line
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import shown

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_RESIDUAL = re.compile(r"(?:medusa_head\.)?(\d{1,4})\.(\d{1,4})\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(?:medusa_head\.)?(\d{1,4})\.(\d{1,4})\.weight")


def load_heads(path: Path, *, hidden: int, vocab_size: int) -> HeadWeights:
    """Heads from a `.safetensors` or `.pt` file, or from the folder that holds one, as fp32.

    Args:
        hidden, vocab_size: of the backbone the heads must fit.

    Raises:
        UserError: no heads there, a damaged file, or a tensor that is missing, unknown or misshapen.
    """
    file = _find_file(path)
    tensors = _read_tensors(file)
    residual: dict[tuple[int, int, str], torch.Tensor] = {}
    projection: dict[tuple[int, int], torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UserError(f"{file}: {name} has dtype {tensor.dtype}", "give heads with floating-point weights")
        if not tensor.numel():
            raise UserError(
                f"{file}: {name} has no elements", "save the heads again; under ZeRO-3, gather the parameters first"
            )
        if not torch.isfinite(tensor.float()).all():
            raise UserError(f"{file}: {name} holds NaN or infinity", "train or fetch the heads again")
        if match := _RESIDUAL.fullmatch(name):
            residual[int(match[1]), int(match[2]), match[3]] = tensor.float()
        elif match := _PROJECTION.fullmatch(name):
            projection[int(match[1]), int(match[2])] = tensor.float()
        else:
            raise UserError(f"{file}: {shown(name)} is not a tensor of Medusa heads", "give the heads' own checkpoint")
    if not residual:
        raise UserError(f"{file}: no head weights", "give a Medusa heads checkpoint")
    heads = 1 + max(head for head, _, _ in residual)
    layers = 1 + max(layer for _, layer, _ in residual)

    def take(head: int, layer: int, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = f"{head}.{layer}.linear.{kind}"
        tensor = residual.get((head, layer, kind))
        if tensor is None and kind == "bias":
            return torch.zeros(shape)  # the original trainer can be told to leave biases out
        if tensor is None:
            raise UserError(
                f"{file}: {name} is missing (the file has heads up to {heads - 1}, layers up to {layers - 1})",
                "fetch the heads again",
            )
        return _shaped(file, name, tensor, shape)

    for head, layer in projection:
        if head >= heads or layer != layers:
            raise UserError(f"{file}: {head}.{layer}.weight belongs to no head", "fetch the heads again")
    if projection and len(projection) != heads:
        missing = min(set(range(heads)) - {head for head, _ in projection})
        raise UserError(f"{file}: {missing}.{layers}.weight is missing", "fetch the heads again")
    return HeadWeights(
        residual_weight=torch.stack(
            [torch.stack([take(h, layer, "weight", (hidden, hidden)) for layer in range(layers)]) for h in range(heads)]
        ),
        residual_bias=torch.stack(
            [torch.stack([take(h, layer, "bias", (hidden,)) for layer in range(layers)]) for h in range(heads)]
        ),
        projection=torch.stack(
            [_shaped(file, f"{h}.{layers}.weight", projection[h, layers], (vocab_size, hidden)) for h in range(heads)]
        )
        if projection
        else None,
        trained=True,
        source=file.name,
        files=(file,),
    )


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in _FILES:
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path}: no {' or '.join(_FILES)} in this folder", "give the folder or file of the heads")
    if not path.is_file():
        raise UserError(f"{path}: there are no heads at this path", "give the folder or file of the heads")
    return path


def _read_tensors(file: Path) -> Mapping[str, torch.Tensor]:
    hint = "fetch the heads again, as .safetensors or as a weights-only .pt file"
    check_weights(file)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        with warnings.catch_warnings():  # about pickle protocols, which say nothing to a user
            warnings.simplefilter("ignore")
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise UserError(f"{file}: cannot read the heads: {first_line(error)}", hint) from error
    except Exception as error:  # pickle.UnpicklingError and what a broken archive makes of itself
        raise UserError(f"{file}: not a weights-only checkpoint: {first_line(error)}", hint) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    ):
        raise UserError(f"{file}: does not hold a dictionary of tensors", hint)
    return loaded


def _shaped(file: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{file}: {name} has shape {list(tensor.shape)}, but the base model needs {list(shape)}",
            "give heads that were trained for this base model",
        )
    return tensor
