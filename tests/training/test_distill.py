"""A tiny model writes its own data: resumable, every row of the batch a conversation of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CHAT_VOCAB, save_llama
from transformers import AutoModelForCausalLM

from medusa_engine.runtime.errors import UserError
from medusa_engine.training import distill
from medusa_engine.training.distill_cli import main as medusa_distill
from medusa_engine.training.features import load_features, shard_paths
from medusa_engine.training.labels import IGNORED

BATCH, OWNED = 8, 12_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(
        tmp_path_factory.mktemp("model") / "llama", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_bos_twice"
    )


def write_data(model: Path, data: Path, owned: int, *options: str) -> int:
    arguments = ["--model", model, "-o", data, "--owned-tokens", owned, "--batch", BATCH, "--max-length", 96]
    arguments += ["--dtype", "float32", "--device", "cpu"]
    return medusa_distill([*map(str, arguments), *options])


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "self"
    assert write_data(model, folder, OWNED) == 0
    return folder


def shard(data: Path, index: int = 0) -> dict[str, Any]:
    with np.load(shard_paths(data)[index]) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def test_hidden_states_and_distributions_are_those_of_transformers(data: Path, reference: Any) -> None:
    """Rows restart at their own times; each must see its own conversation and nothing of the one before it."""
    stored = shard(data)
    start = 0
    for length in stored["lengths"][:12]:
        tokens = torch.from_numpy(stored["tokens"][start : start + length].astype(np.int64))[None]
        with torch.no_grad():
            out = reference.model(tokens).last_hidden_state
            logprobs = torch.log_softmax(reference.lm_head(out)[0], dim=-1)
        hidden = stored["hidden"][start : start + length - 1].astype(np.float32)
        assert hidden == pytest.approx(out[0, : length - 1].numpy(), abs=2e-2, rel=2e-3)  # stored in fp16
        top = logprobs[: length - 1].topk(8, dim=-1)
        assert stored["top_logprobs"][start : start + length - 1].astype(np.float32) == pytest.approx(
            top.values.numpy(), abs=1e-2
        )
        start += length


def test_greedy_answers_are_the_argmax_behind_each_token(data: Path) -> None:
    stored = shard(data)
    ends = np.cumsum(stored["lengths"])
    greedy = 0
    for start, end in zip(ends - stored["lengths"], ends, strict=True):
        owned = np.flatnonzero(stored["owned"][start:end])
        greedy += bool((stored["top_ids"][start + owned - 1, 0] == stored["tokens"][start + owned]).all())
    assert greedy >= len(ends) // 4, "half of the conversations are written at temperature 0"


def test_manifest_counts_what_is_there(data: Path) -> None:
    manifest = json.loads((data / "data.json").read_text(encoding="utf-8"))
    shards = [shard(data, index) for index in range(manifest["shards"])]
    assert manifest["tokens"] == sum(len(stored["tokens"]) for stored in shards)
    assert manifest["owned_tokens"] == sum(int(stored["owned"].sum()) for stored in shards) >= OWNED
    numbers = np.concatenate([stored["numbers"] for stored in shards])
    assert manifest["conversations"] == len(numbers) == len(set(numbers.tolist()))


def test_interrupted_run_goes_on_and_never_writes_a_conversation_twice(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "self"
    assert write_data(model, data, 2000) == 0
    before = {path.name: path.read_bytes() for path in shard_paths(data)}
    assert write_data(model, data, 4 * 2000) == 0
    assert len(shard_paths(data)) > len(before)
    assert {name: (data / name).read_bytes() for name in before} == before
    numbers = [number for index in range(len(shard_paths(data))) for number in shard(data, index)["numbers"].tolist()]
    assert len(numbers) == len(set(numbers))


def test_what_is_done_is_told_long_before_a_shard_is_full(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distill, "PROGRESS_SECONDS", 0.0)  # a line behind every pass
    assert write_data(model, tmp_path / "self", 1) == 0
    lines = capsys.readouterr().err.splitlines()
    begin = lines.index("writing 8 conversations at a time, stored 64 by 64")
    (full,) = (index for index, line in enumerate(lines) if line.startswith("1 shard, "))
    told = [
        re.fullmatch(r"(\d+) of 64 conversations of a shard, \d+ tokens/s", line) for line in lines[begin + 1 : full]
    ]
    done = [int(match[1]) for match in told if match]
    assert len(done) == len(told) and done == sorted(done) and done[0] == 0 and done[-1] > 50


def test_data_of_another_recipe_is_not_mixed_in(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_data(model, data, 10 * OWNED, "--seed", "7") == 1
    assert "other settings" in capsys.readouterr().err


def test_prompt_file_gives_the_first_turns(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n" * 30)
    assert write_data(model, tmp_path / "data", 10**9, "--prompts", str(tmp_path / "prompts.txt")) == 0
    stored = shard(tmp_path / "data")
    assert stored["numbers"].max() < 90
    assert stored["owned"].any()


def test_labels_are_the_written_tokens_at_each_heads_offset(data: Path) -> None:
    features = load_features(shard_paths(data), 2).training
    assert len(features)
    known = features.labels != IGNORED
    # At temperature 0 the label is the target's own first choice, which the stored distribution must name.
    first = features.top_ids[:, :, 0] == features.labels
    assert (first & known).sum() > known.sum() // 3
    assert (features.top_probabilities.sum(axis=2) <= 1.001).all()


def test_inputs_are_trained_on_where_asked_and_never_scored(data: Path) -> None:
    owned, every = (load_features(shard_paths(data), 2, train_on_inputs=flag) for flag in (False, True))
    shards = [shard(data, index) for index in range(len(shard_paths(data)))]
    trained = [
        length
        for part in shards
        for number, length in zip(part["numbers"], part["lengths"], strict=True)
        if number % 40
    ]
    assert (every.training.labels[:, 0] != IGNORED).sum() == sum(length - 2 for length in trained)
    assert (every.training.labels != IGNORED).sum() > (owned.training.labels != IGNORED).sum()
    assert (every.held_out.labels == owned.held_out.labels).all()


def test_folders_are_trained_on_together(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    one, two = (load_features(shard_paths(*folders), 2) for folders in ([data], [data, copy]))
    assert [len(part) for part in two] == [2 * len(part) for part in one]
    with pytest.raises(UserError, match="no feature shards here"):
        shard_paths(data, tmp_path)
