"""Checkpoint folders of a tiny Llama, in every layout that medusa-export reads."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
ARTIFACTS = DATA / "artifacts"
TOKENIZERS = DATA / "tokenizers"
TREES = DATA / "trees"

HIDDEN = 32  # hidden size and vocabulary fit the heads in tests/data/artifacts
VOCAB = 128
CHAT_VOCAB = 272  # holds every token of the byte-level tokenizers
POSITIONS = 512


def save_llama(
    folder: Path, *, vocab_size: int = VOCAB, tokenizer: str | None = None, shard_bytes: int = 1 << 30
) -> Path:
    """Save a two-layer Llama of random weights; with one of tests/data/tokenizers, or none."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_bytes)
    if tokenizer is not None:
        for file in (TOKENIZERS / tokenizer).iterdir():
            shutil.copy(file, folder / file.name)
    return folder


def save_medusa_repository(folder: Path, *, base: str, heads: int = 3) -> Path:
    """Save a folder of heads that names its base, as the original Medusa trainer does."""
    folder.mkdir()
    shutil.copy(ARTIFACTS / "good_heads.safetensors", folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": base}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_hub_cache(home: Path, repositories: dict[str, Path]) -> Path:
    """Lay folders out as the hub's local cache does: snapshots of links to blobs named by hash."""
    for name, folder in repositories.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        commit = hashlib.sha1(name.encode()).hexdigest()
        snapshot, blobs, refs = repository / "snapshots" / commit, repository / "blobs", repository / "refs"
        for made in (snapshot, blobs, refs):
            made.mkdir(parents=True)
        (refs / "main").write_text(commit)
        for file in folder.iterdir():
            blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return home


def write_tree(path: Path, paths: Sequence[Sequence[int]] = ((0,), (1,), (0, 0))) -> Path:
    path.write_text(json.dumps([list(entry) for entry in paths]))
    return path


def edit_json(path: Path, **values: Any) -> None:
    """Give fields of a JSON file other values."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
