"""GGUF files of a tiny Llama, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy.typing as npt
from checkpoints import TOKENIZERS

Array = npt.NDArray[Any]

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def save_gguf(
    path: Path,
    model: Any,
    quantization: str,
    *,
    rope: dict[str, str | float] | None = None,
    extra: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Write a transformers Llama as GGUF, with the byte-level tokenizer.

    Args:
        quantization: of the matrices: a name of `gguf.GGMLQuantizationType`; vectors stay F32.
        rope: further fields `llama.rope.*`.
        extra: further tensors.

    Returns:
        The values that the file holds, under transformers' names and in its order of rows.
    """
    import gguf
    from gguf import quants

    kind = gguf.GGMLQuantizationType[quantization]
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in (rope or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.{name}", value)
    _add_tokenizer(writer)
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        values = values if heads is None else _interleaved(values, heads)
        stored = quants.quantize(values, kind) if values.ndim == 2 else values
        writer.add_tensor(_name(name), stored, raw_dtype=kind if values.ndim == 2 else None)
        read = quants.dequantize(stored, kind) if values.ndim == 2 else values
        held[name] = read if heads is None else _halves(read, heads)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}"


def _interleaved(rows: Array, heads: int) -> Array:
    """llama.cpp rotates neighbours: row i of a head's first half goes beside row i of its second."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _halves(rows: Array, heads: int) -> Array:
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _add_tokenizer(writer: Any) -> None:
    document = json.loads((TOKENIZERS / "bytelevel_no_template" / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in document["added_tokens"]}
    ids = {token["content"]: token["id"] for token in document["added_tokens"]} | document["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
