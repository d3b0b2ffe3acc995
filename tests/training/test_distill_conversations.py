"""`medusa-distill --conversations`: from a file of conversations to features that medusa-train reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import CHAT_VOCAB, HIDDEN, POSITIONS, TOKENIZERS, save_llama
from command_checks import check_refused
from transformers import AutoModelForCausalLM

from medusa_engine.exporter.head_checkpoint import load_heads
from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.training.distill_cli import main as medusa_distill
from medusa_engine.training.features import shard_paths
from medusa_engine.training.shards import read_shard
from medusa_engine.training.train_cli import main as medusa_train

CASES = Path(__file__).parents[1] / "data" / "training"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(
        tmp_path_factory.mktemp("model") / "llama", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_no_template"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def distill(model: Path, conversations: Path, output: Path, *options: str) -> int:
    arguments = ["--model", model, "--conversations", conversations, "-o", output, "--device", "cpu"]
    return medusa_distill([*map(str, arguments), "--dtype", "float32", *options])


def test_odd_rows_are_counted_and_the_good_one_is_stored(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(model, CASES / "sharegpt_odd.json", tmp_path / "data") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "used" in line or "skipped" in line] == [
        "1 of 5 rows used",
        "1 skipped: starts with the model",
        "1 skipped: no messages",
        "1 skipped: no answer",
        "1 skipped: empty answer",
    ]
    manifest = json.loads((tmp_path / "data" / "data.json").read_text())
    assert manifest["rows"] == {
        "used": 1,
        "skipped": {"starts with the model": 1, "no messages": 1, "no answer": 1, "empty answer": 1},
    }
    (shard,) = [read_shard(path) for path in shard_paths(tmp_path / "data")]
    text = b"<system>be brief\x02<user>1+1?\x02<assistant>2\x02"  # the stop token is 2
    assert len(shard["tokens"]) == len(text), "each byte is a token here"
    assert np.flatnonzero(shard["owned"]).tolist() == [len(text) - 2, len(text) - 1]
    assert distill(model, CASES / "sharegpt_odd.json", tmp_path / "data") == 0, "it goes on where it was"


def test_medusa_train_learns_from_given_rows(model: Path, tmp_path: Path) -> None:
    rows = (CASES / "cycle7.jsonl").read_text() * 2
    (tmp_path / "rows.jsonl").write_text(rows)
    assert distill(model, tmp_path / "rows.jsonl", tmp_path / "data", "--batch", "7", "--max-length", "30") == 0
    assert {length for path in shard_paths(tmp_path / "data") for length in read_shard(path)["lengths"]} == {30}
    arguments = ["--model", model, "--data", tmp_path / "data", "-o", tmp_path / "heads"]
    arguments += ["--heads", 2, "--epochs", 1, "--batch", 512]
    assert medusa_train(list(map(str, arguments))) == 0
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").is_file()


def test_tokenised_rows_need_no_tokenizer(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "llama")
    assert distill(model, CASES / "pad_is_eos.jsonl", tmp_path / "data") == 0
    (shard,) = [read_shard(path) for path in shard_paths(tmp_path / "data")]
    assert shard["owned"].all() and shard["lengths"].tolist() == [5, 5, 5, 5, 10]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_bad_files_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, damaged = tmp_path / "empty.jsonl", tmp_path / "damaged.jsonl"
    empty.touch()
    damaged.write_text('{"input_ids": [3]}\n{"input_ids": [3}\n')
    unusable = write(tmp_path / "unusable.jsonl", {"messages": []}, {"messages": [{"role": "user", "content": "q"}]})
    outside = write(tmp_path / "outside.jsonl", {"input_ids": [3, CHAT_VOCAB]})
    for path, named in (
        (tmp_path / "none.jsonl", ["cannot read the file"]),
        (tmp_path, ["cannot read the file"]),
        (empty, ["has no rows"]),
        (damaged, ["line 2", "not valid JSON"]),
        (unusable, ["no row can be used", "1 skipped: no messages", "1 skipped: no answer"]),
        (outside, [str(CHAT_VOCAB), "outside the model's vocabulary"]),
    ):
        capsys.readouterr()
        status = distill(model, path, tmp_path / "data")
        check_refused(status, _own_lines(capsys), "medusa-distill", path, *named)
        assert not (tmp_path / "data").exists()


def test_a_model_without_chat_template_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    shutil.copy(TOKENIZERS / "bytelevel_no_template" / "tokenizer_config.json", plain)
    path = CASES / "sharegpt_odd.json"
    capsys.readouterr()
    status = distill(plain, path, tmp_path / "data")
    check_refused(status, _own_lines(capsys), "medusa-distill", path, "no chat template")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--batch", "0"], "--batch 0"),
        (["--max-length", "-1"], "--max-length -1"),
        (["--max-length", str(POSITIONS + 1)], f"{POSITIONS} positions"),
        (["--owned-tokens", "5"], "--owned-tokens: means nothing with --conversations"),
        (["--seed", "0"], "--seed: means nothing with --conversations"),
    ],
)
def test_bad_options_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    status = distill(model, CASES / "cycle7.jsonl", tmp_path / "data", *options)
    check_refused(status, _own_lines(capsys), "medusa-distill", named)
    assert not (tmp_path / "data").exists()


def test_an_output_that_cannot_be_written_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        status = distill(model, CASES / "pad_is_eos.jsonl", output)
        check_refused(status, _own_lines(capsys), "medusa-distill", output, "cannot write there")


def test_given_conversations_and_prompts_exclude_one_another(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        distill(model, CASES / "cycle7.jsonl", tmp_path / "data", "--prompts", "x")
    assert raised.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def _own_lines(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error without the progress of loading, and the report of the rows."""
    lines = capsys.readouterr().err.splitlines()
    return "\n".join(line for line in lines if line.startswith("medusa-distill: ") or "Traceback" in line)


def test_heads_learn_a_cycle_at_their_own_offset(model: Path, tmp_path: Path) -> None:
    """Every token of the cycle fixes all later ones: labels one step off would be learned as well, and score 0 here."""
    data, heads = tmp_path / "data", tmp_path / "heads"
    assert distill(model, CASES / "cycle7.jsonl", data) == 0
    options = ["--heads", 3, "--own-projection", "--soft", 0, "--epochs", 60, "--batch", 128, "--learning-rate", 0.02]
    arguments = ["--model", model, "--data", data, "-o", heads, "--dtype", "float32", "--device", "cpu", *options]
    assert medusa_train(list(map(str, arguments))) == 0
    weights = load_heads(heads, hidden=HIDDEN, vocab_size=CHAT_VOCAB)
    backbone = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.arange(3, 10).repeat(6)[None]  # the cycle is 3 ... 9
    with torch.no_grad():
        hidden = backbone.model(tokens).last_hidden_state[0]
        module = MedusaHeads(weights, backbone.lm_head)
        ranked = torch.stack([module.rank(row[None], 1)[:, 0] for row in hidden])  # [T, K]
    for head in range(3):
        for offset in range(1, 6):
            right = (ranked[:, head] == 3 + (tokens[0] - 3 + offset) % 7).float().mean()
            assert right >= 0.99 if offset == head + 2 else right == 0, (head, offset, right)
