"""What medusa-train and medusa-distill refuse: numbers out of range, damaged data, data of another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CHAT_VOCAB, save_llama
from command_checks import check_refused

from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.training.distill_cli import main as medusa_distill
from medusa_engine.training.shards import KEPT_TOP
from medusa_engine.training.train_cli import main as medusa_train

LENGTH, CONVERSATIONS, HIDDEN = 12, 80, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(
        tmp_path_factory.mktemp("model") / "llama", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_bos_twice"
    )


def arrays() -> dict[str, Any]:
    random = np.random.default_rng(0)
    total = LENGTH * CONVERSATIONS
    return {
        "numbers": np.arange(CONVERSATIONS),
        "lengths": np.full(CONVERSATIONS, LENGTH),
        "tokens": random.integers(0, CHAT_VOCAB, size=total).astype(np.int32),
        "owned": np.ones(total, dtype=np.bool_),
        "hidden": random.normal(size=(total, HIDDEN)).astype(np.float16),
        "top_ids": random.integers(0, CHAT_VOCAB, size=(total, KEPT_TOP)).astype(np.int32),
        "top_logprobs": np.full((total, KEPT_TOP), -3.0, dtype=np.float16),
    }


@pytest.fixture
def data(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "shard-00000.npz", **arrays())
    made_from = {"target_sha256": {"model.safetensors": file_sha256(model / "model.safetensors")}}
    (folder / "data.json").write_text(json.dumps(made_from))
    return folder


@pytest.fixture
def refused(model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Check that medusa-train refuses these options, in two lines of which the first names these words."""

    def check(*options: object, named: list[str], output: Path | None = None) -> None:
        target = output or tmp_path / "heads"
        arguments = ["--model", model, "--data", data, "-o", target, "--epochs", "1", *options]
        capfd.readouterr()
        status = medusa_train([str(argument) for argument in arguments])
        check_refused(status, capfd.readouterr().err, "medusa-train", *named)
        assert not (target / "medusa_lm_head.safetensors").exists()

    return check


def test_data_as_it_should_be_trains(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--model", model, "--data", data, "-o", tmp_path / "heads", "--epochs", 1, "--heads", 2]
    assert medusa_train([str(argument) for argument in arguments]) == 0
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").is_file()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--heads", 0),
        ("--heads", 10_000),
        ("--layers", 0),
        ("--batch", 0),
        ("--accumulate", 100_000),
        ("--learning-rate", "nan"),
        ("--learning-rate", "inf"),
        ("--weight-decay", "inf"),
        ("--soft", 2),
        ("--seed", -1),
        ("--draft-vocabulary", 0),
    ],
)
def test_numbers_out_of_range(refused: Callable[..., None], option: str, value: object) -> None:
    refused(option, value, named=[option])


def test_heads_that_look_past_every_conversation(refused: Callable[..., None]) -> None:
    refused("--heads", LENGTH, named=["no label for head", str(LENGTH - 2)])


def test_training_that_diverges_writes_no_heads(
    model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--data", data, "-o", tmp_path / "heads", "--heads", 2, "--batch", 64]
    assert medusa_train([str(argument) for argument in [*arguments, "--learning-rate", 1e30]]) == 1
    error = capfd.readouterr().err
    assert "training has diverged" in error and "Traceback" not in error  # behind its progress
    assert not (tmp_path / "heads" / "medusa_lm_head.safetensors").exists()


@pytest.mark.parametrize("damage", ["lengths", "hidden", "nan", "negative", "missing", "bytes"])
def test_damaged_shard(refused: Callable[..., None], data: Path, damage: str) -> None:
    path = data / "shard-00000.npz"
    shard = arrays()
    if damage == "lengths":
        shard["lengths"][0] += 1
    elif damage == "hidden":
        shard["hidden"] = shard["hidden"][:, 0]
    elif damage == "nan":
        shard["hidden"][5] = np.nan
    elif damage == "negative":
        shard["tokens"][3] = -1
    elif damage == "missing":
        del shard["owned"]
    np.savez(path, **shard)
    if damage == "bytes":
        path.write_bytes(path.read_bytes()[:1000])
    refused(named=["shard-00000.npz", "damaged"])


def test_likely_tokens_past_the_vocabulary(refused: Callable[..., None], data: Path) -> None:
    shard = arrays()
    shard["top_ids"][7, 3] = CHAT_VOCAB
    np.savez(data / "shard-00000.npz", **shard)
    refused(named=[f"token {CHAT_VOCAB}"])


def test_data_of_another_model(refused: Callable[..., None], data: Path) -> None:
    (data / "data.json").write_text(json.dumps({"target_sha256": {"model.safetensors": "0" * 64}}))
    refused(named=["data.json", "another model"])


def test_data_folder_without_its_manifest(refused: Callable[..., None], data: Path) -> None:
    (data / "data.json").unlink()
    refused(named=["data.json"])


def test_conversation_file_as_data(refused: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}\n")
    refused("--data", tmp_path / "chats.jsonl", named=["chats.jsonl"])


def test_output_that_is_a_file(refused: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(named=["file"], output=tmp_path / "file")


def test_log_of_another_training_is_not_continued(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "heads"
    arguments = ["--model", model, "--data", data, "-o", output, "--epochs", 1]
    assert medusa_train([str(argument) for argument in [*arguments, "--heads", 3]]) == 0
    (output / "state.pt").unlink()
    assert medusa_train([str(argument) for argument in [*arguments, "--heads", 2]]) == 0
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert {len(record["top1"]) for record in records} == {2}


def test_heads_go_on_from_others_of_their_shape(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--model", model, "--data", data, "--epochs", 1, "--dtype", "float32"]
    first, second, frozen = (tmp_path / name for name in ("first", "second", "frozen"))
    begin = [*arguments, "-o", first, "--heads", 2, "--draft-vocabulary", 100, "--learning-rate", 0.05]
    assert medusa_train([str(argument) for argument in begin]) == 0
    go_on = [*arguments, "--init", first]
    assert medusa_train([str(argument) for argument in [*go_on, "-o", frozen, "--learning-rate", 1e-30]]) == 0
    assert (frozen / "medusa_lm_head.safetensors").read_bytes() == (first / "medusa_lm_head.safetensors").read_bytes()
    assert medusa_train([str(argument) for argument in [*go_on, "-o", second]]) == 0
    assert (second / "medusa_lm_head.safetensors").read_bytes() != (first / "medusa_lm_head.safetensors").read_bytes()


@pytest.mark.parametrize("option", [("--heads", 3), ("--draft-vocabulary", 50), ("--own-projection",)])
def test_heads_to_go_on_from_keep_their_shape(
    refused: Callable[..., None], model: Path, data: Path, tmp_path: Path, option: tuple[object, ...]
) -> None:
    first = ["--model", model, "--data", data, "--epochs", 1, "-o", tmp_path / "first", "--heads", 2]
    assert medusa_train([str(argument) for argument in first]) == 0
    refused("--init", tmp_path / "first", *option, named=[str(option[0])])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--seed", "-1"], "--seed"),
        (["--batch", "0"], "--batch"),
        (["--max-length", "1"], "--max-length"),
        (["--max-length", "100000000"], "positions"),
        (["--prompts", "/dev/null"], "no prompts"),
        (["--device", "meta"], "--device"),
    ],
)
def test_distill_refuses(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    status = medusa_distill(["--model", str(model), "-o", str(tmp_path / "data"), *options])
    check_refused(status, capfd.readouterr().err, "medusa-distill", named)
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
