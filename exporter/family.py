"""Which models can be exported: what config and class tell before any weights are read, and the cache they keep."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.text_decoder import KINDS, text_decoder
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_MORE_THAN_TEXT_HINT = f"give a checkpoint of its text decoder alone; whole ones are read of {', '.join(KINDS)}"
_HINT = "give a decoder-only model whose every layer is attention over a key/value cache, as Llama, Qwen or Gemma"


@dataclass(frozen=True)
class CacheSizes:
    """Of the key/value cache, the same in every layer."""

    layers: int
    kv_heads: int
    head_dim: int


def check_family(path: object, load_options: dict[str, Any]) -> tuple[Any, bool]:
    """Refuse a model whose kind cannot be exported, from its config alone.

    Returns:
        The config of the model to load, and whether that is the text decoder alone of one that reads more than text.

    Args:
        path: what messages name.
        load_options: arguments of transformers' `from_pretrained`.

    Raises:
        UserError: transformers does not read the config, or the model is no decoder over a key/value cache.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(**load_options)
    except Exception as error:  # transformers raises whatever the file made it trip over
        raise UserError(
            f"{path}: cannot load the model's config: {first_line(error)}",
            "give a decoder-only causal LM that this version of transformers knows",
        ) from error
    decoder = text_decoder(config)
    if reason := unsupported(config if decoder is None else decoder):
        hint = _HINT if config.get_text_config() is config else _MORE_THAN_TEXT_HINT
        raise UserError(f"{path}: {config.model_type} models cannot be exported: {reason}", hint)
    return (config, False) if decoder is None else (decoder, True)


def unsupported(config: Any) -> str | None:
    """Why models of a transformers config cannot be exported; None where nothing speaks against it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = type(config)
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model, whose decoder reads an encoder's output"
    if method := _quantization(config):
        return f"its weights are quantized ({method})"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "not a causal language model of text"
    if kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return "an encoder, which reads its text in both directions"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    others = ", ".join(sorted(layers - ATTENTION_LAYERS))
    if getattr(model_class, "_is_stateful", False):
        what = f" ({others})" if others else ""
        return f"it has recurrent layers{what}, whose state cannot go back to an earlier token"
    if others:
        return f"it has layers of {others}, and only {' and '.join(sorted(ATTENTION_LAYERS))} are exported"
    if config.get_text_config() is not config or any(_is_model(part) for part in kind.sub_configs.values()):
        return "it reads more than text, and only models of text alone are exported"
    if not model_class._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return "it counts positions by itself, and the branches of a tree share theirs"
    return None


def _is_model(config_class: Any) -> bool:
    """Whether a part of a config is that of a model in the model, and not settings of its attention."""
    from transformers import CONFIG_MAPPING, AutoConfig

    return config_class is AutoConfig or config_class.model_type in CONFIG_MAPPING


def _quantization(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    return str(settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings.quant_method)


@torch.no_grad()
def cache_sizes(model: Any) -> CacheSizes:
    """Sizes of the cache that transformers keeps for a model, from a pass over one token.

    Raises:
        UserError: the layers keep caches of different sizes, or not each keeps one.
    """
    name = type(model).__name__
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        cache = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
    finally:
        model.set_attn_implementation(attention)
    kept = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]
    layers = model.config.get_text_config().num_hidden_layers
    if len(kept) != layers:
        raise UserError(f"{name}: {len(kept)} of {counted(layers, 'layer')} keep keys and values of their own", _HINT)
    sizes = sorted({shape for pair in kept for shape in pair})
    if len(sizes) > 1:
        raise UserError(f"{name}: keys and values have different shapes: {sizes[0]}, {sizes[1]}", _HINT)
    _, kv_heads, _, head_dim = sizes[0]
    return CacheSizes(layers, kv_heads, head_dim)
