"""Models that read images too: their text decoder answers as the whole model does, or they are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tree
from command_checks import Commands
from tiny_models import export, greedy_ids
from tree_answers import SIZES, check_answers

from medusa_engine.exporter.text_decoder import KINDS

TABLE = Path(__file__).parent.parent / "docs" / "families.md"
WINDOW = 8
TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 160,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA = {"model_type": "gemma3_text", "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES |= {"image_size": 8, "patch_size": 4}

# model_type -> config of its text decoder and model_type of the part for images, where the config leaves it open.
PARTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "gemma3": (GEMMA, "siglip_vision_model"),
    "idefics3": ({"model_type": "llama"}, None),
    "internvl": ({"model_type": "qwen2"}, None),
    "llava": ({"model_type": "llama"}, "clip_vision_model"),
    "llava_next": ({"model_type": "mistral"}, "clip_vision_model"),
    "mistral3": ({"model_type": "mistral"}, "pixtral"),
    "smolvlm": ({"model_type": "llama"}, None),
}


def save_whole(folder: Path, model_type: str, *, tied: bool, seed: int = 0, **fields: Any) -> Any:
    """Save a model of random weights that reads images too; returns it, with eager attention."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    text, images = PARTS[model_type]
    kind = {} if images is None else {"model_type": images}
    parts = {"text_config": TEXT | text, "vision_config": IMAGES | kind, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(model_type, **parts, **fields)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", KINDS)
def test_the_decoder_alone_computes_what_the_whole_model_does(model_type: str, tied: bool, tmp_path: Path) -> None:
    import torch

    from medusa_engine.exporter.checkpoint import find_source, load_model

    whole = save_whole(tmp_path, model_type, tied=tied)
    decoder = load_model(find_source(str(tmp_path)))
    decoder.set_attn_implementation("eager")
    ids = torch.arange(1, 41)[None]
    with torch.inference_mode():
        assert torch.equal(decoder(ids).logits, whole(ids).logits)


def test_an_export_answers_as_the_whole_model_does(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "model", "gemma3", tied=False, seed=9)
    prompt = np.random.default_rng(0).integers(0, 50, 5 * WINDOW).tolist()
    reference = greedy_ids(whole, prompt, 40)
    assert len(set(reference)) > 8
    check_answers(export(tmp_path / "model", tmp_path / "bundle", *SIZES, "--max-length", "128"), prompt, reference)


def test_stop_tokens_are_those_of_the_whole_model(tmp_path: Path) -> None:
    from medusa_engine.exporter.checkpoint import find_source, load_model
    from medusa_engine.exporter.saved_tokenizer import stop_token_ids

    save_whole(tmp_path, "gemma3", tied=True, eos_token_id=[1, 7])
    (tmp_path / "generation_config.json").unlink()
    model = load_model(find_source(str(tmp_path)))
    assert stop_token_ids(model, None) == [1, 7]


def test_integer_weights_of_the_decoder_are_refused(tmp_path: Path, commands: Commands) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_whole(tmp_path, "gemma3", tied=True)
    name = "language_model.model.norm.weight"
    weights = load_file(tmp_path / "model.safetensors")
    weights[name] = torch.ones(weights[name].shape, dtype=torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = ("--untrained-heads", "2", "--tree", write_tree(tmp_path / "tree.json"), "-o", tmp_path / "bundle")
    commands.export_refuses("--model", tmp_path, *options, named=[tmp_path / "model.safetensors", name, "I8"])


@pytest.mark.parametrize("model_type", ["aya_vision", "gemma3n", "paligemma", "qwen2_vl"])
def test_other_kinds_are_refused_with_what_to_do(model_type: str, tmp_path: Path) -> None:
    from medusa_engine.exporter.family import check_family
    from medusa_engine.runtime.errors import UserError

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UserError, match=f"{model_type} models cannot be exported") as error:
        check_family(tmp_path, {"pretrained_model_name_or_path": str(tmp_path)})
    assert "its text decoder alone" in error.value.hint
    assert all(kind in error.value.hint for kind in KINDS)


def test_the_docs_name_every_kind_that_is_read() -> None:
    line = re.search(r"\*\*Images\.\*\*.*?\n\n", TABLE.read_text(encoding="utf-8"), re.DOTALL)
    assert line and set(re.findall(r"`(\w+)`", line[0])) >= set(KINDS)
