"""A LoRA adapter, as peft saves one, added to the weights of its base model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.loaded_weights import check_finite, check_stored
from medusa_engine.exporter.tensor_file import TensorFiles
from medusa_engine.runtime.errors import UserError

ADAPTER_FILE = "adapter_model.safetensors"
_HINT = "give the adapter of this base model, or train with --merge"
_PREFIX = "base_model.model."  # peft's, before the names of the base


def merge_adapter(model: Any, folder: Path) -> Any:
    """The model with the LoRA adapter of a folder added to its weights: it answers as peft's does unmerged.

    Raises:
        UserError: peft is not installed, or the adapter is damaged, holds values that are no numbers, or is another
            model's.
    """
    file = folder / ADAPTER_FILE
    try:
        import peft
    except ModuleNotFoundError as error:
        raise UserError(
            f"{file}: the package peft, which reads LoRA adapters, is not installed",
            "install it with pip install peft, or train with --merge",
        ) from error
    tensors = TensorFiles([file])
    check_stored(file)
    stored, others = set(tensors.names), _unlike_base(model, tensors)
    try:
        with warnings.catch_warnings():  # of what peft calls in transformers, and of tensors, which are counted here
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(model, str(folder), local_files_only=True)
            own = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
            embeddings = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=True)) - own
            if wrong := (stored - embeddings) ^ own:
                raise ValueError(f"{min(wrong)} is missing or belongs to no layer")
            if wrong := stored & embeddings & others:
                raise ValueError(f"{min(wrong)} is not that of the base")
            _untie(adapted.get_base_model())
            merged = adapted.merge_and_unload()
    except Exception as error:  # peft raises whatever the files made it trip over
        raise UserError(f"{file}: cannot merge the adapter: {first_line(error)}", _HINT) from error
    check_finite(merged, file)
    return merged


def _unlike_base(model: Any, tensors: TensorFiles) -> set[str]:
    """Names of tensors that replace one of the base, and do not have its values.

    peft adds the base's embeddings to an adapter that changes them, in the dtype that it was trained in.
    """
    base = model.state_dict()
    unlike = set()
    for name in tensors.names:
        replaced = base.get(name.removeprefix(_PREFIX).replace(".base_layer.", "."))
        if replaced is None:
            continue
        tensor = tensors[name]
        narrow = min(replaced.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(tensor.to(narrow), replaced.to(narrow)):
            unlike.add(name)
    return unlike


def _untie(model: Any) -> None:
    """Give the projection weights of its own where it shares those of embeddings, and either has an adapter.

    Merged into what both share, what one of them learned would change the other too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(isinstance(layer, BaseTunerLayer) for layer in layers):
        return
    embeddings, projection = (
        layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers
    )
    if projection is not None and projection.weight is embeddings.weight:
        projection.weight = torch.nn.Parameter(projection.weight.detach().clone(), requires_grad=False)
