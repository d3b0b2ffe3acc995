"""Read and write Medusa heads in every known layout, strictly: each tensor is known, present and of its shape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.head_formats import HeadFormat, HeadNames, identify
from medusa_engine.exporter.heads import HeadWeights
from medusa_engine.exporter.tensor_file import TensorFiles
from medusa_engine.exporter.weight_files import weight_files
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json, shown

HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "rank0.safetensors")
ADAPTER_KEY = "medusa_adapter_sha256"  # in the header of a heads file: see HeadWeights.adapter
_SECOND_RANK = "rank1.safetensors"
_MAX_CONFIG_BYTES = 16 << 20
_HINT = "fetch or save the heads again"
_LAYOUT_HINT = "see `medusa-heads inspect` for what the file holds"


@dataclass(frozen=True)
class HeadCheckpoint:
    """What was read.

    Attributes:
        files: the files.
        format: their layout, told by the tensors.
        weights: dtypes as stored.
        dtype: of the weights as stored.
        biases: whether the residual blocks have biases (zeros stand in where they have none).
        base: model that the config names, or None.
        notes: what is odd and does not matter.
    """

    files: tuple[Path, ...]
    format: HeadFormat
    weights: HeadWeights
    dtype: str
    biases: bool
    base: str | None
    notes: tuple[str, ...]

    @property
    def checksum(self) -> str:
        """sha256 over the weights in canonical order: the same for the same heads in any layout and dtype width."""
        digest = hashlib.sha256()
        tensors = (self.weights.residual_weight, self.weights.residual_bias, self.weights.projection)
        for tensor in tensors:
            if tensor is not None:
                digest.update(tensor.float().contiguous().numpy().tobytes())
        if self.weights.token_map is not None:
            digest.update(self.weights.token_map.numpy().tobytes())
        return digest.hexdigest()


def load_heads(path: Path, *, hidden: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> HeadWeights:
    """Heads for a backbone.

    Args:
        path: file, or folder that holds one.
        hidden, vocab_size: of the backbone.
        dtype: of their weights.

    Raises:
        UserError: as `read_checkpoint`, or the heads are of another base model.
    """
    return fit_heads(read_checkpoint(path), hidden=hidden, vocab_size=vocab_size, dtype=dtype)


def fit_heads(
    checkpoint: HeadCheckpoint, *, hidden: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> HeadWeights:
    """Heads that were read, for a backbone; arguments and errors as of `load_heads`."""
    weights, file = checkpoint.weights, checkpoint.files[0]
    hint = "give heads that were trained for this base model"
    if weights.hidden != hidden:
        raise UserError(f"{file}: the heads have hidden size {weights.hidden}, but the base model has {hidden}", hint)
    if weights.token_map is not None:
        if int(weights.token_map.max()) >= vocab_size:
            raise UserError(f"{file}: token_map names tokens past the base model's vocabulary of {vocab_size}", hint)
    elif weights.projection is not None and weights.projection.shape[1] != vocab_size:
        rows = weights.projection.shape[1]
        raise UserError(f"{file}: the heads have a vocabulary of {rows}, but the base model has {vocab_size}", hint)
    return replace(weights.to(dtype), notes=checkpoint.notes)


def read_checkpoint(path: Path) -> HeadCheckpoint:
    """Heads in any known layout, from a file or the folder that holds it.

    Raises:
        UserError: no heads there, a damaged file, or a tensor that is missing, unknown, misshapen or not finite.
    """
    files = find_files(path)
    tensors = TensorFiles(files)
    names = identify(tensors.names)
    if names is None:
        raise UserError(f"{files[0]}: no head weights in any known layout", "give a Medusa heads checkpoint")
    config = _read_config(files[0].parent)
    if names.unknown and not names.format.whole_model:
        raise UserError(f"{files[0]}: {shown(names.unknown[0])} is not a tensor of {names.format.name} heads", _HINT)
    reader = _Reader(files[0], tensors, names)
    weights = reader.weights()
    return HeadCheckpoint(
        files=tuple(files),
        format=names.format,
        weights=replace(weights, source=f"{files[0].name} ({names.format.name})", files=tuple(files)),
        dtype=str(weights.residual_weight.dtype).removeprefix("torch."),
        biases=reader.biases,
        base=config.get("base_model_name_or_path") if isinstance(config.get("base_model_name_or_path"), str) else None,
        notes=tuple(_notes(names, weights, config, biases=reader.biases)),
    )


def write_checkpoint(checkpoint: HeadCheckpoint, layout: HeadFormat, path: Path) -> None:
    """Write heads in another layout as a `.safetensors` file, dtypes kept, complete or not at all.

    Raises:
        UserError: the layout cannot hold these heads.
    """
    weights = checkpoint.weights
    tensors: dict[str, torch.Tensor] = {}
    for head in range(weights.heads):
        for layer in range(weights.layers):
            name = layout.residual.format(h=head, l=layer)
            tensors[f"{name}.weight"] = weights.residual_weight[head, layer]
            if checkpoint.biases:
                tensors[f"{name}.bias"] = weights.residual_bias[head, layer]
    if weights.projection is not None and len(weights.projection) == 1 and layout.common_projection:
        tensors[layout.common_projection] = weights.projection[0]
    elif weights.projection is not None:
        for head in range(weights.heads):
            own = weights.projection[head if len(weights.projection) > 1 else 0]
            tensors[layout.projection.format(h=head, l=weights.layers)] = own
    if weights.token_map is not None:
        if layout.token_map is None:
            raise UserError(
                f"{checkpoint.files[0]}: the {layout.name} layout has no place for a draft vocabulary (token_map)",
                "convert to vllm",
            )
        tensors[layout.token_map] = weights.token_map.to(torch.int32)
    partial = path.with_name(f".{path.name}.partial")
    try:
        metadata = {ADAPTER_KEY: weights.adapter} if weights.adapter else None
        # Not save_file: what it writes only its owner may read
        partial.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot write the heads: {first_line(error)}", "give another place") from error
    finally:
        partial.unlink(missing_ok=True)


def find_files(path: Path) -> list[Path]:
    """The files of a heads checkpoint: the file given, or the heads file or weight shards of a folder."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: there are no heads at this path", "give the folder or file of the heads")
        return [path]
    if (path / _SECOND_RANK).is_file():
        raise UserError(f"{path}: is split over several ranks", "convert the checkpoint with a tensor parallelism of 1")
    for name in HEAD_FILES:
        if (path / name).is_file():
            return [path / name]
    if not list(path.glob("*.safetensors*")):
        raise UserError(f"{path}: no {HEAD_FILES[0]} in this folder", "give the folder or file of the heads")
    return weight_files(path)


class _Reader:
    """Assembles the heads from named tensors; every departure from the layout is an error that names the tensor."""

    def __init__(self, file: Path, tensors: TensorFiles, names: HeadNames) -> None:
        self._file, self._tensors, self._names = file, tensors, names
        self.biases = any(kind == "bias" for _, _, kind in names.residual)

    def weights(self) -> HeadWeights:
        names = self._names
        hidden = self._hidden()
        heads, layers = range(names.heads), range(names.layers)
        # A name alone may ask for millions of blocks: the first that is missing ends it.
        weight = [self._residual(head, layer, "weight", (hidden, hidden)) for head, layer in product(heads, layers)]
        if self.biases:
            bias = [self._residual(head, layer, "bias", (hidden,)) for head, layer in product(heads, layers)]
        else:
            bias = [torch.zeros(hidden, dtype=block.dtype) for block in weight]
        token_map = None if names.token_map is None else self._tensors[names.token_map].to(torch.int64)
        projection = self._projection(hidden)
        if token_map is not None:
            self._check_token_map(token_map, projection)
        return HeadWeights(
            residual_weight=torch.stack(weight).reshape(names.heads, names.layers, hidden, hidden),
            residual_bias=torch.stack(bias).reshape(names.heads, names.layers, hidden),
            projection=projection,
            trained=True,
            source="",
            token_map=token_map,
            adapter=self._tensors.metadata.get(ADAPTER_KEY),
        )

    def _hidden(self) -> int:
        first = next(name for (_, _, kind), name in self._names.residual.items() if kind == "weight")
        tensor = self._floating(first)
        if tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1]:
            raise UserError(f"{self._file}: {first} has shape {list(tensor.shape)}, which is not square", _HINT)
        return tensor.shape[0]

    def _residual(self, head: int, layer: int, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = self._names.residual.get((head, layer, kind))
        if name is None:
            expected = f"{self._names.format.residual.format(h=head, l=layer)}.{kind}"
            counts = f"{counted(self._names.heads, 'head')} of {counted(self._names.layers, 'layer')}"
            raise UserError(f"{self._file}: {expected} is missing (the file has {counts})", _HINT)
        return self._shaped(name, shape)

    def _projection(self, hidden: int) -> torch.Tensor | None:
        names = self._names
        if names.common_projection is not None:
            if names.projection:
                other = next(iter(names.projection.values()))[0]
                raise UserError(f"{self._file}: has both {names.common_projection} and {other}", _HINT)
            return self._shaped(names.common_projection, (None, hidden))[None]
        if not names.projection:
            return None
        rows: list[torch.Tensor] = []
        for head in range(names.heads):
            expected = names.format.projection.format(h=head, l=names.layers)
            name, layer = names.projection.get(head, (None, None))
            if name is None or layer not in (None, names.layers):
                raise UserError(f"{self._file}: {expected} is missing", _HINT)
            rows.append(self._shaped(name, (rows[0].shape[0] if rows else None, hidden)))
        for head, (name, _) in names.projection.items():
            if head >= names.heads:
                raise UserError(f"{self._file}: {name} belongs to no head", _HINT)
        return torch.stack(rows)

    def _check_token_map(self, token_map: torch.Tensor, projection: torch.Tensor | None) -> None:
        name = self._names.token_map
        if token_map.dim() != 1 or not len(token_map) or int(token_map.min()) < 0:
            raise UserError(f"{self._file}: {name} is not a list of token ids", _HINT)
        if len(token_map.unique()) != len(token_map):
            raise UserError(f"{self._file}: {name} names a token twice", _HINT)
        if projection is not None and projection.shape[1] != len(token_map):
            rows = projection.shape[1]
            raise UserError(
                f"{self._file}: {name} has {counted(len(token_map), 'token')}, the projection {counted(rows, 'row')}",
                _HINT,
            )

    def _shaped(self, name: str, shape: tuple[int | None, ...]) -> torch.Tensor:
        tensor = self._floating(name)
        if tensor.dim() != len(shape) or any(
            want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        ):
            wanted = ["V" if size is None else size for size in shape]
            raise UserError(f"{self._file}: {name} has shape {list(tensor.shape)} instead of {wanted}", _HINT)
        return tensor

    def _floating(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise UserError(f"{self._file}: {name} has dtype {tensor.dtype}", "give heads in fp32, fp16 or bf16")
        if not tensor.numel():
            hint = "save the heads again; under ZeRO-3, gather the parameters first"
            raise UserError(f"{self._file}: {name} has no elements", hint)
        if not torch.isfinite(tensor.float()).all():
            raise UserError(f"{self._file}: {name} holds NaN or infinity", "train or fetch the heads again")
        return tensor


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    config = read_json(path, max_bytes=_MAX_CONFIG_BYTES, hint=_HINT) if path.is_file() else {}
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object", _HINT)
    return config


def _notes(names: HeadNames, weights: HeadWeights, config: Mapping[str, Any], *, biases: bool) -> list[str]:
    notes = []
    for key in ("medusa_num_heads", "num_medusa_heads"):
        if key in config and config[key] != weights.heads:
            notes.append(f"config.json says {key} {config[key]}, the file holds {weights.heads}")
    if not biases:
        notes.append("the residual blocks have no biases; taken as 0 (TGI needs them)")
    if weights.projection is None:
        notes.append("no projections: the heads share the base model's LM head")
    if weights.adapter:
        notes.append("trained with a LoRA adapter: not for the base model without it")
    if names.ignored:
        notes.append(f"not needed: {counted(len(names.ignored), 'tensor')}, the first is {names.ignored[0]}")
    return notes
