"""Medusa-2 through transformers' Trainer: stages, rates, accumulation, resuming, logs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from medusa2_cases import (
    HEADS,
    LENGTH,
    conversations,
    new_model,
    new_trainer,
    rows_of,
    save_base,
    save_shard,
    shake,
    tensors,
)
from safetensors.torch import load_file

from medusa_engine.runtime.errors import UserError
from medusa_engine.training.example import Example
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.medusa2_model import Medusa2
from medusa_engine.training.medusa2_trainer import STATE_FILE


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def frozen_bytes(model: Medusa2) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in model.named_parameters() if not t.requires_grad}


def adapter(model: Medusa2) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.trained_state().items() if "lora_" in name}


def heads(model: Medusa2) -> torch.Tensor:
    return model.heads.residual_weight.detach().clone()


def test_first_stage_trains_the_heads_alone_and_the_second_both(base: Path, tmp_path: Path) -> None:
    model = new_model(base)
    frozen, started = frozen_bytes(model), adapter(model)
    seen: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []
    graded: list[list[bool]] = []
    trainer = new_trainer(model, rows_of(conversations(64)), tmp_path, warmup_steps=3, weight_decay=0.1)
    step = trainer.training_step

    def observed_step(*arguments: object, **named: object) -> torch.Tensor:
        seen.append((adapter(model), heads(model)))
        loss = step(*arguments, **named)
        lora = [tensor for name, tensor in model.named_parameters() if "lora_" in name]
        graded.append([tensor.grad is not None for tensor in lora])
        return loss

    trainer.training_step = observed_step  # type: ignore[method-assign]
    trainer.train()
    assert len(seen) > 6
    assert not any(any(step) for step in graded[:3]) and all(all(step) for step in graded[3:])
    for now, _ in seen[:4]:  # before the first step and behind the first three
        assert all(torch.equal(now[name], tensor) for name, tensor in started.items())
    assert not any(tensor.any() for name, tensor in seen[3][0].items() if "lora_B" in name)
    assert not torch.equal(seen[1][1], seen[0][1])  # the heads move in both stages
    assert not torch.equal(seen[-1][1], seen[3][1])
    final = adapter(model)
    assert all(not torch.equal(final[name], tensor) for name, tensor in started.items())
    assert frozen_bytes(model) == frozen


def test_base_weights_keep_their_bytes_in_training(base: Path, tmp_path: Path) -> None:
    before = (base / "model.safetensors").read_bytes()
    model = new_model(base)
    new_trainer(model, rows_of(conversations(24)), tmp_path, distilled=True, lambda_0=0.01).train()
    stored = load_file(base / "model.safetensors")
    named = {name.replace(".base_layer", ""): tensor for name, tensor in model.backbone.named_parameters()}
    for name, tensor in stored.items():
        assert torch.equal(named[f"base_model.model.{name}"], tensor), name
    assert (base / "model.safetensors").read_bytes() == before


def test_heads_learn_four_times_as_fast_as_the_backbone(base: Path, tmp_path: Path) -> None:
    model = new_model(base)
    trainer = new_trainer(model, rows_of(conversations(8)), tmp_path, warmup_steps=20, learning_rate=1e-3)
    trainer.create_optimizer_and_scheduler(100)
    groups = trainer.optimizer.param_groups
    assert [group["initial_lr"] for group in groups] == [1e-3, 4e-3]
    assert [id(p) for p in groups[1]["params"]] == [id(model.heads.residual_weight), id(model.heads.residual_bias)]
    assert len(groups[0]["params"]) == len(adapter(model))
    rates = []
    for _ in range(100):
        rates.append([group["lr"] for group in groups])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert all(backbone == 0 and 0 < head <= 4e-3 for backbone, head in rates[:20])
    assert all(head == pytest.approx(4 * backbone) and backbone > 0 for backbone, head in rates[20:])
    assert max(backbone for backbone, _ in rates) == pytest.approx(1e-3, rel=0.02)
    assert rates[99][0] < 1e-5


@pytest.mark.parametrize("distilled", [False, True])
def test_accumulated_batches_give_the_loss_and_weights_of_the_whole_batch(
    base: Path, tmp_path: Path, distilled: bool
) -> None:
    rows = rows_of(conversations(48))[:34]
    counts = [int(row.owned.sum()) for row in rows]
    assert max(counts) > 3 * min(counts)  # else means of means would pass
    assert len(rows) % 4  # the last batch is a small one
    results = []
    for accumulate in (1, 2, 4):
        trainer = new_trainer(
            shake(new_model(base)),
            rows,
            tmp_path / str(accumulate),
            per_device_train_batch_size=4 // accumulate,
            gradient_accumulation_steps=accumulate,
            num_train_epochs=2,
            warmup_steps=2,
            distilled=distilled,
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        results.append((trainer.model.trained_state(), logs))
    (whole, whole_logs), *others = results
    assert len(whole_logs) == 2 * -(-len(rows) // 4)
    for state, logs in others:
        for name, tensor in whole.items():
            assert torch.allclose(state[name], tensor, atol=1e-5, rtol=0), name
        for entry, expected in zip(logs, whole_logs, strict=True):
            assert entry.pop("epoch")  # counted in parts by transformers
            for name, value in entry.items():
                assert value == pytest.approx(expected[name], abs=1e-4 if name == "grad_norm" else 1e-5), name


# Threads of a process group that is left behind abort a process that exits while one of them works.
TRAIN = """
import sys
from pathlib import Path
from medusa_engine.training.train_cli import main
code = main()
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("left:", [name for name in threads if "gloo" in name], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
def test_two_processes_give_the_loss_and_weights_of_one(base: Path, tmp_path: Path) -> None:
    data = save_shard(tmp_path / "data", conversations(32))
    (tmp_path / "train.py").write_text(TRAIN)
    command = [tmp_path / "train.py", "--method", "medusa-2-distill", "--model", base]
    command += ["--data", data, "--heads", HEADS, "--lora-rank", 4, "--max-length", LENGTH, "--warmup-steps", 2]
    for argument in ("use_cpu=true", "logging_steps=1", "dataloader_drop_last=true", "save_strategy=no"):
        command += ["--trainer", argument]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    results = []
    for name, start, processes in (("one", [], 1), ("two", launch, 2)):
        arguments = [sys.executable, *start, *command, "--batch", 4 // processes, "-o", tmp_path / name]
        done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{tmp_path / name}\n"
        assert done.stderr.count("left: []") == processes
        log = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        results.append((load_file(tmp_path / name / "adapter_model.safetensors"), log[:-1]))
    (weights, log), (other_weights, other_log) = results
    assert any(entry["backbone_loss"] > 0 for entry in log)
    assert all(torch.allclose(other_weights[name], tensor, atol=1e-5) for name, tensor in weights.items())
    for entry, other in zip(log, other_log, strict=True):
        assert other == {key: pytest.approx(value, abs=1e-4) for key, value in entry.items()}


def test_loss_of_a_step_is_that_of_its_batch_worked_out_row_by_row(base: Path, tmp_path: Path) -> None:
    rows = rows_of(conversations(12))[:4]
    model = shake(new_model(base))
    with torch.no_grad():
        parts = [model(**tensors(row), heads_only=False, distilled=False)[0] for row in rows]
    counts = sum((tensors(row)["labels"] != IGNORED).sum(dim=(0, 1)) for row in rows)
    means = (sum(parts) / counts).tolist()
    expected = means[0] + 0.2 * sum(0.8 ** (head + 1) * means[head + 1] for head in range(HEADS))
    trainer = new_trainer(model, rows, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert [trainer.state.log_history[0][f"head_{head}_loss"] for head in range(HEADS)] == pytest.approx(means[1:])
    assert trainer.state.log_history[0]["backbone_loss"] == pytest.approx(means[0])


@pytest.mark.parametrize("stopped", [2, 5], ids=["in the first stage", "in the second"])
def test_resumed_training_ends_at_the_weights_of_an_uninterrupted_one(base: Path, tmp_path: Path, stopped: int) -> None:
    rows = rows_of(conversations(40))
    settings = {"save_strategy": "steps", "save_steps": stopped, "warmup_steps": 3, "num_train_epochs": 2}
    whole = new_model(base)
    trainer = new_trainer(whole, rows, tmp_path, **settings)
    trainer.train()
    assert trainer.state.max_steps > stopped + 2
    folder = tmp_path / f"checkpoint-{stopped}"
    resumed = shake(new_model(base))  # what it starts from does not matter
    assert sorted(load_file(folder / STATE_FILE)) == sorted(resumed.trained_state())
    new_trainer(resumed, rows, tmp_path / "again", **settings).train(resume_from_checkpoint=str(folder))
    for name, tensor in whole.trained_state().items():
        assert torch.allclose(resumed.trained_state()[name], tensor, atol=1e-7), name
        assert not torch.equal(load_file(folder / STATE_FILE)[name], tensor) or "lora" in name


def test_checkpoint_of_other_heads_is_refused(base: Path, tmp_path: Path) -> None:
    rows = rows_of(conversations(8))
    settings = {"save_strategy": "steps", "save_steps": 1}
    new_trainer(new_model(base), rows, tmp_path, **settings).train()
    other = Medusa2(new_model(base).backbone, heads=HEADS + 1, layers=1)
    with pytest.raises(UserError, match="other shapes"):
        new_trainer(other, rows, tmp_path / "b").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (tmp_path / "checkpoint-1" / STATE_FILE).unlink()
    with pytest.raises(UserError, match="no such file"):
        new_trainer(new_model(base), rows, tmp_path / "c").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_first_stage_that_leaves_no_second_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--warmup-steps 50"):
        new_trainer(new_model(base), rows_of(conversations(8)), tmp_path, warmup_steps=50).train()


def test_a_periodic_text_is_learned_and_the_log_says_so(base: Path, tmp_path: Path) -> None:
    cycle = np.tile(np.array([3, 17, 9, 40, 22]), 6)
    examples = [Example(cycle[start : start + 20].copy(), np.ones(20, dtype=np.bool_)) for start in range(5)] * 8
    trainer = new_trainer(
        new_model(base), rows_of(examples), tmp_path, num_train_epochs=10, learning_rate=5e-3, warmup_steps=10
    )
    trainer.train()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    first, last = log[0], [entry for entry in log if "loss" in entry][-1]
    for part in ("backbone", *(f"head_{head}" for head in range(HEADS))):
        assert last[f"{part}_top1"] > 0.95 > 0.5 > first[f"{part}_top1"]
        assert first[f"{part}_top1"] <= first[f"{part}_top5"] <= 1
        assert last[f"{part}_loss"] < 0.2 * first[f"{part}_loss"]
