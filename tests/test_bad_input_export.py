"""medusa-export refuses a model that is missing, damaged or of an unknown kind, in two lines, and writes nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ARTIFACTS, edit_json, save_medusa_repository, write_tree
from command_checks import EXPORT, Commands, ExportRefuses, check_refused, offline_environment, unchanged
from safetensors.torch import load_file, save_file

LFS_POINTER = (ARTIFACTS / "lfs_pointer.safetensors").read_bytes()
HTML_PAGE = (ARTIFACTS / "html_page.pt").read_bytes()


@pytest.mark.parametrize("name", ["missing/", "missing/model/folder", "./missing", "missing.gguf", "no such:model"])
def test_model_that_does_not_exist(
    name: str, export_refuses: ExportRefuses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    export_refuses(name, named=[name])


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_hub_id_that_cannot_be_had(environment: dict[str, str], tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree.json")
    command = [*EXPORT, "--model", "nobody/nothing", "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "out"]
    ended = subprocess.run(
        command,
        env=offline_environment(tmp_path / "home") | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    check_refused(ended.returncode, ended.stderr, "medusa-export", "nobody/nothing")
    assert not (tmp_path / "out").exists()


def test_file_that_is_no_model(model_copy: Path, export_refuses: ExportRefuses) -> None:
    export_refuses(model_copy / "model.safetensors", named=[model_copy / "model.safetensors", "a file"])


def test_folder_without_config(model_copy: Path, export_refuses: ExportRefuses) -> None:
    (model_copy / "config.json").unlink()
    export_refuses(model_copy, named=[model_copy, "no config.json", "not a model folder"])


@pytest.mark.parametrize("text", ["", "not JSON", "[]", "null", '{"a": 1, "a": 2}', "{", "[" * 100_000])
def test_config_that_is_no_json_object(text: str, model_copy: Path, export_refuses: ExportRefuses) -> None:
    (model_copy / "config.json").write_text(text)
    export_refuses(model_copy, named=[model_copy / "config.json"])


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "never_heard_of_it", "architectures": ["NeverHeardOfIt"]},
        {"model_type": 7},
        {"model_type": "t5"},
        {"hidden_size": "32"},
        {"hidden_size": 48},
        {"vocab_size": -1},
        {"num_hidden_layers": None},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "never_heard_of_it"}},
    ],
    ids=str,
)
def test_config_of_an_unknown_or_impossible_model(
    values: dict[str, Any], model_copy: Path, export_refuses: ExportRefuses
) -> None:
    edit_json(model_copy / "config.json", **values)
    export_refuses(model_copy, named=[model_copy])


def test_architecture_that_cannot_be_traced(tmp_path: Path, export_refuses: ExportRefuses) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts_per_tok": 1, "pad_token_id": 0}
    config = GptOssConfig(vocab_size=64, num_hidden_layers=1, head_dim=8, num_local_experts=2, **sizes)
    GptOssForCausalLM(config).save_pretrained(tmp_path / "gpt_oss")
    export_refuses(tmp_path / "gpt_oss", named=[tmp_path / "gpt_oss", "GptOssForCausalLM", "attention sinks"])


def test_code_in_the_model_folder_is_not_run_nor_offered_to_be(
    model_copy: Path, tmp_path: Path, export_refuses: ExportRefuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (model_copy / "custom.py").write_text(code)
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    edit_json(model_copy / "config.json", model_type="custom", auto_map=auto_map)
    export_refuses(model_copy, named=[model_copy])


def test_process_ends_in_two_lines_too(model_copy: Path, tmp_path: Path) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    tree = write_tree(tmp_path / "tree.json")
    command = [*EXPORT, "--model", model_copy, "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "out"]
    ended = subprocess.run(command, env=offline_environment(), capture_output=True, text=True, check=False)
    check_refused(ended.returncode, ended.stderr, "medusa-export", model_copy, "model.norm.weight")
    assert ended.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "not JSON", "{}"])
def test_tokenizer_that_is_none(text: str, model_copy: Path, export_refuses: ExportRefuses) -> None:
    (model_copy / "tokenizer.json").write_text(text)
    export_refuses(model_copy, named=[model_copy, "tokenizer"])


@pytest.mark.parametrize("value", ["</s>", -1, [2, None], 2.5])
def test_stop_token_that_is_none(value: object, model_copy: Path, export_refuses: ExportRefuses) -> None:
    edit_json(model_copy / "generation_config.json", eos_token_id=value)
    export_refuses(model_copy, named=[model_copy])


@pytest.mark.parametrize("base", ["", None, 7])
def test_medusa_repository_without_a_base(base: object, tmp_path: Path, export_refuses: ExportRefuses) -> None:
    repository = save_medusa_repository(tmp_path / "medusa", base="")
    edit_json(repository / "config.json", base_model_name_or_path=base)
    export_refuses(repository, "--top-k", "10", named=[repository / "config.json", "names no base model"])


@pytest.mark.parametrize(
    ("base", "named"),
    [
        (".", "not a base model"),
        ("../medusa", "not a base model"),
        ("missing/base/model", "missing/base/model"),
        ("missing.gguf", "missing.gguf"),
    ],
)
def test_medusa_repository_whose_base_is_none(
    base: str, named: str, tmp_path: Path, export_refuses: ExportRefuses
) -> None:
    repository = save_medusa_repository(tmp_path / "medusa", base=base)
    export_refuses(repository, "--top-k", "10", named=[repository / "config.json", "base_model_name_or_path", named])


def test_damaged_generation_config(llama_folder: Path, tmp_path: Path, commands: Commands) -> None:
    """transformers goes on without it, and its stop tokens would be lost."""
    model = Path(shutil.copytree(llama_folder, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9],')
    tree = write_tree(tmp_path / "tree.json")
    arguments = ("--model", model, "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "bundle")
    with unchanged(tmp_path):
        commands.export_refuses(*arguments, named=[model / "generation_config.json"])


def test_length_past_the_first_factors_of_longrope(tmp_path: Path, commands: Commands) -> None:
    from transformers import AutoModelForCausalLM, Phi3Config

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 4.0, 5.0, 6.0],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 1.0,
    }
    config = Phi3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters=rope,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tree = write_tree(tmp_path / "tree.json")
    arguments = ("--model", tmp_path / "model", "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "bundle")
    with unchanged(tmp_path):
        commands.export_refuses(*arguments, "--max-length", "65", named=["65", "64 positions"])
