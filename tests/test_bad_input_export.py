"""medusa-export refuses a model that is missing, damaged or of an unknown kind, in two lines, and writes nothing."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import pytest
import torch
from checkpoints import ARTIFACTS, save_llama, save_medusa_repository, write_tree
from command_checks import EXPORT, Commands, check_refused, offline_environment, unchanged
from safetensors.torch import load_file, save_file

LFS_POINTER = (ARTIFACTS / "lfs_pointer.safetensors").read_bytes()
HTML_PAGE = (ARTIFACTS / "html_page.pt").read_bytes()

Refuses = Callable[..., None]


@pytest.fixture
def model(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good checkpoint in several files, to be damaged."""
    return save_llama(tmp_path / "model", shard_bytes=30_000)


@pytest.fixture
def refuses(tmp_path: Path, commands: Commands) -> Refuses:
    """Check that an export of a model is refused and leaves everything as it was."""
    tree = write_tree(tmp_path / "tree.json")

    def check(model: str | Path, *options: str | Path, named: list[str | Path]) -> None:
        options = options or ("--untrained-heads", "2")
        with unchanged(tmp_path):
            commands.export_refuses(
                "--model", model, "--tree", tree, "-o", tmp_path / "new" / "bundle", *options, named=named
            )

    return check


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", ["missing/", "missing/model/folder", "./missing", "missing.gguf", "no such:model"])
def test_model_that_does_not_exist(
    name: str, refuses: Refuses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    refuses(name, named=[name])


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


def test_file_that_is_no_model(model: Path, refuses: Refuses) -> None:
    refuses(model / "model.safetensors", named=[model / "model.safetensors", "a file"])


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "empty"), (HTML_PAGE, "not a GGUF"), (LFS_POINTER, "Git LFS pointer"), (b"GGUF" + bytes(60), "version 0")],
    ids=["empty", "page", "pointer", "header alone"],
)
def test_gguf_file_that_is_none(content: bytes, named: str, tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refuses(file, named=[file, named])


@pytest.mark.demo
@pytest.mark.parametrize("size", [1 << 20, 50 << 20])
def test_gguf_file_cut_short(size: int, tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / "model.gguf"
    with demo_model.GGUF.open("rb") as whole:
        file.write_bytes(whole.read(size))
    refuses(file, named=[file])


def test_folder_without_config(model: Path, refuses: Refuses) -> None:
    (model / "config.json").unlink()
    refuses(model, named=[model, "no config.json", "not a model folder"])


@pytest.mark.parametrize("text", ["", "not JSON", "[]", "null", '{"a": 1, "a": 2}', "{", "[" * 100_000])
def test_config_that_is_no_json_object(text: str, model: Path, refuses: Refuses) -> None:
    (model / "config.json").write_text(text)
    refuses(model, named=[model / "config.json"])


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
def test_config_of_an_unknown_or_impossible_model(values: dict[str, Any], model: Path, refuses: Refuses) -> None:
    edit_json(model / "config.json", **values)
    refuses(model, named=[model])


def test_architecture_that_cannot_be_traced(tmp_path: Path, refuses: Refuses) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts_per_tok": 1, "pad_token_id": 0}
    config = GptOssConfig(vocab_size=64, num_hidden_layers=1, head_dim=8, num_local_experts=2, **sizes)
    GptOssForCausalLM(config).save_pretrained(tmp_path / "gpt_oss")
    refuses(tmp_path / "gpt_oss", named=[tmp_path / "gpt_oss", "GptOssForCausalLM", "attention sinks"])


def test_code_in_the_model_folder_is_not_run_nor_offered_to_be(
    model: Path, tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (model / "custom.py").write_text(code)
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    edit_json(model / "config.json", model_type="custom", auto_map=auto_map)
    refuses(model, named=[model])


def test_folder_without_weights(model: Path, refuses: Refuses) -> None:
    (model / "model.safetensors").unlink()
    refuses(model, named=[model / "model.safetensors", "missing"])


def test_pickled_weights_are_not_opened(model: Path, tmp_path: Path, refuses: Refuses) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"cos\nmkdir\n(V" + os.fsencode(tmp_path / "ran") + b"\ntR.")
    refuses(model, named=[model / "model.safetensors", "missing"])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (LFS_POINTER, "Git LFS pointer"),
        (HTML_PAGE, "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
    ],
    ids=["empty", "pointer", "page", "noise"],
)
def test_weights_file_that_is_none(content: bytes, named: str, model: Path, refuses: Refuses) -> None:
    (model / "model.safetensors").write_bytes(content)
    refuses(model, named=[model / "model.safetensors", named])


@pytest.mark.parametrize("size", [4, 400, -1])
def test_weights_cut_short(size: int, model: Path, refuses: Refuses) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refuses(model, named=[file])


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_weights_missing_in_the_file_are_never_made_up(name: str, model: Path, refuses: Refuses) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refuses(model, named=[model, name])


def test_process_ends_in_two_lines_too(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    tree = write_tree(tmp_path / "tree.json")
    command = [*EXPORT, "--model", model, "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "out"]
    ended = subprocess.run(command, env=offline_environment(), capture_output=True, text=True, check=False)
    check_refused(ended.returncode, ended.stderr, "medusa-export", model, "model.norm.weight")
    assert ended.stdout == ""
    assert not (tmp_path / "out").exists()


def test_weights_of_another_shape(model: Path, refuses: Refuses) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(40)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refuses(model, named=[model, "model.norm.weight", "[40]", "[32]"])


def test_weights_that_are_not_numbers(model: Path, refuses: Refuses) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refuses(model, named=[model / "model.safetensors", "model.norm.weight", "NaN"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_kind_of_number(dtype: torch.dtype, model: Path, refuses: Refuses) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refuses(model, named=[model / "model.safetensors", "model.norm.weight", "dtype"])


def test_config_that_names_other_weights(model: Path, refuses: Refuses) -> None:
    edit_json(model / "config.json", transformers_weights="../outside.safetensors")
    refuses(model, named=[model / "config.json", "transformers_weights"])


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(*, tensors: int = 0, pairs: int = 1, rest: bytes = b"") -> bytes:
    """A GGUF file of version 3 whose first pair says that it is a Llama."""
    architecture = gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + architecture + rest


@pytest.mark.parametrize(
    "content",
    [
        gguf(pairs=1 << 60),
        gguf(tensors=1 << 60),
        gguf(pairs=2, rest=gguf_text(b"a") + struct.pack("<IQ", 8, 1 << 60)),
        gguf(pairs=2, rest=gguf_text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 60)),
        gguf(pairs=2, rest=gguf_text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 60)),
        gguf(pairs=2, rest=gguf_text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000),
        gguf(pairs=2, rest=gguf_text(b"general.alignment") + struct.pack("<II", 4, 3)),
        gguf(tensors=1, rest=gguf_text(b"t") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0)),
        gguf(tensors=1, rest=gguf_text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 60) + bytes(64)),
        gguf(tensors=1, rest=gguf_text(b"t") + struct.pack("<I", 1 << 31)),
        gguf(tensors=1, rest=gguf_text(b"t") + struct.pack("<IQIQ", 1, 8, 999, 0) + bytes(64)),
    ],
    ids=[
        "pairs",
        "tensors",
        "text",
        "array",
        "texts",
        "nested",
        "alignment",
        "size",
        "offset",
        "dimensions",
        "type",
    ],
)
def test_gguf_file_that_claims_more_than_it_holds(content: bytes, tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refuses(file, named=[file, "damaged"])


def test_missing_shard(sharded: Path, refuses: Refuses) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuses(sharded, named=[shard, "missing"])


def test_shard_cut_short(sharded: Path, refuses: Refuses) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    refuses(sharded, named=[shard])


@pytest.mark.parametrize(
    "name",
    ["../model-00001.safetensors", "..\\outside.safetensors", "/etc/hostname", "", 7, "a" * 300 + ".safetensors"],
)
def test_shard_name_that_leads_out_of_the_folder(name: object, sharded: Path, refuses: Refuses) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": name})
    refuses(sharded, named=[index, "plain name"])


@pytest.mark.parametrize("text", ["", "not JSON", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_that_is_none(text: str, sharded: Path, refuses: Refuses) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    refuses(sharded, named=[index])


def test_tensor_missing_in_its_shard(sharded: Path, refuses: Refuses) -> None:
    shard = next(path for path in sharded.glob("model-*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    refuses(sharded, named=[sharded, "model.norm.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "not JSON", "{}"])
def test_tokenizer_that_is_none(text: str, model: Path, refuses: Refuses) -> None:
    (model / "tokenizer.json").write_text(text)
    refuses(model, named=[model, "tokenizer"])


@pytest.mark.parametrize("value", ["</s>", -1, [2, None], 2.5])
def test_stop_token_that_is_none(value: object, model: Path, refuses: Refuses) -> None:
    edit_json(model / "generation_config.json", eos_token_id=value)
    refuses(model, named=[model])


@pytest.mark.parametrize("base", ["", None, 7])
def test_medusa_repository_without_a_base(base: object, tmp_path: Path, refuses: Refuses) -> None:
    repository = save_medusa_repository(tmp_path / "medusa", base="")
    edit_json(repository / "config.json", base_model_name_or_path=base)
    refuses(repository, "--top-k", "10", named=[repository / "config.json", "names no base model"])


@pytest.mark.parametrize(
    ("base", "named"),
    [
        (".", "not a base model"),
        ("../medusa", "not a base model"),
        ("missing/base/model", "missing/base/model"),
        ("missing.gguf", "missing.gguf"),
    ],
)
def test_medusa_repository_whose_base_is_none(base: str, named: str, tmp_path: Path, refuses: Refuses) -> None:
    repository = save_medusa_repository(tmp_path / "medusa", base=base)
    refuses(repository, "--top-k", "10", named=[repository / "config.json", "base_model_name_or_path", named])


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
