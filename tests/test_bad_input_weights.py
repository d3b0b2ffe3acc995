"""medusa-export refuses weights that are missing or damaged, in one file or in several, and GGUF files, likewise."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import demo_model
import pytest
import torch
from checkpoints import ARTIFACTS, edit_json, save_llama
from command_checks import ExportRefuses
from safetensors.torch import load_file, save_file

LFS_POINTER = (ARTIFACTS / "lfs_pointer.safetensors").read_bytes()
HTML_PAGE = (ARTIFACTS / "html_page.pt").read_bytes()


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good checkpoint in several files, to be damaged."""
    return save_llama(tmp_path / "model", shard_bytes=30_000)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "empty"), (HTML_PAGE, "not a GGUF"), (LFS_POINTER, "Git LFS pointer"), (b"GGUF" + bytes(60), "version 0")],
    ids=["empty", "page", "pointer", "header alone"],
)
def test_gguf_file_that_is_none(content: bytes, named: str, tmp_path: Path, export_refuses: ExportRefuses) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    export_refuses(file, named=[file, named])


@pytest.mark.demo
@pytest.mark.parametrize("size", [1 << 20, 50 << 20])
def test_gguf_file_cut_short(size: int, tmp_path: Path, export_refuses: ExportRefuses) -> None:
    file = tmp_path / "model.gguf"
    with demo_model.GGUF.open("rb") as whole:
        file.write_bytes(whole.read(size))
    export_refuses(file, named=[file])


def test_folder_without_weights(model_copy: Path, export_refuses: ExportRefuses) -> None:
    (model_copy / "model.safetensors").unlink()
    export_refuses(model_copy, named=[model_copy / "model.safetensors", "missing"])


def test_pickled_weights_are_not_opened(model_copy: Path, tmp_path: Path, export_refuses: ExportRefuses) -> None:
    (model_copy / "model.safetensors").unlink()
    (model_copy / "pytorch_model.bin").write_bytes(b"cos\nmkdir\n(V" + os.fsencode(tmp_path / "ran") + b"\ntR.")
    export_refuses(model_copy, named=[model_copy / "model.safetensors", "missing"])


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
def test_weights_file_that_is_none(content: bytes, named: str, model_copy: Path, export_refuses: ExportRefuses) -> None:
    (model_copy / "model.safetensors").write_bytes(content)
    export_refuses(model_copy, named=[model_copy / "model.safetensors", named])


@pytest.mark.parametrize("size", [4, 400, -1])
def test_weights_cut_short(size: int, model_copy: Path, export_refuses: ExportRefuses) -> None:
    file = model_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    export_refuses(model_copy, named=[file])


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_weights_missing_in_the_file_are_never_made_up(
    name: str, model_copy: Path, export_refuses: ExportRefuses
) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    del tensors[name]
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    export_refuses(model_copy, named=[model_copy, name])


def test_weights_of_another_shape(model_copy: Path, export_refuses: ExportRefuses) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(40)
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    export_refuses(model_copy, named=[model_copy, "model.norm.weight", "[40]", "[32]"])


def test_weights_that_are_not_numbers(model_copy: Path, export_refuses: ExportRefuses) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    export_refuses(model_copy, named=[model_copy / "model.safetensors", "model.norm.weight", "NaN"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_kind_of_number(dtype: torch.dtype, model_copy: Path, export_refuses: ExportRefuses) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    export_refuses(model_copy, named=[model_copy / "model.safetensors", "model.norm.weight", "dtype"])


def test_config_that_names_other_weights(model_copy: Path, export_refuses: ExportRefuses) -> None:
    edit_json(model_copy / "config.json", transformers_weights="../outside.safetensors")
    export_refuses(model_copy, named=[model_copy / "config.json", "transformers_weights"])


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
def test_gguf_file_that_claims_more_than_it_holds(
    content: bytes, tmp_path: Path, export_refuses: ExportRefuses
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    export_refuses(file, named=[file, "damaged"])


def test_missing_shard(sharded: Path, export_refuses: ExportRefuses) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    export_refuses(sharded, named=[shard, "missing"])


def test_shard_cut_short(sharded: Path, export_refuses: ExportRefuses) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    export_refuses(sharded, named=[shard])


@pytest.mark.parametrize(
    "name",
    ["../model-00001.safetensors", "..\\outside.safetensors", "/etc/hostname", "", 7, "a" * 300 + ".safetensors"],
)
def test_shard_name_that_leads_out_of_the_folder(name: object, sharded: Path, export_refuses: ExportRefuses) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": name})
    export_refuses(sharded, named=[index, "plain name"])


@pytest.mark.parametrize("text", ["", "not JSON", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_that_is_none(text: str, sharded: Path, export_refuses: ExportRefuses) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    export_refuses(sharded, named=[index])


def test_tensor_missing_in_its_shard(sharded: Path, export_refuses: ExportRefuses) -> None:
    shard = next(path for path in sharded.glob("model-*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    export_refuses(sharded, named=[sharded, "model.norm.weight"])
