"""Checkpoints in every form that models are published in give the weights they hold; nothing missing is made up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CHAT_VOCAB, save_hub_cache, save_llama, write_tree
from command_checks import EXPORT, RUN, Commands, offline_environment
from families import FAMILIES, save_family
from gguf_files import save_gguf
from safetensors.torch import load_file, save_file
from tiny_models import Exported, export, greedy_ids
from tree_answers import SIZES, check_answers

from medusa_engine.exporter.checkpoint import find_source, load_model
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError

PROMPT = [5, 17, 99, 3, 250, 41]
SMALL = ("--untrained-heads", "2", "--max-length", "32", "--top-k", "4", "--max-tree-nodes", "8", "--no-lookup")


def load(path: Path) -> Any:
    return load_model(find_source(str(path)))


def check_weights(model: Any, expected: dict[str, Any], *, exact: bool = True) -> None:
    """Check that a loaded model has these tensors and no others, but for a tied projection."""
    loaded = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        expected = expected | {"lm_head.weight": expected["model.embed_tokens.weight"]}
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == np.float32
        np.testing.assert_allclose(tensor, np.asarray(expected[name]), rtol=0, atol=0 if exact else 1e-6, err_msg=name)


# Data types and shards


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 10_000], ids=["single", "sharded"])
def test_half_precision_weights_are_read_as_they_are(
    dtype: torch.dtype, shard_bytes: int, llama_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=dtype)
    model.save_pretrained(tmp_path / "model", max_shard_size=shard_bytes)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 1 << 30)
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    check_weights(load(tmp_path / "model"), {name: tensor.float().numpy() for name, tensor in stored.items()})


def test_bundle_of_a_half_precision_checkpoint_answers_as_transformers_in_full_precision(tmp_path: Path) -> None:
    save_family(tmp_path / "full", FAMILIES["Qwen2"].config, seed=FAMILIES["Qwen2"].seed)
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half", max_shard_size=10_000)
    exported = export(tmp_path / "half", tmp_path / "bundle", *SIZES, "--max-length", "128")
    prompt = PROMPT[:2] * 10
    check_answers(exported, prompt, greedy_ids(exported.model, prompt, 60))


# Tensors that are missing


@pytest.mark.parametrize("name", ["Qwen2", "Mixtral", "Phi-3", "Pythia", "Gemma 2"])
def test_checkpoint_that_lacks_any_tensor_is_refused(name: str, tmp_path: Path) -> None:
    """A tied projection is not stored, and not missed."""
    family = FAMILIES[name]
    folder = save_family(tmp_path / "model", family.config | {"num_hidden_layers": 1}, seed=family.seed)
    whole = load_file(folder / "model.safetensors")
    load(folder)
    assert ("lm_head.weight" in whole or "embed_out.weight" in whole) != bool(family.config["tie_word_embeddings"])
    for lacking in whole:
        tensors = {other: tensor for other, tensor in whole.items() if other != lacking}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError) as refused:
            load(folder)
        assert str(folder) in refused.value.problem
        now = lacking.replace("embed_out.", "lm_head.").replace("block_sparse_moe.", "mlp.")  # transformers' names
        assert lacking in refused.value.problem or now in refused.value.problem


@pytest.mark.parametrize("layer", ["0", "[01]"])
def test_checkpoint_that_lacks_its_last_expert_is_refused(layer: str, tmp_path: Path) -> None:
    """In one layer, or in all, where the numbers of the tensors alone do not tell."""
    family = FAMILIES["Mixtral"]
    folder = save_family(tmp_path, family.config, seed=family.seed)
    last = rf"model\.layers\.{layer}\.block_sparse_moe\.experts\.3\."
    kept = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if not re.match(last, name)
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"the tensor {last}w1\.weight is missing"):
        load(folder)


# Vocabularies


def test_model_with_more_tokens_than_its_tokenizer_is_exported(tmp_path: Path, commands: Commands) -> None:
    model = save_llama(tmp_path / "model", vocab_size=CHAT_VOCAB + 48, tokenizer="bytelevel_no_template")
    commands.export("--model", model, "--tree", write_tree(tmp_path / "tree.json"), "-o", tmp_path / "bundle", *SMALL)
    engine = Engine.open(tmp_path / "bundle", threads=1)
    assert engine.limits.vocab_size == CHAT_VOCAB + 48
    assert engine.generate("hello", max_new_tokens=4).text is not None


def test_tokenizer_with_more_tokens_than_its_model_is_refused(tmp_path: Path, commands: Commands) -> None:
    tokenizer = json.loads((save_tokenizer(tmp_path / "all") / "tokenizer.json").read_text())
    tokens = max(tokenizer["model"]["vocab"].values()) + 1
    model = save_llama(tmp_path / "model", vocab_size=tokens - 1, tokenizer="bytelevel_no_template")
    arguments = ("--model", model, "--tree", write_tree(tmp_path / "tree.json"), "-o", tmp_path / "bundle", *SMALL)
    commands.export_refuses(*arguments, named=[model, "tokenizer has 1 token that", f"({tokens - 1})"])
    assert not (tmp_path / "bundle").exists()


def save_tokenizer(folder: Path) -> Path:
    save_llama(folder, vocab_size=CHAT_VOCAB, tokenizer="bytelevel_no_template")
    return folder


# GGUF


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return wide_llama(tmp_path_factory.mktemp("tiny"), tied=False)


def wide_llama(folder: Path, *, tied: bool, **fields: Any) -> Any:
    """A Llama whose rows are as long as a block of GGUF's quantizations, or a multiple."""
    from transformers import AutoModelForCausalLM

    config = {
        "model_type": "llama",
        "vocab_size": CHAT_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 500.0,
    }
    save_family(folder, config | fields, seed=1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_gguf_weights_are_the_dequantized_ones_in_the_order_of_transformers(
    quantization: str, tiny: Any, tmp_path: Path
) -> None:
    held = save_gguf(tmp_path / "tiny.gguf", tiny, quantization)
    check_weights(load(tmp_path / "tiny.gguf"), held, exact=False)
    coarsest = {"Q4_0": 0.15, "Q4_1": 0.1, "Q8_0": 0.01, "F16": 1e-3, "F32": 0.0}[quantization]  # of the largest weight
    for name, tensor in tiny.state_dict().items():
        weight = tensor.numpy()
        assert np.abs(held[name] - weight).max() <= coarsest * np.abs(weight).max(), name


@pytest.mark.slow
def test_gguf_file_with_tied_embeddings_answers_as_its_values_do_in_transformers(tmp_path: Path) -> None:
    model = wide_llama(tmp_path / "model", tied=True)
    held = save_gguf(tmp_path / "tiny.gguf", model, "Q8_0")
    assert "lm_head.weight" not in held
    save_file({name: torch.from_numpy(values.copy()) for name, values in held.items()}, tmp_path / "model.safetensors")
    tree = write_tree(tmp_path / "tree.json")
    from medusa_engine.exporter.cli import main

    arguments = ["--model", tmp_path / "tiny.gguf", "--tree", tree, "-o", tmp_path / "bundle", *SIZES]
    assert main([str(argument) for argument in arguments]) == 0
    shutil.move(tmp_path / "model.safetensors", tmp_path / "model" / "model.safetensors")
    exported = Exported(tmp_path / "bundle", tmp_path / "model")  # what transformers reads are the GGUF file's values
    check_answers(exported, PROMPT, greedy_ids(exported.model, PROMPT, 60))
    assert exported.engine.tokenizer is not None


def test_gguf_rope_factors_are_those_of_llama3(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = wide_llama(tmp_path / "model", tied=False, rope_parameters=scaled)
    rope = model.model.rotary_emb.inv_freq
    factors = 500.0 ** (-torch.arange(0, 16, 2) / 16) / rope
    assert float(factors.max()) > 7.9
    save_gguf(tmp_path / "tiny.gguf", model, "F32", extra={"rope_freqs.weight": factors.numpy().astype(np.float32)})
    torch.testing.assert_close(load(tmp_path / "tiny.gguf").model.rotary_emb.inv_freq, rope)


def test_gguf_rope_that_is_scaled_evenly_is(tiny: Any, tmp_path: Path) -> None:
    save_gguf(tmp_path / "tiny.gguf", tiny, "F32", rope={"scaling.type": "linear", "scaling.factor": 4.0})
    torch.testing.assert_close(
        load(tmp_path / "tiny.gguf").model.rotary_emb.inv_freq, tiny.model.rotary_emb.inv_freq / 4
    )


@pytest.mark.parametrize(
    ("rope", "tensors", "named"),
    [
        ({"scaling.type": "yarn"}, (), "yarn"),
        ({}, ("rope_factors_long.weight", "rope_factors_short.weight"), "longrope"),
    ],
)
def test_gguf_rope_of_other_kinds_is_refused(
    rope: dict[str, str | float], tensors: tuple[str, ...], named: str, tiny: Any, tmp_path: Path
) -> None:
    extra = {name: np.ones(8, dtype=np.float32) for name in tensors}
    save_gguf(tmp_path / "tiny.gguf", tiny, "F32", rope=rope, extra=extra)
    with pytest.raises(UserError, match=named):
        load(tmp_path / "tiny.gguf")


# Where things lie


@pytest.mark.slow
def test_snapshot_of_links_exports_and_the_bundle_runs_from_anywhere(tmp_path: Path) -> None:
    """Each command is a process with a working directory of its own; the bundle is moved between them."""
    model = save_llama(tmp_path / "model", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_no_template")
    home = save_hub_cache(tmp_path / "home", {"someone/tiny-llama": model})
    for place in ("here", "there", "elsewhere"):
        (tmp_path / place).mkdir()
    write_tree(tmp_path / "here" / "tree.json")
    environment = offline_environment(home)
    command = [*EXPORT, "--model", "someone/tiny-llama", "--tree", "tree.json", *SMALL]
    subprocess.run(command, cwd=tmp_path / "here", env=environment, check=True, capture_output=True)
    shutil.rmtree(model)
    shutil.move(tmp_path / "here" / "engines" / "tiny-llama", tmp_path / "there" / "moved")
    shutil.rmtree(home)
    answers = []
    for directory, engine in (("there", "moved"), ("elsewhere", os.path.join("..", "there", "moved"))):
        command = [*RUN, "--engine", engine, "--prompt", "hello", "--max-new-tokens", "8", "--json"]
        ended = subprocess.run(command, cwd=tmp_path / directory, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        answers.append(json.loads(ended.stdout)["token_ids"])
    assert answers[0] == answers[1] and answers[0]
