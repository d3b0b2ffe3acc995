"""What medusa-train --method medusa-2 writes: it runs as it is, and heads are never parted from their backbone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoints import CHAT_VOCAB, save_llama, write_tree
from command_checks import Commands, check_refused, contents, unchanged
from greedy_check import check_greedy
from medusa2_cases import conversations, save_shard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import greedy_ids
from transformers import AutoModelForCausalLM

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.backbone import check_backbone
from medusa_engine.exporter.head_checkpoint import HEAD_FILES, read_checkpoint
from medusa_engine.exporter.heads_cli import main as medusa_heads
from medusa_engine.runtime.engine import Engine
from medusa_engine.training.train_cli import main as medusa_train

HEADS_FILE = HEAD_FILES[0]
PROMPTS = ([5, 17, 9], [1], [60, 2, 2, 33, 8])
SMALL = ("--max-length", "64", "--top-k", "4", "--max-tree-nodes", "8")
TRAINING = ("--heads", 3, "--layers", 2, "--lora-rank", 4, "--lora-alpha", 8, "--epochs", 3, "--batch", 4)
TRAINING += ("--accumulate", 2, "--warmup-steps", 2, "--max-length", 32, "--learning-rate", 0.02)


class Trained(NamedTuple):
    """A base, data for it, and the two releases of one training."""

    base: Path
    data: Path
    adapter: Path
    merged: Path


def train(*arguments: object) -> int:
    return medusa_train([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    base = save_llama(folder / "base", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_bos_twice")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.5}')
    data = save_shard(folder / "data", conversations(40))
    before = contents(base)
    arguments = ("--method", "medusa-2", "--model", base, "--data", data, *TRAINING)
    assert train(*arguments, "-o", folder / "adapter", "--seed", 3) == 0
    assert train(*arguments, "-o", folder / "merged", "--seed", 3, "--merge") == 0
    assert contents(base) == before
    return Trained(base, data, folder / "adapter", folder / "merged")


def transformers_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def check_answers(bundle: Path, model: Any) -> None:
    engine = Engine.open(bundle, threads=1)
    for prompt in PROMPTS:
        reference = greedy_ids(model, prompt, 24)
        for speculation in (True, False):
            answer = engine.generate(
                prompt_ids=prompt, max_new_tokens=24, ignore_eos=True, speculation=speculation
            ).token_ids
            check_greedy(answer, reference, prompt, model)


def test_merged_release_is_a_whole_model_that_export_takes(
    trained: Trained, tmp_path: Path, commands: Commands
) -> None:
    bundle, tree = tmp_path / "bundle", write_tree(tmp_path / "tree.json")
    commands.export("--model", trained.merged, "--tree", tree, "-o", bundle, *SMALL)
    merged = transformers_model(trained.merged)
    check_answers(bundle, merged)
    base = transformers_model(trained.base)
    assert any(greedy_ids(merged, prompt, 24) != greedy_ids(base, prompt, 24) for prompt in PROMPTS)
    heads = read_checkpoint(trained.merged)
    assert (heads.format.name, heads.weights.heads, heads.weights.layers) == ("medusa-2", 3, 2)
    assert heads.weights.residual_weight.any()
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["heads"]["trained"] and manifest["limits"]["heads"] == 3
    assert json.loads((bundle / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    assert (trained.merged / "tokenizer.json").is_file()
    assert Engine.open(bundle).tokenizer is not None


def test_adapter_is_merged_when_it_is_loaded(trained: Trained) -> None:
    source = checkpoint.find_source(str(trained.adapter))
    assert (source.folder, source.heads) == (trained.base, trained.adapter)
    loaded, merged = checkpoint.load_model(source).state_dict(), load_file(trained.merged / "model.safetensors")
    assert {name for name in merged if not name.startswith("medusa_head.")} == set(loaded)
    for name, tensor in loaded.items():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name


@pytest.mark.slow
def test_adapter_release_is_exported_merged(trained: Trained, tmp_path: Path, commands: Commands) -> None:
    bundle, tree = tmp_path / "bundle", write_tree(tmp_path / "tree.json")
    commands.export("--model", trained.adapter, "--tree", tree, "-o", bundle, *SMALL)
    check_answers(bundle, transformers_model(trained.merged))
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert sorted(manifest["model"]["weights_sha256"]) == ["adapter_model.safetensors", "model.safetensors"]
    assert manifest["model"]["name"] == "adapter"
    same = read_checkpoint(trained.adapter).weights, read_checkpoint(trained.merged).weights
    assert torch.allclose(same[0].residual_weight.float(), same[1].residual_weight, atol=1e-3)


def test_release_holds_what_it_should(trained: Trained) -> None:
    adapter = {path.name for path in trained.adapter.iterdir() if path.is_file()}
    assert adapter == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "log.jsonl",
        "training.json",
        "training.png",
        HEADS_FILE,
    }
    merged = {path.name for path in trained.merged.iterdir() if path.is_file()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "log.jsonl"} <= merged
    assert not {"adapter_model.safetensors", HEADS_FILE} & merged
    assert json.loads((trained.adapter / "config.json").read_text())["base_model_name_or_path"] == str(trained.base)
    stored, whole = load_file(trained.base / "model.safetensors"), load_file(trained.merged / "model.safetensors")
    assert {name for name in whole if not name.startswith("medusa_head.")} == set(stored)
    changed = {name for name, tensor in stored.items() if not torch.equal(whole[name], tensor)}
    assert changed == {name for name in stored if "_proj" in name}


def test_distilled_release_stays_closer_to_the_base(trained: Trained, tmp_path: Path) -> None:
    arguments = ("--method", "medusa-2-distill", "--model", trained.base, "--data", trained.data, *TRAINING, "--merge")
    assert train(*arguments, "-o", tmp_path / "out", "--seed", 3, "--trainer", "logging_steps=1") == 0
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [entry["backbone_loss"] for entry in log[:3]] == [0, 0, 0]  # the first stage, and the adapter still at zero
    assert log[4]["backbone_loss"] > 0
    base = load_file(trained.base / "model.safetensors")
    changes = [
        sum((load_file(folder / "model.safetensors")[name] - tensor).norm() for name, tensor in base.items())
        for folder in (tmp_path / "out", trained.merged)
    ]
    assert 0 < changes[0] < changes[1]


# Heads without their backbone


@pytest.mark.parametrize("moved", [False, True], ids=["folder", "file alone"])
def test_heads_beside_an_adapter_are_refused_with_the_base(
    trained: Trained, tmp_path: Path, commands: Commands, moved: bool
) -> None:
    heads = trained.adapter
    if moved:
        heads = Path(shutil.copy(trained.adapter / HEADS_FILE, tmp_path / "heads.safetensors"))
    named = heads if moved else heads / HEADS_FILE
    arguments = ("--model", trained.base, "--heads", heads, "--tree", write_tree(tmp_path / "tree.json"))
    with unchanged(tmp_path, trained.base):
        commands.export_refuses(*arguments, "-o", tmp_path / "bundle", *SMALL, named=[named, "LoRA adapter changed"])


def test_adapter_that_was_exchanged_is_refused(trained: Trained, tmp_path: Path, commands: Commands) -> None:
    copy = Path(shutil.copytree(trained.adapter, tmp_path / "copy"))
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, copy / "adapter_model.safetensors")
    arguments = ("--model", copy, "--tree", write_tree(tmp_path / "tree.json"), "-o", tmp_path / "bundle")
    commands.export_refuses(*arguments, *SMALL, named=[copy / HEADS_FILE, "another adapter"])


def test_adapter_that_is_damaged_is_refused(trained: Trained, tmp_path: Path, commands: Commands) -> None:
    copy = Path(shutil.copytree(trained.adapter, tmp_path / "copy"))
    tensors = load_file(copy / "adapter_model.safetensors")
    left_out = min(tensors)
    save_file({n: t for n, t in tensors.items() if n != left_out}, copy / "adapter_model.safetensors")
    arguments = ("--model", copy, "--tree", write_tree(tmp_path / "tree.json"), "-o", tmp_path / "bundle")
    commands.export_refuses(*arguments, *SMALL, named=[copy / "adapter_model.safetensors", "cannot merge", left_out])
    (copy / "adapter_config.json").write_text("{}")
    commands.export_refuses(*arguments, *SMALL, named=[copy / "adapter_model.safetensors", "cannot merge"])
    (copy / "adapter_model.safetensors").write_bytes(b"")
    commands.export_refuses(*arguments, *SMALL, named=[copy / "adapter_model.safetensors", "empty"])


def test_adapter_whose_base_has_gone_is_refused(trained: Trained, tmp_path: Path, commands: Commands) -> None:
    copy = Path(shutil.copytree(trained.adapter, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/base"}))
    arguments = ("--model", copy, "--tree", write_tree(tmp_path / "tree.json"), "-o", tmp_path / "bundle")
    commands.export_refuses(*arguments, *SMALL, named=[copy / "config.json", "base_model_name_or_path"])


def test_heads_of_a_whole_model_are_refused_with_the_base(trained: Trained, tmp_path: Path, commands: Commands) -> None:
    arguments = ("--model", trained.base, "--heads", trained.merged, "--tree", write_tree(tmp_path / "tree.json"))
    with unchanged(tmp_path):
        commands.export_refuses(
            *arguments, "-o", tmp_path / "bundle", *SMALL, named=[trained.merged / "model.safetensors", "backbone"]
        )


@pytest.mark.parametrize("layout", ["original", "vllm", "medusa-2"])
@pytest.mark.parametrize("release", ["adapter", "merged"])
def test_heads_are_not_converted_away_from_a_changed_backbone(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str], release: str, layout: str
) -> None:
    folder = trained.adapter if release == "adapter" else trained.merged
    file = folder / (HEADS_FILE if release == "adapter" else "model.safetensors")
    for base in ([], ["--base", str(trained.base)]):
        capfd.readouterr()
        status = medusa_heads(
            ["convert", str(folder), "--to", layout, "-o", str(tmp_path / "heads.safetensors"), *base]
        )
        check_refused(status, capfd.readouterr().err, "medusa-heads", file, "backbone")
    assert not list(tmp_path.iterdir())


def test_heads_of_a_whole_model_with_an_unchanged_backbone_are_heads_of_the_base(
    trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = Path(shutil.copytree(trained.merged, tmp_path / "whole"))
    own = {n: t for n, t in load_file(whole / "model.safetensors").items() if n.startswith("medusa_head.")}
    backbone = {n: t.half() for n, t in load_file(trained.base / "model.safetensors").items()}  # rounding is no change
    save_file({**backbone, **own}, whole / "model.safetensors", {"format": "pt"})
    output = tmp_path / "heads.safetensors"
    convert = ["convert", str(whole), "--to", "original", "-o", str(output)]
    status = medusa_heads(convert)
    check_refused(status, capfd.readouterr().err, "medusa-heads", whole / "model.safetensors", "backbone")
    assert medusa_heads([*convert, "--base", str(trained.base)]) == 0
    assert read_checkpoint(output).checksum == read_checkpoint(whole).checksum
    for heads in (whole, output):
        check_backbone(read_checkpoint(heads).weights, checkpoint.find_source(str(trained.base)).weight_files())


def test_heads_file_names_its_adapter_in_its_header(trained: Trained) -> None:
    with safe_open(trained.adapter / HEADS_FILE, framework="pt") as file:
        assert len(file.metadata()["medusa_adapter_sha256"]) == 64
    assert any("adapter" in note for note in read_checkpoint(trained.adapter).notes)


# What is refused before anything is trained


def refused(capfd: pytest.CaptureFixture[str], *arguments: object, named: list[str | Path]) -> None:
    capfd.readouterr()
    status = train(*arguments)
    check_refused(status, capfd.readouterr().err, "medusa-train", *named)


@pytest.fixture(scope="module")
def small_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_llama(folder / "base")
    save_shard(folder / "data", conversations(12))
    return folder


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--method", "medusa-2", "--soft", "1"), "--soft"),
        (("--method", "medusa-2", "--draft-vocabulary", "9"), "--draft-vocabulary"),
        (("--lora-rank", "4"), "--lora-rank"),
        (("--merge",), "--merge"),
        (("--method", "medusa-2", "--batch", "5", "--accumulate", "2"), "--accumulate 2"),
        (("--method", "medusa-2", "--lora-rank", "0"), "--lora-rank is 0"),
        (("--method", "medusa-2", "--lambda", "-1"), "--lambda is -1"),
        (("--method", "medusa-2", "--resume"), "no checkpoint"),
        (("--method", "medusa-2", "--resume", "nowhere"), "nowhere"),
        (("--method", "medusa-2", "--trainer", "save_steps"), "save_steps"),
        (("--method", "medusa-2", "--trainer", "no_such_argument=1"), "no_such_argument"),
        (("--method", "medusa-2", "--warmup-steps", "1000"), "--warmup-steps 1000"),
    ],
)
def test_options_that_do_not_go_together(
    small_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], named: str
) -> None:
    arguments = ("--model", small_base / "base", "--data", small_base / "data", "-o", tmp_path / "out", *options)
    refused_lines(capfd, arguments, named)


def refused_lines(capfd: pytest.CaptureFixture[str], arguments: tuple[object, ...], named: str | Path) -> None:
    """As `refused`, but there may be lines of progress before."""
    capfd.readouterr()
    status = train(*arguments)
    lines = capfd.readouterr().err.splitlines()
    assert status == 1 and not any("Traceback" in line for line in lines)
    check_refused(status, "\n".join(lines[-2:]), "medusa-train", named)


def test_output_that_holds_a_model_or_another_run_is_left_alone(
    trained: Trained, small_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--method", "medusa-2", "--model", small_base / "base", "--data", small_base / "data", *TRAINING)
    with unchanged(small_base, trained.merged):
        refused(capfd, *arguments, "-o", small_base / "base", named=[small_base / "base", "a model already"])
        refused(capfd, *arguments, "-o", trained.merged, named=[trained.merged, "an earlier run"])


def test_adapter_release_is_no_base(trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--method", "medusa-2", "--model", trained.adapter, "--data", trained.data, "-o", tmp_path / "out")
    refused(capfd, *arguments, named=[trained.adapter, "not a base model"])


def test_data_that_does_not_fit(small_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    examples = conversations(3)
    foreign = save_shard(tmp_path / "foreign", [e._replace(tokens=e.tokens + 100) for e in examples])
    silent = save_shard(tmp_path / "silent", [e._replace(owned=np.zeros_like(e.owned)) for e in examples])
    for data, named in ((foreign, "vocabulary"), (silent, "no conversation")):
        arguments = ("--method", "medusa-2", "--model", small_base / "base", "--data", data, "-o", tmp_path / "out")
        refused(capfd, *arguments, named=[data, named])


def test_resumed_command_writes_the_release_of_an_uninterrupted_one(
    small_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--method", "medusa-2", "--model", small_base / "base", "--data", small_base / "data", *TRAINING)
    arguments += ("--trainer", "save_steps=3", "--trainer", "save_total_limit=9")
    assert train(*arguments, "-o", tmp_path / "whole") == 0
    (tmp_path / "parts").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "parts" / "checkpoint-3")
    shutil.copy(tmp_path / "whole" / "training.json", tmp_path / "parts")
    other = ("--lambda", 0.5, "-o", tmp_path / "parts", "--resume")
    assert train(*arguments, *other) == 1
    assert "the run began with another value of lambda_0" in capsys.readouterr().err
    assert train(*arguments, "-o", tmp_path / "parts", "--resume") == 0
    for name in ("adapter_model.safetensors", HEADS_FILE):
        whole, parts = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
        assert all(torch.allclose(parts[key], tensor, atol=1e-6) for key, tensor in whole.items())
