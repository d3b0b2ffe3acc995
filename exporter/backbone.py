"""Which backbone heads belong to: the base model, or one that was trained together with them (Medusa-2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from medusa_engine.exporter.adapter import ADAPTER_FILE
from medusa_engine.exporter.head_formats import identify
from medusa_engine.exporter.heads import HeadWeights
from medusa_engine.exporter.tensor_file import TensorFiles
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import file_sha256

_HINT = "give the folder of the heads as --model, without --heads: with it comes the backbone they belong to"


def check_backbone(heads: HeadWeights, files: Sequence[Path]) -> None:
    """Refuse heads that were trained with another backbone than this.

    Heads beside an adapter carry its sha256. Heads among the weights of a whole model belong to those.

    Args:
        files: of the backbone's weights; that of an adapter merged into it is the last. None where it is not known.

    Raises:
        UserError: it is another one.
    """
    if heads.adapter is not None:
        if not files or files[-1].name != ADAPTER_FILE:
            raise UserError(
                f"{heads.files[0]}: the heads belong to a backbone that a LoRA adapter changed, not to its base", _HINT
            )
        if file_sha256(files[-1]) != heads.adapter:
            raise UserError(f"{heads.files[0]}: the heads belong to another adapter than {files[-1]}", _HINT)
        return
    own = _backbone_tensors(heads.files)
    if not own or [file.resolve() for file in files] == [file.resolve() for file in heads.files]:
        return
    if not files:
        hint = "name the base model with --base if it is the same, or export the whole model with medusa-export"
        raise UserError(f"{heads.files[0]}: holds a whole model, and the heads belong to its backbone", hint)
    if any(file.suffix != ".safetensors" for file in files) or _differ(heads.files, own, files):
        raise UserError(
            f"{heads.files[0]}: the heads belong to the backbone in the same file, not to {files[0]}", _HINT
        )


def _backbone_tensors(files: Sequence[Path]) -> list[str]:
    """Names of the tensors in files of heads that are of a whole model and no part of a head."""
    names = identify(TensorFiles(files).names) if files else None
    return names.unknown if names is not None and names.format.whole_model else []


def _differ(files: Sequence[Path], names: Sequence[str], base: Sequence[Path]) -> bool:
    """Whether two checkpoints have other tensors, or other values up to the rounding of the narrower dtype."""
    tensors, others = TensorFiles(files), TensorFiles(base)
    if set(names) != set(others.names):
        return True
    for name in names:
        tensor, other = tensors[name], others[name]
        narrow = min(tensor.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(tensor.to(narrow), other.to(narrow)):
            return True
    return False
