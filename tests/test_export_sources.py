"""Every way to name a model and its heads that medusa-export accepts, and what an export replaces and cleans up."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import ARTIFACTS, CHAT_VOCAB, save_hub_cache, save_llama, save_medusa_repository, write_tree
from command_checks import Commands, contents, unchanged

from medusa_engine.runtime.engine import Engine

PROMPT = [5, 17, 99]
SMALL = ("--max-length", "32", "--top-k", "4", "--max-tree-nodes", "8", "--no-lookup")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree.json")


def answer(bundle: Path, *, speculation: bool = True) -> list[int]:
    engine = Engine.open(bundle, threads=1)
    return engine.generate(prompt_ids=PROMPT, max_new_tokens=12, ignore_eos=True, speculation=speculation).token_ids


@pytest.fixture(scope="session")
def reference(llama_folder: Path) -> list[int]:
    """What transformers answers with the tiny checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    return out[0, len(PROMPT) :].tolist()


def manifest_of(bundle: Path) -> dict[str, dict[str, object]]:
    document: dict[str, dict[str, object]] = json.loads((bundle / "manifest.json").read_text())
    return document


@pytest.fixture
def hub(tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local cache of the hub with the tiny checkpoint and heads for it, and no way to the hub itself."""
    from huggingface_hub import constants

    repositories = {
        "someone/tiny-llama": llama_folder,
        "someone/medusa-tiny-llama": save_medusa_repository(tmp_path / "medusa", base="someone/tiny-llama"),
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", save_hub_cache(tmp_path / "home", repositories) / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.slow
def test_sharded_folder_without_tokenizer_runs_by_ids(
    tmp_path: Path, tree: Path, reference: list[int], commands: Commands
) -> None:
    folder = save_llama(tmp_path / "sharded", shard_bytes=30_000)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    bundle = tmp_path / "bundle"
    commands.export("--model", folder, "--untrained-heads", "2", "--tree", tree, "-o", bundle, *SMALL)
    assert sorted(manifest_of(bundle)["model"]["weights_sha256"]) == shards  # type: ignore[call-overload]
    assert answer(bundle) == answer(bundle, speculation=False) == reference
    assert not list(bundle.glob("tokenizer*"))


@pytest.mark.usefixtures("hub")
def test_hub_id_in_the_local_cache(llama_folder: Path) -> None:
    from safetensors.torch import load_file

    from medusa_engine.exporter.checkpoint import find_source

    source = find_source("someone/tiny-llama")
    assert (source.name, source.heads) == ("tiny-llama", None)
    (weights,) = source.weight_files()
    assert weights.is_symlink()
    stored, expected = load_file(weights), load_file(llama_folder / "model.safetensors")
    assert stored.keys() == expected.keys() and all(stored[name].equal(expected[name]) for name in stored)


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_medusa_repository_on_the_hub_brings_its_heads_and_names_its_base(
    tmp_path: Path, tree: Path, reference: list[int], commands: Commands
) -> None:
    bundle = tmp_path / "bundle"
    commands.export("--model", "someone/medusa-tiny-llama", "--tree", tree, "-o", bundle, *SMALL)
    facts = manifest_of(bundle)
    assert facts["heads"]["trained"] is True
    assert facts["limits"]["heads"] == 3
    assert facts["model"]["name"] == "medusa-tiny-llama"
    assert list(facts["model"]["weights_sha256"]) == ["model.safetensors"]  # type: ignore[call-overload]
    assert answer(bundle) == answer(bundle, speculation=False) == reference


def test_medusa_folder_with_a_base_beside_it(tmp_path: Path, llama_folder: Path) -> None:
    from medusa_engine.exporter.checkpoint import find_source

    base = Path(shutil.copytree(llama_folder, tmp_path / "llama"))
    repository = save_medusa_repository(tmp_path / "medusa", base="../llama")
    source = find_source(str(repository))
    assert (source.name, source.heads) == ("medusa", repository)
    assert source.folder.resolve() == base.resolve()


@pytest.mark.slow
def test_force_replaces_a_bundle_and_clears_what_a_killed_export_left(
    tmp_path: Path, chat_bundle: Path, llama_folder: Path, reference: list[int], commands: Commands
) -> None:
    output = Path(shutil.copytree(chat_bundle, tmp_path / "engines" / "bundle"))
    abandoned = output.parent / ".bundle.partial-0a1b2c3d"
    abandoned.mkdir()
    (abandoned / "weights.bin").write_bytes(bytes(100))
    other = output.parent / ".bundle-2.partial-0a1b2c3d"  # of another output
    in_use = output.parent / ".bundle.partial-ffffffff"  # of another process, as far as the export can tell
    for folder in (other, in_use):
        folder.mkdir()
    tree_file = write_tree(tmp_path / "tree.json")

    descriptor = os.open(in_use, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        commands.export(
            "--model", llama_folder, "--untrained-heads", "2", "--tree", tree_file, "-o", output, "--force", *SMALL
        )
    finally:
        os.close(descriptor)
    assert answer(output) == reference
    assert "tokenizer.json" not in contents(output)
    assert sorted(path.name for path in output.parent.iterdir()) == [other.name, in_use.name, "bundle"]


@pytest.mark.slow
def test_tree_from_a_pipe_and_output_through_a_link(
    tmp_path: Path, llama_folder: Path, reference: list[int], commands: Commands
) -> None:
    (tmp_path / "big_disk").mkdir()
    output = tmp_path / "link"
    output.symlink_to(tmp_path / "big_disk")
    reader, writer = os.pipe()
    os.write(writer, b"[[0], [1], [0, 0]]")
    os.close(writer)
    tree = f"/dev/fd/{reader}"
    try:
        commands.export("--model", llama_folder, "--untrained-heads", "2", "--tree", tree, "-o", output, *SMALL)
    finally:
        os.close(reader)
    assert output.is_symlink()
    assert answer(tmp_path / "big_disk") == reference
    assert Engine.open(output).tree.paths == ((0,), (1,), (0, 0))


def test_tokenizer_of_the_checkpoint_is_the_bundles(chat_bundle: Path, plain_bundle: Path) -> None:
    chat, plain = Engine.open(chat_bundle), Engine.open(plain_bundle)
    assert chat.tokenizer is not None and chat.tokenizer.has_chat_template
    assert plain.tokenizer is not None and not plain.tokenizer.has_chat_template
    assert chat.limits.vocab_size == CHAT_VOCAB
    with unchanged(chat_bundle):
        assert isinstance(chat.generate("hello", max_new_tokens=3).text, str)


@pytest.mark.parametrize(
    ("name", "heads", "layers", "own_projection"),
    [
        ("good_heads.safetensors", 3, 1, True),
        ("bf16_heads.safetensors", 3, 1, True),
        ("no_bias.safetensors", 3, 1, True),
        ("no_lm_head.safetensors", 3, 1, False),
        ("two_res_layers.safetensors", 3, 2, True),
    ],
)
def test_published_forms_of_heads_load(name: str, heads: int, layers: int, own_projection: bool) -> None:
    from safetensors.torch import load_file

    from medusa_engine.exporter.head_checkpoint import load_heads

    loaded = load_heads(ARTIFACTS / name, hidden=32, vocab_size=128)
    assert (loaded.heads, loaded.layers) == (heads, layers)
    assert (loaded.projection is not None) == own_projection
    tensors = load_file(ARTIFACTS / name)
    weight = tensors[f"{heads - 1}.{layers - 1}.linear.weight"].float()
    np.testing.assert_array_equal(loaded.residual_weight[-1, -1].numpy(), weight.numpy())
    assert bool(loaded.residual_bias.any()) == (name != "no_bias.safetensors")


def test_export_says_what_is_odd_about_the_heads(
    llama_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], tree: Path
) -> None:
    """A config that miscounts, and a file without biases and projections, as published checkpoints have them."""
    import torch
    from safetensors.torch import save_file

    from medusa_engine.exporter.cli import main as medusa_export

    heads = tmp_path / "heads"
    heads.mkdir()
    tensors = {f"{head}.0.linear.weight": torch.zeros(32, 32) for head in range(2)}
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 5}))
    arguments = ["--model", llama_folder, "--heads", heads, "--tree", tree, "-o", tmp_path / "b", *SMALL]
    assert medusa_export(list(map(str, arguments))) == 0
    said = capfd.readouterr().err
    notes = [line for line in said.splitlines() if line.startswith("note: ")]
    assert all(str(heads) in note for note in notes)
    for words in ("medusa_num_heads 5, the file holds 2", "no biases", "share the base model's LM head"):
        assert sum(words in note for note in notes) == 1, said
