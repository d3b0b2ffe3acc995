"""Tiny random models of the decoder families that are exported, by name: the rows of docs/families.md."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 61
POSITIONS = 160
WINDOW = 8  # of most sliding windows

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """A row.

    Attributes:
        model_type: as config.json calls it.
        seed: of the weights: one whose greedy answer has many different tokens, no two of them nearly tied.
        fields: of config.json, beside the sizes that all rows share.
        matters: other values of fields; with each alone transformers answers differently, so that an export that reads
            the field wrongly cannot pass.
    """

    model_type: str
    seed: int
    fields: dict[str, Any] = field(default_factory=dict)
    matters: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return _SIZES | {"model_type": self.model_type} | self.fields


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    """The rope's fields as they are spelled today."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **fields}}


_UNSCALED = _rope("default")
_NO_WINDOW = {"sliding_window": 2 * POSITIONS}
_LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, Family] = {
    "Llama 1, Llama 2": Family("llama", 8, {"num_hidden_layers": 3, "rms_norm_eps": 1e-5}),
    "Llama, linear rope": Family(
        "llama", 8, _rope("linear", factor=4.0) | {"attention_bias": True, "mlp_bias": True}, _UNSCALED
    ),
    "Llama, dynamic rope": Family(
        "llama", 5, {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, {"rope_theta": 100.0}
    ),
    "Mistral": Family(  # a window shorter than the trees are deep: positions and cache rows differ within it
        "mistral", 9, {"num_hidden_layers": 3, "sliding_window": 2, "head_dim": 16}, {"sliding_window": None}
    ),
    "Mixtral": Family(
        "mixtral",
        3,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        {"sliding_window": None, "num_experts_per_tok": 1},
    ),
    "Qwen2": Family(
        "qwen2",
        11,
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {"use_sliding_window": False, "max_window_layers": 2},
    ),
    "Qwen3": Family("qwen3", 7, {"head_dim": 16, "rope_theta": 1000000.0}, {"rope_theta": 100.0}),
    "Phi-3": Family(
        "phi3",
        12,
        {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
        {"sliding_window": None, "partial_rotary_factor": 1.0},
    ),
    "Phi-3, longrope": Family(
        "phi3",
        11,
        {
            "max_position_embeddings": 4 * POSITIONS,
            "original_max_position_embeddings": POSITIONS,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [3.0, 4.0, 5.0, 6.0],
            },
            "sliding_window": None,
        },
        {"rope_scaling": None},
    ),
    "Gemma 2": Family(
        "gemma2",
        2,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        _NO_WINDOW | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 16},
    ),
    "Gemma 3": Family(
        "gemma3_text",
        13,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
        _NO_WINDOW | {"rope_local_base_freq": 10000.0, "layer_types": ["full_attention"] * 2},
    ),
    "GPT-NeoX": Family("gpt_neox", 9, {"rotary_pct": 0.5, "use_parallel_residual": False}, {"rotary_pct": 1.0}),
    "Pythia": Family("gpt_neox", 11, {"rotary_pct": 0.25}, {"use_parallel_residual": False}),
    "SmolLM3": Family(
        "smollm3",
        2,
        {"no_rope_layers": [1, 0], "tie_word_embeddings": True},
        {"no_rope_layers": [1, 1]},
    ),
    "Granite": Family(
        "granite",
        10,
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.4, "logits_scaling": 4.0},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.25, "residual_multiplier": 1.0},
    ),
    "OLMo 2": Family("olmo2", 11),
    "StableLM": Family(
        "stablelm",
        5,
        {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "qk_layernorm": True},
        {"partial_rotary_factor": 1.0},
    ),
}

# These are like the ones above, or like tests/data/configs, in what an export could get wrong; --soak runs them.
MORE_FAMILIES: dict[str, Family] = {
    "Llama 3": Family(
        "llama",
        6,
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
        | {"head_dim": 16},
        _UNSCALED,
    ),
    "Llama, YaRN rope": Family(
        "llama", 10, _rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0), _UNSCALED
    ),
    "Vicuna": Family(
        "llama",
        4,
        {"num_key_value_heads": 4, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": None},
    ),
    "Gemma": Family("gemma", 7, {"head_dim": 16, "tie_word_embeddings": True}),
    "Qwen3 MoE": Family(
        "qwen3_moe",
        1,
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"num_experts_per_tok": 1},
    ),
    "OLMo 3": Family(
        "olmo3",
        4,
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": _LOCAL_AND_GLOBAL},
        _NO_WINDOW,
    ),
    "Cohere": Family("cohere", 7, {"logit_scale": 0.5, "use_qk_norm": True}),
}


def save_family(folder: Path, config: dict[str, Any], *, seed: int) -> Path:
    """Save a model of random weights; its config.json says what `config` does, in the same words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)  # transformers writes it in words of today
    return folder
