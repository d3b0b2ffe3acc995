"""GGUF files of tiny models of several families, under the names that the gguf package has for their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Value = int | float | str | list[int] | None

_EPSILONS = {"starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps"}  # others: RMS
_OFFSET_NORMS = ("gemma2", "gemma3", "nemotron")  # stored with 1 added


def save_family_gguf(
    path: Path,
    model: Any,
    architecture: str,
    fields: dict[str, Value] | None = None,
    *,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a transformers model in F32.

    Args:
        architecture: as GGUF files call it.
        fields: beside or instead of the usual ones, by their names behind the architecture; None leaves one out.
        extra: further tensors.
    """
    import gguf

    config = model.config
    layers = config.num_hidden_layers
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    epsilon = _EPSILONS.get(architecture)
    norm = "layer_norm_epsilon" if epsilon else "layer_norm_rms_epsilon"
    usual = {"block_count": layers, f"attention.{norm}": getattr(config, epsilon or "rms_norm_eps")}
    for name, value in (usual | (fields or {})).items():
        if value is not None:
            _add(writer, f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    writer.add_pad_token_id(0)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part, suffix = name.rsplit(".", 1)
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part.split(".")[-1])
        if architecture == "llama" and heads is not None:
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture in _OFFSET_NORMS and suffix == "weight" and part.endswith("norm"):
            values = values + 1
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            writer.add_tensor(f"blk.{part.split('.')[2]}.ffn_gate_exps.weight", np.ascontiguousarray(gate))
            writer.add_tensor(f"blk.{part.split('.')[2]}.ffn_up_exps.weight", np.ascontiguousarray(up))
        elif name.endswith("experts.down_proj"):
            writer.add_tensor(f"{names.get_name(name)}.weight", values)
        else:
            writer.add_tensor(f"{names.get_name(part)}.{suffix}", values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: int | float | str | list[int]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
