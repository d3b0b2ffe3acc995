"""What a GGUF file says of a model's arithmetic, put into the config that transformers made of less of it.

transformers reads some fields for each architecture and takes its own defaults for the others. Here each field that
changes the arithmetic is set where the config has a place for it, or refused. What llama.cpp takes for a field that is
not there is what the file means: https://github.com/ggml-org/llama.cpp, src/llama-model.cpp
"""

from __future__ import annotations

import sys
from typing import Any

from medusa_engine.exporter.gguf_fields import FOLDER_HINT, GGUFFields
from medusa_engine.runtime.errors import UserError

ROPE_BASE = 10000.0  # where the file names none

# field: where a config keeps it, the first that there is, and values that change nothing where it keeps none
_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "attention.head_count": (("num_attention_heads",), ()),
    "attn_logit_softcapping": (("attn_logit_softcapping",), (0,)),
    "final_logit_softcapping": (("final_logit_softcapping",), (0,)),
    "expert_count": (("num_experts", "num_local_experts"), (0,)),
    "expert_used_count": (("num_experts_per_tok",), (0,)),
    "expert_weights_norm": (("norm_topk_prob",), (0,)),
    "expert_weights_scale": (("routed_scaling_factor",), (0, 1)),
    "expert_gating_func": ((), (0, 1)),  # 1: softmax
    "expert_group_count": ((), (0, 1)),
    "expert_group_used_count": ((), (0, 1)),
    "router_logit_softcapping": ((), (0,)),
    "swiglu_clamp_exp": ((), (0,)),
    "swiglu_clamp_shexp": ((), (0,)),
    "activation_sparsity_scale": ((), (0,)),
    "embedding_scale": ((), (0, 1)),
    "residual_scale": ((), (0, 1)),
    "logit_scale": ((), (0, 1)),
    "attention.scale": ((), (0,)),
    "attention.output_scale": ((), (0,)),
    "attention.temperature_length": ((), (0,)),
    "attention.temperature_scale": ((), (0,)),
    "attention.max_alibi_bias": ((), (0,)),
    "attention.clamp_kqv": ((), (0,)),
    "attention.causal": ((), (1,)),
    "attention.shared_kv_layers": ((), (0,)),
    "rope.scaling.attn_factor": ((), (1,)),
    "rope.scaling.alpha": ((), (0,)),
}
_WIDTHS = {  # of tensors: a wrong one fits none
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_EPSILONS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
_BIASES = {"attention_bias": "attn_q", "qkv_bias": "attn_q", "use_bias": "attn_q", "mlp_bias": "ffn_up"}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_READ_APART = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    *("attention.sliding_window", "attention.sliding_window_pattern"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
)
_HARMLESS = (
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),  # the tensors' sizes
    *("leading_dense_block_count", "interleave_moe_layer_step", "moe_every_n_layers", "expert_shared_count"),
    *("nextn_predict_layers", "use_parallel_residual"),  # likewise, by the tensors that there are
    *("tensor_data_layout", "pooling_type", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
_YARN = "rope.scaling.yarn_"  # with another scaling they say nothing
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA_2_WINDOW = 4096


def complete_config(config: Any, fields: GGUFFields) -> None:
    """Put all that a GGUF file says into the config that transformers read of it; other fields are noted on stderr.

    Raises:
        UserError: names the file and a field that is damaged, or that transformers' model cannot follow.
    """
    for name, (attributes, neutral) in _SETTINGS.items():
        _set(config, fields, name, attributes, neutral)
    for name, attribute in _WIDTHS.items():
        if (width := fields.positive(name)) is not None and hasattr(config, attribute):
            setattr(config, attribute, int(width))
    for attribute, tensor in _BIASES.items():
        if hasattr(config, attribute):
            setattr(config, attribute, f"blk.0.{tensor}.bias" in fields.tensors)
    _set_heads(config, fields)
    _set_epsilon(config, fields)
    _set_window(config, fields)
    _set_rope(config, fields)
    known = {*_SETTINGS, *_WIDTHS, *_READ_APART, *_HARMLESS}
    if others := [fields.key(name) for name in fields.names if name not in known and not name.startswith(_YARN)]:
        print(f"note: {fields.path}: fields that are not known here are left out: {', '.join(others)}", file=sys.stderr)


def _set(config: Any, fields: GGUFFields, name: str, attributes: tuple[str, ...], neutral: tuple[float, ...]) -> None:
    value = fields.number(name)
    if value is None or (name == "expert_gating_func" and hasattr(config, "scoring_func")):  # which transformers reads
        return
    for attribute in attributes:
        if hasattr(config, attribute):
            kind = type(getattr(config, attribute))
            setattr(config, attribute, (float(value) or None) if name in _SOFTCAPS else _as(kind, value))
            return
    if value not in neutral:
        fields.refuse_other(name, value, config)


def _as(kind: type, value: float) -> float:
    return kind(value) if kind in (bool, int, float) else value


def _set_heads(config: Any, fields: GGUFFields) -> None:
    heads = config.num_attention_heads
    kv_heads = int(fields.positive("attention.head_count_kv") or heads)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = kv_heads
    elif kv_heads != heads:
        fields.refuse_other("attention.head_count_kv", kv_heads, config)
    size = _head_size(config, fields)
    if (values := fields.positive("attention.value_length")) is not None and values != size:
        fields.refuse_other("attention.value_length", values, config)
    if hasattr(config, "global_head_dim"):  # the smaller heads of the other layers have a field of their own
        config.global_head_dim = size
    elif hasattr(config, "head_dim"):
        config.head_dim = size
    elif size != config.hidden_size // heads:
        fields.refuse_other("attention.key_length", size, config)
    if fields.architecture in _GEMMA_27B_LAYERS:  # no field tells, and llama.cpp goes by the number of layers
        large = config.num_hidden_layers == _GEMMA_27B_LAYERS[fields.architecture]
        config.query_pre_attn_scalar = config.hidden_size // heads if large else size


def _head_size(config: Any, fields: GGUFFields) -> int:
    size = fields.positive("attention.key_length")
    if size is None and fields.architecture == "llama":  # which rotates whole heads
        size = fields.positive("rope.dimension_count")
    return int(size or config.hidden_size // config.num_attention_heads)


def _set_epsilon(config: Any, fields: GGUFFields) -> None:
    attribute = next((name for name in _EPSILONS if hasattr(config, name)), None)
    keys = ["attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"]
    if attribute == _EPSILONS[0]:
        keys.reverse()
    found = [value for key in keys if (value := fields.positive(key)) is not None]
    if not found:
        fields.refuse_missing(keys[0])
    if attribute is None:
        fields.refuse_other(keys[0], found[0], config)
    setattr(config, attribute, float(found[0]))


def _set_window(config: Any, fields: GGUFFields) -> None:
    name = "attention.sliding_window"
    window = int(fields.number(name) or (_GEMMA_2_WINDOW if fields.architecture == "gemma2" else 0))
    flags = _windowed(config, fields)
    applies = window > 0 and (flags is None or any(flags))
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        if flags is not None:
            config.layer_types = ["sliding_attention" if flag else "full_attention" for flag in flags]
        if "sliding_attention" in config.layer_types:
            if window <= 0:
                fields.refuse_other(name, window, config)
            config.sliding_window = window
        elif applies and window < config.max_position_embeddings:
            fields.refuse_other(name, window, config)
    elif applies and flags is not None and not all(flags):
        fields.refuse_other("attention.sliding_window_pattern", flags, config)
    elif hasattr(config, "sliding_window"):
        config.sliding_window = window if applies else None
    elif applies and window < config.max_position_embeddings:
        fields.refuse_other(name, window, config)


def _windowed(config: Any, fields: GGUFFields) -> list[bool] | None:
    """Which layers have the window, where the file says so: each but every n-th, or those named."""
    pattern = fields.flags("attention.sliding_window_pattern")
    layers = config.num_hidden_layers
    if isinstance(pattern, list) and len(pattern) != layers:
        fields.refuse_other("attention.sliding_window_pattern", pattern, config)
    if pattern is None or isinstance(pattern, list):
        return pattern
    return [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]


def _set_rope(config: Any, fields: GGUFFields) -> None:
    """Base and width; whether the model follows is seen in its frequencies when it is loaded."""
    rope = getattr(config, "rope_parameters", None)
    base = float(fields.positive("rope.freq_base") or ROPE_BASE)
    local = fields.positive("rope.freq_base_swa")
    size = _head_size(config, fields)
    rotated = int(fields.positive("rope.dimension_count") or size)
    if not rope:
        return
    if rotated > size or rotated % 2:
        raise UserError(f"{fields.path}: its rope turns {rotated} values of heads of {size}", FOLDER_HINT)
    if not isinstance(rope.get("full_attention"), dict):
        if local not in (None, base):
            fields.refuse_other("rope.freq_base_swa", local, config)
        rope["rope_theta"] = base
        if "partial_rotary_factor" in rope or rotated != size:
            rope["partial_rotary_factor"] = rotated / size
        return
    rope["full_attention"]["rope_theta"] = base
    if "sliding_attention" in rope:
        rope["sliding_attention"]["rope_theta"] = float(local or ROPE_BASE)
