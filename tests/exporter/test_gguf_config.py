"""A GGUF file is loaded with all that it says of the model's arithmetic, or refused with what is left over named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, save_family
from gguf_families import Value, save_family_gguf
from transformers import AutoConfig

from medusa_engine.exporter.checkpoint import find_source, load_model
from medusa_engine.exporter.gguf_config import complete_config
from medusa_engine.exporter.gguf_fields import GGUFFields
from medusa_engine.runtime.errors import UserError

PROMPT = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(1))
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "tie_word_embeddings": True}
_GEMMA_FIELDS: dict[str, Value] = {
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.sliding_window": 8,
    "rope.freq_base": 1e4,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0}


def reference(folder: Path, model_type: str, **fields: Any) -> Any:
    from transformers import AutoModelForCausalLM

    save_family(folder, Family(model_type, 1, fields).config, seed=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def check_same(path: Path, model: Any) -> None:
    loaded = load_model(find_source(str(path)))
    loaded.set_attn_implementation("eager")
    expected = model(PROMPT, use_cache=False).logits
    torch.testing.assert_close(loaded(PROMPT, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reference(tmp_path_factory.mktemp("llama"), "llama", rope_theta=500.0)


@pytest.mark.parametrize(
    ("architecture", "config", "fields"),
    [
        ("starcoder2", {"rope_theta": 1e6, "norm_epsilon": 0.1}, {"rope.freq_base": 1e6}),
        ("starcoder2", {"use_bias": False, "rope_scaling": _LINEAR}, {"rope.scaling.factor": 4.0}),
        (
            "stablelm",
            {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            {"rope.freq_base": 100.0, "rope.dimension_count": 4},
        ),
        ("stablelm", {"partial_rotary_factor": 1.0}, {}),
        ("nemotron", {"norm_eps": 0.1, "partial_rotary_factor": 0.25, "mlp_bias": True}, {"rope.dimension_count": 2}),
        (
            "phi3",
            {"partial_rotary_factor": 0.5, "sliding_window": 8, "pad_token_id": 0},
            {"rope.dimension_count": 4, "attention.sliding_window": 8},
        ),
        ("qwen3", {"head_dim": 16}, {"attention.key_length": 16, "attention.value_length": 16}),
        (
            "gemma2",
            {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
            {**_GEMMA_FIELDS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
        (
            "gemma3",
            {**_GEMMA, "rope_theta": 5e4, "rope_local_base_freq": 100.0},
            {**_GEMMA_FIELDS, "rope.freq_base": 5e4, "rope.freq_base_swa": 100.0},
        ),
        (
            "gemma3",
            {
                **_GEMMA,
                "rope_theta": 1e4,
                "rope_scaling": _LINEAR,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            {
                **_GEMMA_FIELDS,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 4.0,
                "attention.sliding_window_pattern": 2,
            },
        ),
        (
            "gemma2",
            {**_GEMMA, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None},
            {**_GEMMA_FIELDS, "attention.key_length": 16, "attention.value_length": 16, "attn_logit_softcapping": 0.0},
        ),
        (
            "qwen3moe",
            {
                "moe_intermediate_size": 24,
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            },
            {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24},
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1}, {}),
        ("llama", {"rope_scaling": _LINEAR}, {"rope.scaling.factor": 4.0}),
        ("llama", {"rope_scaling": _LINEAR}, {"rope.scale_linear": 4.0}),
        ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "expert_count": 0}),
    ],
)
def test_what_a_file_says_is_what_is_loaded(
    architecture: str, config: dict[str, Any], fields: dict[str, Value], tmp_path: Path
) -> None:
    model = reference(
        tmp_path / "model", {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}.get(architecture, architecture), **config
    )
    save_family_gguf(tmp_path / "tiny.gguf", model, architecture, fields)
    check_same(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention.sliding_window": 8}, r"attention\.sliding_window is 8"),
        ({"attention.value_length": 4}, r"attention\.value_length is 4"),
        ({"attention.scale": 0.5}, r"attention\.scale is 0\.5"),
        ({"attention.causal": False}, r"attention\.causal is false"),
        ({"final_logit_softcapping": 3.0}, r"final_logit_softcapping is 3\.0"),
        ({"logit_scale": 2.0}, r"logit_scale is 2\.0"),
        ({"expert_used_count": 2}, r"expert_used_count is 2"),
        ({"rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0"),
        ({"rope.dimension_count": 4, "attention.key_length": 8}, "over 4 values, and LlamaForCausalLM rotates"),
        ({"rope.freq_base_swa": 7.0}, r"freq_base_swa is 7\.0"),
        ({"rope.freq_base": 0.0}, r"rope\.freq_base is 0\.0, not a number above 0"),
        ({"rope.scaling.type": 4.0}, r"rope\.scaling\.type is 4\.0, not text"),
        ({"attention.layer_norm_rms_epsilon": None}, r"attention\.layer_norm_rms_epsilon is missing"),
        ({"rope.scaling.type": "linear"}, r"rope\.scaling\.factor is missing"),
        ({"rope.scaling.factor": "abc"}, r'rope\.scaling\.factor is "abc", not a finite number'),
        ({"rope.scaling.factor": 0.0}, r"rope\.scaling\.factor is 0\.0, not a number above 0"),
        ({"rope.scaling.factor": -4.0}, r"rope\.scaling\.factor is -4\.0, not a number above 0"),
        ({"rope.scaling.factor": math.nan}, r"rope\.scaling\.factor is nan, not a finite number"),
        ({"rope.scale_linear": math.inf}, r"rope\.scale_linear is inf, not a finite number"),
        ({"attention.clamp_kqv": [1, 2]}, r"clamp_kqv differs from layer to layer"),
        ({"attention.sliding_window_pattern": "all"}, r'pattern is "all", not a number of layers'),
    ],
)
def test_what_the_model_cannot_follow_is_refused(
    fields: dict[str, Value], named: str, llama: Any, tmp_path: Path
) -> None:
    save_family_gguf(tmp_path / "tiny.gguf", llama, "llama", {"rope.freq_base": 500.0, **fields})
    with pytest.raises(UserError, match=named) as caught:
        load_model(find_source(str(tmp_path / "tiny.gguf")))
    assert str(tmp_path / "tiny.gguf") in caught.value.problem


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("blk.0.attn_q_norm.weight", [3.0] * 8, r"left over \(1\).* the first is blk\.0\.attn_q_norm\.weight"),
        ("blk.7.attn_norm.weight", [3.0] * 32, r"the first is blk\.7\.attn_norm\.weight"),
        ("blk.1.attn_q.bias", [3.0] * 32, r"the first is blk\.1\.attn_q\.bias"),
        ("rope_freqs.weight", [0.0] * 4, "holds something else than numbers above 0"),
        ("rope_freqs.weight", [-1.0] * 4, "holds something else than numbers above 0"),
        ("rope_freqs.weight", [math.nan] * 4, "holds something else than numbers above 0"),
        ("rope_freqs.weight", [1.0] * 5, r"rope_freqs\.weight has shape \[5\], not \[4\]"),
    ],
)
def test_tensors_that_the_model_does_not_use_are_refused(
    name: str, values: list[float], named: str, llama: Any, tmp_path: Path
) -> None:
    save_family_gguf(tmp_path / "tiny.gguf", llama, "llama", {"rope.freq_base": 500.0}, extra={name: values})
    with pytest.raises(UserError, match=named):
        load_model(find_source(str(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemmas_of_27b_scale_queries_by_another_size(architecture: str, layers: int, tmp_path: Path) -> None:
    model = reference(tmp_path / "model", {"gemma3": "gemma3_text"}.get(architecture, architecture), **_GEMMA)
    for count in (2, layers):
        fields: dict[str, Value] = {**_GEMMA_FIELDS, "attention.key_length": 16, "attention.value_length": 16}
        save_family_gguf(tmp_path / "tiny.gguf", model, architecture, {**fields, "block_count": count})
        source = find_source(str(tmp_path / "tiny.gguf"))
        config = AutoConfig.from_pretrained(**source.load_options())
        complete_config(config, GGUFFields(source.path))
        assert config.query_pre_attn_scalar == (16 if count == 2 else model.config.hidden_size // 4)


def test_fields_that_are_not_known_are_noted(llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Value] = {"rope.freq_base": 500.0, "attention.novelty": 3}
    save_family_gguf(tmp_path / "tiny.gguf", llama, "llama", fields, extra={"rope_freqs.weight": [1.0] * 4})
    check_same(tmp_path / "tiny.gguf", llama)
    assert f"note: {tmp_path / 'tiny.gguf'}: " in (noted := capsys.readouterr().err)
    assert "llama.attention.novelty" in noted
    assert "freq_base" not in noted
