"""A LoRA adapter is merged so that the model answers as peft's does unmerged, and refused where it holds no numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save_family
from safetensors.torch import load_file, save_file
from tiny_models import greedy_ids

from medusa_engine.exporter.checkpoint import find_source, load_model
from medusa_engine.runtime.errors import UserError

FILE = "adapter_model.safetensors"
PROMPT = [5, 17, 9, 3, 25, 41]
LAYERS = ["q_proj", "v_proj", "down_proj"]


def save_base(folder: Path, *, tied: bool, name: str = "Llama 1, Llama 2") -> Path:
    config = FAMILIES[name].config | {"tie_word_embeddings": tied, "num_hidden_layers": 2}
    return save_family(folder, config, seed=3)


def save_adapter(
    folder: Path, base: Path, *, named: str | None = None, targets: Sequence[str] = LAYERS, **settings: Any
) -> Any:
    """Save a LoRA adapter for a base as peft does; returns peft's model."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(folder)
    written = json.loads((folder / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = str(base) if named is None else named
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return adapted.eval()


def load(folder: Path) -> Any:
    model = load_model(find_source(str(folder)))
    model.set_attn_implementation("eager")
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([PROMPT])).logits


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


# Merging


def test_adapter_is_merged_into_the_base_that_it_names(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tied=False)
    adapted = save_adapter(tmp_path / "adapter", base)
    source = find_source(str(tmp_path / "adapter"))
    assert source.name == "adapter" and source.weight_files()[-1] == tmp_path / "adapter" / FILE
    assert (logits(load(base)) - logits(adapted)).abs().max() > 1
    torch.testing.assert_close(logits(load(tmp_path / "adapter")), logits(adapted), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*(embedding layers found|tie_word_embeddings)")  # peft's, of what is tested
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
@pytest.mark.parametrize("name", ["Llama 1, Llama 2", "Gemma 2"])
def test_adapter_of_embeddings_or_projection_answers_as_unmerged(
    name: str, targets: list[str], tied: bool, tmp_path: Path
) -> None:
    """Tied weights part: each has what its own adapter learned. Gemma scales its embeddings."""
    base = save_base(tmp_path / "base", tied=tied, name=name)
    adapted = save_adapter(tmp_path / "adapter", base, targets=LAYERS + targets)
    assert any("base_layer" in name for name in load_file(tmp_path / "adapter" / FILE))
    model = load(tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits(adapted), rtol=0, atol=1e-3)
    assert greedy_ids(model, PROMPT, 20) == greedy_ids(adapted, PROMPT, 20)
    assert not model.config.tie_word_embeddings


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_adapters_that_are_tied_as_the_weights_are_merged_once(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tied=True)
    adapted = save_adapter(tmp_path / "adapter", base, targets=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    torch.testing.assert_close(logits(load(tmp_path / "adapter")), logits(adapted), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*embedding layers found")
def test_embeddings_beside_an_adapter_have_to_be_those_of_the_base(tmp_path: Path) -> None:
    """In the dtype of the training, which may be narrower."""
    save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", tied=False), targets=["embed_tokens"])
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    change(tmp_path / "adapter", lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    load(tmp_path / "adapter")
    change(tmp_path / "adapter", lambda tensors: tensors[name][7].add_(1))
    with pytest.raises(UserError, match=rf"{FILE}: cannot merge the adapter: {name} is not that of the base"):
        load(tmp_path / "adapter")


# Refusals


@pytest.mark.parametrize("named", ["", "../missing", "../adapter"])
def test_adapter_without_a_base_is_refused(named: str, llama_folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", llama_folder, named=named)
    with pytest.raises(UserError) as refused:
        find_source(str(tmp_path / "adapter"))
    assert str(tmp_path / "adapter" / "adapter_config.json") in refused.value.problem


def test_adapter_without_safetensors_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", llama_folder)
    (tmp_path / "adapter" / FILE).rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: the adapter's weights are missing"):
        find_source(str(tmp_path / "adapter"))


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "embed_tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_adapter_that_is_not_finite_is_refused(value: float, part: str, llama_folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", llama_folder, modules_to_save=["embed_tokens"])
    name = next(name for name in load_file(tmp_path / "adapter" / FILE) if part in name)
    change(tmp_path / "adapter", lambda tensors: tensors[name][1].fill_(value))
    with pytest.raises(UserError, match=rf"{tmp_path / 'adapter' / FILE}: {name} holds NaN or infinity"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn], ids=str)
def test_adapter_of_another_kind_of_number_is_refused(dtype: torch.dtype, llama_folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", llama_folder)
    change(tmp_path / "adapter", lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    with pytest.raises(UserError, match=rf"{tmp_path / 'adapter' / FILE}: base_model.*lora_.* has dtype"):
        load(tmp_path / "adapter")


def test_adapter_that_makes_weights_overflow_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", llama_folder)
    change(tmp_path / "adapter", lambda tensors: [tensor.fill_(1e30) for tensor in tensors.values()] and None)
    with pytest.raises(UserError, match=rf"{tmp_path / 'adapter' / FILE}: .*_proj\.weight holds NaN or infinity"):
        load(tmp_path / "adapter")
