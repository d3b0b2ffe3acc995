"""Heads trained on a periodic sequence are right at their own offset, from the saved file through export and engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny_models import RIGGED_VOCAB, greedy_ids, rigged_model, save_rigged
from transformers import AutoModelForCausalLM

from medusa_engine.exporter.cli import main as medusa_export
from medusa_engine.exporter.head_checkpoint import load_heads, read_checkpoint
from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.training.features import load_features, shard_paths
from medusa_engine.training.medusa1 import HeadTrainer
from medusa_engine.training.medusa1_settings import TrainSettings
from medusa_engine.training.train_cli import main as medusa_train
from medusa_engine.training.training_log import TrainingLog
from medusa_engine.training.vocabulary import Vocabulary

HEADS, LENGTH, CONVERSATIONS = 3, 30, 80


class Periodic(NamedTuple):
    """A model that walks a cycle, and feature shards of its walk."""

    folder: Path
    data: Path
    model: Any


@pytest.fixture(scope="module")
def periodic(tmp_path_factory: pytest.TempPathFactory) -> Periodic:
    folder = tmp_path_factory.mktemp("periodic")
    rigged = rigged_model()
    save_rigged(folder / "model", rigged)
    (folder / "model" / "medusa_lm_head.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    walks = np.array(
        [[start % RIGGED_VOCAB, *rigged.answer([start % RIGGED_VOCAB], LENGTH - 1)] for start in range(CONVERSATIONS)]
    )
    with torch.no_grad():
        hidden = model.model(torch.from_numpy(walks)).last_hidden_state
        top = torch.log_softmax(model.lm_head(hidden), dim=-1).topk(8, dim=-1)
    (folder / "data").mkdir()
    np.savez(
        folder / "data" / "shard-00000.npz",
        numbers=np.arange(CONVERSATIONS),
        lengths=np.full(CONVERSATIONS, LENGTH),
        tokens=walks.reshape(-1).astype(np.int32),
        owned=np.ones(walks.size, dtype=np.bool_),
        hidden=hidden.reshape(walks.size, -1).numpy().astype(np.float16),
        top_ids=top.indices.reshape(-1, 8).numpy().astype(np.int32),
        top_logprobs=top.values.reshape(-1, 8).numpy().astype(np.float16),
    )
    made_from = {"target_sha256": {"model.safetensors": file_sha256(folder / "model" / "model.safetensors")}}
    (folder / "data" / "data.json").write_text(json.dumps(made_from))
    return Periodic(folder / "model", folder / "data", model)


VARIANTS = {
    "shared projection": [],
    "draft vocabulary, no biases": ["--draft-vocabulary", RIGGED_VOCAB, "--no-bias"],
    "own projections": ["--own-projection"],
    "bfloat16": ["--dtype", "bfloat16"],
}


@pytest.fixture(scope="module", params=VARIANTS)
def trained(request: pytest.FixtureRequest, periodic: Periodic, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = tmp_path_factory.mktemp("heads")
    variant = VARIANTS[request.param]
    arguments = ["--model", periodic.folder, "--data", periodic.data, "-o", heads, "--heads", HEADS]
    arguments += ["--epochs", 40, "--batch", 128, "--learning-rate", 0.02, "--weight-decay", 0]
    arguments += variant if "--dtype" in variant else [*variant, "--dtype", "float32"]
    assert medusa_train(list(map(str, arguments))) == 0
    return heads


def test_saved_heads_are_right_at_their_own_offset_and_wrong_at_the_neighbours(
    trained: Path, periodic: Periodic
) -> None:
    rigged = rigged_model()
    weights = load_heads(trained, hidden=periodic.model.config.hidden_size, vocab_size=RIGGED_VOCAB)
    heads = MedusaHeads(weights, periodic.model.lm_head)
    tokens = torch.arange(RIGGED_VOCAB)[:, None]
    with torch.no_grad():
        hidden = periodic.model.model(tokens).last_hidden_state[:, 0]
        ranked = np.stack([heads.rank(row[None], 1)[:, 0].numpy() for row in hidden])  # [V, K]
    for head in range(HEADS):
        for offset in range(1, HEADS + 3):
            wanted = np.array([rigged.answer([token], offset)[-1] for token in range(RIGGED_VOCAB)])
            accuracy = (ranked[:, head] == wanted).mean()
            if offset == head + 2:  # the LM head owns offset 1
                assert accuracy >= 0.99, (head, accuracy)
            else:
                assert accuracy <= 0.1, (head, offset, accuracy)


def test_every_round_of_the_exported_engine_accepts_the_full_depth(
    trained: Path, periodic: Periodic, tmp_path: Path
) -> None:
    (tmp_path / "tree.json").write_text(json.dumps([[0] * depth for depth in range(1, HEADS + 1)]))
    arguments = ["--model", periodic.folder, "--heads", trained, "--tree", tmp_path / "tree.json", "-o", tmp_path / "b"]
    assert medusa_export(list(map(str, arguments))) == 0
    answer = Engine.open(tmp_path / "b").generate(prompt_ids=[5], max_new_tokens=40, adaptive=False)
    assert answer.token_ids == greedy_ids(periodic.model, [5], 40)
    assert answer.published_per_round == [HEADS + 1] * (40 // (HEADS + 1))


def test_what_is_saved_names_its_base_and_its_shape(
    trained: Path, periodic: Periodic, request: pytest.FixtureRequest
) -> None:
    checkpoint = read_checkpoint(trained)
    assert (checkpoint.weights.heads, checkpoint.weights.layers) == (HEADS, 1)
    assert checkpoint.base == str(periodic.folder)
    facts = json.loads((trained / "training.json").read_text())
    assert [list(data) for data in facts["data"]] == [["target_sha256"]]
    assert facts["settings"]["heads"] == HEADS
    assert min(facts["held_out"]["top1"]) >= 0.99
    assert checkpoint.biases == ("no biases" not in request.node.name) == bool(checkpoint.weights.residual_bias.any())
    own = "own projections" in request.node.name
    assert (checkpoint.weights.projection is not None) == own
    if own:
        assert checkpoint.weights.projection.shape == (HEADS, RIGGED_VOCAB, checkpoint.weights.hidden)
    assert not [note for note in checkpoint.notes if "config.json" in note]


def test_training_leaves_its_log_and_a_plot(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    epochs = [record for record in records if "held_out_loss" in record]
    assert min(len(epochs[-1][name]) for name in ("head_loss", "top1", "top5")) == HEADS
    assert epochs[0]["held_out_loss"] > 2 * epochs[-1]["held_out_loss"]
    assert min(epochs[-1]["top1"]) >= 0.99
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def test_progress_is_reported_by_head_while_training(periodic: Periodic, tmp_path: Path) -> None:
    lines: list[str] = []
    log = TrainingLog(tmp_path, HEADS, report=lines.append)
    vocabulary = Vocabulary(periodic.model.lm_head.weight.detach().clone(), None)
    paths = shard_paths(periodic.data)
    training, held_out = load_features(paths, HEADS)
    HeadTrainer(TrainSettings(heads=HEADS, epochs=1, batch=16), vocabulary, tmp_path, log).run(training, held_out)
    progress = [line for line in lines if "batch 50/" in line]
    assert len(progress) == 1
    assert progress[0].count("/") == 2 + HEADS, "batch of batches, top-1/top-5, one pair per head"


def test_training_with_other_settings_does_not_go_on_from_a_state(
    periodic: Periodic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", periodic.folder, "--data", periodic.data, "-o", tmp_path / "heads", "--epochs", 1]
    assert medusa_train([*map(str, arguments), "--heads", "2"]) == 0
    before = (tmp_path / "heads" / "medusa_lm_head.safetensors").read_bytes()
    assert medusa_train([*map(str, arguments), "--heads", "3"]) == 1
    error = capsys.readouterr().err
    assert "state.pt: was written by training with another value of heads" in error
    assert "Traceback" not in error
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").read_bytes() == before


def test_damaged_state_is_refused(periodic: Periodic, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state.pt").write_bytes(b"not a state")
    arguments = ["--model", periodic.folder, "--data", periodic.data, "-o", tmp_path, "--epochs", 1]
    assert medusa_train(list(map(str, arguments))) == 1
    assert "state.pt: damaged" in capsys.readouterr().err


def trainer(periodic: Periodic, folder: Path, **settings: Any) -> HeadTrainer:
    folder.mkdir(exist_ok=True)
    projection = periodic.model.lm_head.weight.detach().clone()
    chosen = TrainSettings(heads=HEADS, **settings)
    log = TrainingLog(folder, HEADS, report=lambda _line: None)
    return HeadTrainer(chosen, Vocabulary(projection, None), folder, log)


def test_untrained_heads_repeat_the_lm_head(periodic: Periodic, tmp_path: Path) -> None:
    heads = trainer(periodic, tmp_path / "a").heads
    with torch.no_grad():
        hidden = periodic.model.model(torch.tensor([[3, 9]])).last_hidden_state[0, -1:]
        assert torch.equal(heads(hidden), periodic.model.lm_head(hidden.expand(HEADS, -1)))


def test_accumulated_batches_give_the_weights_of_the_whole_batch(periodic: Periodic, tmp_path: Path) -> None:
    paths = shard_paths(periodic.data)
    training, held_out = load_features(paths, HEADS)
    results = []
    for accumulate in (1, 4):
        run = trainer(periodic, tmp_path / str(accumulate), epochs=1, batch=256, accumulate=accumulate)
        results.append(run.run(training, held_out))
    assert torch.allclose(results[0].residual_weight, results[1].residual_weight, atol=1e-5)
    losses = [json.loads((tmp_path / str(a) / "log.jsonl").read_text())["training_loss"] for a in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_interrupted_training_ends_at_the_weights_of_an_uninterrupted_one(
    periodic: Periodic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_engine.training.medusa1._SAVE_EVERY", 2)
    paths = shard_paths(periodic.data)
    training, held_out = load_features(paths, HEADS)
    whole = trainer(periodic, tmp_path / "whole", epochs=3, batch=256).run(training, held_out)

    class StopHereError(Exception):
        pass

    first = trainer(periodic, tmp_path / "parts", epochs=3, batch=256)
    seen = []

    def stop_inside_an_epoch(epoch: int, number: int, _count: int, _scores: Any) -> None:
        seen.append((epoch, number))
        if (epoch, number) == (1, 4):
            raise StopHereError

    monkeypatch.setattr(first._log, "batch", stop_inside_an_epoch)
    with pytest.raises(StopHereError):
        first.run(training, held_out)
    resumed = trainer(periodic, tmp_path / "parts", epochs=3, batch=256)
    ended = resumed.run(training, held_out)
    assert resumed._step == 3 * len({number for _, number in seen}), "every batch of every epoch, none twice"
    assert torch.allclose(whole.residual_weight, ended.residual_weight, atol=1e-6)
    assert whole.residual_weight.abs().max() > 0


def test_projection_never_changes(periodic: Periodic, tmp_path: Path) -> None:
    paths = shard_paths(periodic.data)
    run = trainer(periodic, tmp_path / "a", epochs=1, batch=512)
    before = run.heads.lm_head.weight.detach().clone()
    run.run(*load_features(paths, HEADS))
    assert torch.equal(run.heads.lm_head.weight, before)
    assert run.heads.lm_head.weight.grad is None


def test_heads_that_training_goes_on_from_keep_being_without_biases(periodic: Periodic, tmp_path: Path) -> None:
    common = ["--model", periodic.folder, "--data", periodic.data, "--epochs", 1]
    first, second = tmp_path / "first", tmp_path / "second"
    assert medusa_train(list(map(str, [*common, "-o", first, "--no-bias"]))) == 0
    assert medusa_train(list(map(str, [*common, "-o", second, "--init", first]))) == 0
    assert not read_checkpoint(second).biases
    umask = os.umask(0)
    os.umask(umask)
    assert (second / "medusa_lm_head.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
