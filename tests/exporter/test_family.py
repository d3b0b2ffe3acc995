"""Models that cannot be exported are refused by their config alone, or by the cache they keep, with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_llama, write_tree
from command_checks import Commands, unchanged

from medusa_engine.exporter import window
from medusa_engine.exporter.family import cache_sizes
from medusa_engine.exporter.rope import fixed_positions, fixed_rope
from medusa_engine.exporter.window import sliding_window
from medusa_engine.runtime.errors import UserError

TABLE = Path(__file__).parents[2] / "docs" / "families.md"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}

# model_type -> words of the reason; the rows of docs/families.md that are refused before any weights are read.
REFUSED = {
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "mbart": "encoder-decoder",
    "pegasus": "encoder-decoder",
    "marian": "encoder-decoder",
    "whisper": "encoder-decoder",
    "mamba": "recurrent layers",
    "mamba2": "recurrent layers",
    "rwkv": "recurrent layers",
    "xlstm": "recurrent layers",
    "jamba": "recurrent layers",
    "recurrent_gemma": "recurrent layers",
    "qwen3_next": "recurrent layers",
    "bamba": "recurrent layers",
    "falcon_h1": "recurrent layers",
    "zamba2": "recurrent layers",
    "nemotron_h": "recurrent layers",
    "granitemoehybrid": "recurrent layers",
    "lfm2": "layers of conv",
    "minimax": "layers of linear_attention",
    "llama4_text": "layers of chunked_attention",
    "bert": "an encoder",
    "roberta": "an encoder",
    "vit": "not a causal language model of text",
    "clip": "not a causal language model of text",
    "qwen2_vl": "not a causal language model of text",
    "paligemma": "not a causal language model of text",
    "aya_vision": "not a causal language model of text",
    "gemma3n": "more than text",
    "moshi": "more than text",
    "falcon": "attention interface",
    "bloom": "attention interface",
    "gpt_neo": "attention interface",
    "mpt": "attention interface",
}
FIELDS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_family_is_refused_by_its_config_alone(model_type: str, tmp_path: Path, commands: Commands) -> None:
    """The folder has no weights to read."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": model_type} | FIELDS.get(model_type, {})))
    refuse(commands, model, [model, model_type, REFUSED[model_type]])


def test_decoder_of_an_encoder_decoder_counts_its_positions_itself(tmp_path: Path, commands: Commands) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": false, "is_decoder": true}')
    refuse(commands, model, [model, "bart", "counts positions by itself"])


def test_quantized_weights_are_refused_by_the_config(tmp_path: Path, commands: Commands) -> None:
    model = save_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    refuse(commands, model, [model, "quantized (gptq)"])


def refuse(commands: Commands, model: Path, named: list[str | Path]) -> None:
    tree = write_tree(model.parent / "tree.json")
    output = model.parent / "bundle"
    with unchanged(model.parent):
        commands.export_refuses("--model", model, "--untrained-heads", "2", "--tree", tree, "-o", output, named=named)


def test_the_table_in_the_docs_names_every_kind_that_is_refused() -> None:
    refused = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| refused", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {model_type for _, kinds in refused for model_type in re.findall(r"`(\w+)`", kinds)}
    assert named >= set(REFUSED)


# The cache and the window that transformers' own code keeps


def model_of(model_type: str, **fields: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | fields))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_cache_has_the_sizes_that_the_code_uses_and_not_those_the_config_names() -> None:
    sizes = cache_sizes(model_of("gpt_neox"))  # knows no num_key_value_heads, but its config holds one
    assert (sizes.layers, sizes.kv_heads, sizes.head_dim) == (2, 4, 8)
    sizes = cache_sizes(model_of("qwen3", head_dim=16))
    assert (sizes.layers, sizes.kv_heads, sizes.head_dim) == (2, 2, 16)


def test_keys_and_values_of_different_sizes_are_refused() -> None:
    fields = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    with pytest.raises(UserError, match="DeepseekV2ForCausalLM: keys and values have different shapes"):
        cache_sizes(model_of("deepseek_v2", first_k_dense_replace=2, **fields))


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 20}, 20),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}, 20),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": False}, None),
        ("moshi", {"sliding_window": 20, "ffn_dim": 40}, None),  # the code never applies it
        ("llama", {"sliding_window": 20}, None),  # nor is it one of this family's fields
    ],
)
def test_window_is_the_one_that_the_code_applies(model_type: str, fields: dict[str, Any], expected: int | None) -> None:
    model = model_of(model_type, **fields)
    before = getattr(model.config, "sliding_window", None)
    assert sliding_window(model) == expected
    assert getattr(model.config, "sliding_window", None) == before


def test_window_that_is_applied_otherwise_than_the_config_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2", sliding_window=20, use_sliding_window=True, max_window_layers=1)
    swapped = window.window_masks

    def masks(config: Any, full: torch.Tensor, local: torch.Tensor) -> Any:
        return swapped(config, local, full)

    monkeypatch.setattr(window, "window_masks", masks)
    with pytest.raises(UserError, match="otherwise than its config says"):
        sliding_window(model)


# Rope whose frequencies depend on the length


def test_rope_is_fixed_up_to_the_positions_of_its_training() -> None:
    from transformers import AutoConfig

    def positions(model_type: str, **fields: Any) -> tuple[int, str] | None:
        return fixed_positions(AutoConfig.for_model(model_type, max_position_embeddings=512, **fields))

    assert positions("llama") is None
    assert positions("llama", rope_scaling={"type": "linear", "factor": 2.0}) is None
    assert positions("llama", rope_scaling={"type": "dynamic", "factor": 2.0}) == (512, "dynamic")
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi3 = {"original_max_position_embeddings": 128, "pad_token_id": None}
    assert positions("phi3", rope_scaling={"type": "longrope"} | factors, **phi3) == (128, "longrope")


def test_rope_looks_at_the_length_again_behind_the_trace() -> None:
    model = model_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    rope = model.model.rotary_emb
    with fixed_rope(model):
        assert rope.rope_type == "default"
    assert rope.rope_type == "dynamic"


def test_length_past_the_fixed_positions_of_dynamic_rope_is_refused(tmp_path: Path, commands: Commands) -> None:
    model = save_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    tree = write_tree(tmp_path / "tree.json")
    arguments = ("--model", model, "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "bundle")
    commands.export_refuses(*arguments, "--max-length", "65", named=["65", "64 positions", "dynamic"])
