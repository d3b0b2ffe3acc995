"""The sizes of a config, held against the headers of the weights before a library makes room for what they ask for."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from medusa_engine.exporter.gguf_header import check_gguf
from medusa_engine.exporter.text_decoder import decoder_name
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import MOST_LAYERS
from medusa_engine.runtime.strict_json import shown

_HINT = "fetch config and weights again: they are not of one model"
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")  # the first number in a tensor's name; one of an expert comes behind it
_MOST_GROWTH = 2  # weights that are tied or joined differ by less; what is missing altogether is named once loaded


def check_layer_limit(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse more layers than any bundle has: transformers would go through them to read the config alone.

    Args:
        path: what messages name.
        config: as stored.

    Raises:
        UserError: names the number.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for name in {"num_hidden_layers", _layers_name(part.get("model_type"))}:
            layers = part.get(name)
            if type(layers) is int and layers > MOST_LAYERS:
                raise UserError(
                    f"{path}: {name} is {shown(layers)}, more layers than a bundle can have",
                    f"give a model of at most {MOST_LAYERS} layers",
                )


def _layers_name(model_type: object) -> str:
    from transformers import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return "num_hidden_layers"
    return str(CONFIG_MAPPING[model_type].attribute_map.get("num_hidden_layers", "num_hidden_layers"))


def check_positions(path: Path, config: Any) -> None:
    """Refuse a config that allows no positions; one without a number of them is fine.

    Raises:
        UserError: names the number.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and (type(positions) is not int or positions < 1):
        raise UserError(
            f"{path}: max_position_embeddings is {shown(positions)}", "correct the config: a whole number above 0"
        )


def check_sizes(path: Path, config: Any, files: Sequence[Path], attention: str) -> None:
    """Refuse a config that asks for other layers than the weights are of, or for far more numbers than they are.

    Args:
        path: what messages name.
        config: of transformers, of the model to load.
        files: the weights, whose headers have been checked.
        attention: transformers' name of the attention that the model is loaded with.

    Raises:
        UserError: names the tensor, where one differs.
    """
    from transformers import AutoModelForCausalLM

    stored = _shapes(files)
    held = len({found[1] for name in stored if (found := _LAYER.search(name))})
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > held:
        raise UserError(f"{path}: the config asks for {counted(layers, 'layer')}, and the weights are of {held}", _HINT)
    with torch.device("meta"):  # shapes alone
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, trust_remote_code=False
        )
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    numbers, most = (sum(map(math.prod, shapes.values())) for shapes in (needed, stored))
    if numbers <= _MOST_GROWTH * most:
        return
    known = {decoder_name(name): shape for name, shape in stored.items()} | stored
    for name, shape in needed.items():
        found = known.get(name, shape)
        if math.prod(shape) > math.prod(found):
            raise UserError(f"{path}: {name} has shape {list(found)}, but config.json asks for {list(shape)}", _HINT)
    raise UserError(f"{path}: the config asks for {numbers} numbers, and the weights are {most}", _HINT)


def _shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, as the headers have them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if file.suffix == ".gguf":
            shapes |= check_gguf(file).shapes
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes
