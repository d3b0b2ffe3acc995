"""Heads out of hostile files: nothing runs, nothing outside the folder is read, nothing is taken on trust."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import ARTIFACTS
from safetensors.torch import load_file, save_file

from medusa_engine.exporter.head_checkpoint import read_checkpoint
from medusa_engine.exporter.heads_cli import main as medusa_heads
from medusa_engine.runtime.errors import UserError

WEIGHT = "0.0.linear.weight"
EXPECTED = json.loads((ARTIFACTS / "EXPECTED.json").read_text())
CANARY = Path("/tmp/CANARY_PICKLE_RAN")  # the folder that canary_pickle.pt makes if it is unpickled
LOADED = ("good_heads", "bf16_heads", "no_bias", "no_lm_head", "two_res_layers", "ddp_module_prefix")
OF_ANOTHER_MODEL = ("wrong_hidden", "wrong_vocab")  # well-formed in themselves
NO_HEADS = ("outside", "onnx_ext_dotdot", "onnx_ext_missing", "garbage")


def refused(path: Path) -> str:
    """What the error says, which has to name a file of these heads."""
    with pytest.raises(UserError) as error:
        read_checkpoint(path)
    folder = path if path.is_dir() else path.parent
    assert str(folder) in error.value.problem and error.value.hint
    return error.value.problem


def test_every_case_has_its_copy() -> None:
    assert all((ARTIFACTS / name).exists() for name in EXPECTED)


@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if name.split(".")[0] not in (*OF_ANOTHER_MODEL, *NO_HEADS)]
)
def test_every_case_is_read_or_refused(name: str) -> None:
    if name.split(".")[0] in LOADED:
        assert read_checkpoint(ARTIFACTS / name).weights.heads == 3
    else:
        refused(ARTIFACTS / name)


def test_the_canary_does_not_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = ARTIFACTS / "canary_pickle.pt"
    assert str(file) in refused(file)
    for command in (
        ["inspect", str(file)],
        ["convert", str(file), "--to", "vllm", "-o", str(tmp_path / "o.safetensors")],
    ):
        assert medusa_heads(command) == 1
        assert "Traceback" not in capfd.readouterr().err
    assert not CANARY.exists()


@pytest.mark.parametrize("name", ["index_dotdot", "index_backslash"])
def test_an_index_that_leads_out_of_its_folder(name: str) -> None:
    problem = refused(ARTIFACTS / name)
    assert "model.safetensors.index.json" in problem and "outside.safetensors" in problem
    assert "plain name" in problem


def test_an_index_that_names_a_missing_shard() -> None:
    assert "model-00002-of-00002.safetensors" in refused(ARTIFACTS / "index_missing_shard")


def shards(folder: Path) -> Path:
    """The heads of `index_missing_shard` with a second shard."""
    shutil.copytree(ARTIFACTS / "index_missing_shard", folder)
    present = load_file(folder / "model-00001-of-00002.safetensors")
    whole = load_file(ARTIFACTS / "good_heads.safetensors")
    missing = {name: tensor for name, tensor in whole.items() if name not in present}
    save_file(missing, folder / "model-00002-of-00002.safetensors")
    return folder


def test_a_shard_that_is_a_link_out_of_its_folder(tmp_path: Path) -> None:
    folder = shards(tmp_path / "heads")
    assert read_checkpoint(folder).weights.heads == 3
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to("../outside.safetensors")
    assert str(shard) in refused(folder) and "leads out" in refused(folder)
    shard.unlink()
    shard.symlink_to(shard)
    refused(folder)


def test_shards_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--heads"
    snapshot, blobs = repository / "snapshots" / "12ab", repository / "blobs"
    snapshot.mkdir(parents=True)
    shards(tmp_path / "heads").rename(blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    assert read_checkpoint(snapshot).weights.heads == 3


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(1).expand(1 << 15, 1 << 15), "not as many elements"),
        (torch.eye(32).to_sparse(), "sparse_coo"),
        (torch.empty(32, 32, device="meta"), "meta tensor"),
        (torch.zeros(32, 32, dtype=torch.bool), "torch.bool"),
        (torch.zeros(32, 32, dtype=torch.float8_e4m3fn), "float8"),
        (torch.full((32, 32), torch.inf, dtype=torch.bfloat16), "infinity"),
    ],
    ids=["expanded", "sparse", "meta", "bool", "fp8", "infinite"],
)
def test_a_tensor_of_another_kind(tensor: torch.Tensor, named: str, tmp_path: Path) -> None:
    torch.save({WEIGHT: tensor}, tmp_path / "heads.pt")
    problem = refused(tmp_path / "heads.pt")
    assert WEIGHT in problem and named in problem


@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
def test_a_sound_gguf_file_is_not_called_damaged(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))  # of no tensors and no fields
    assert refused(file) == f"{file}: a GGUF file, which holds no heads"


def test_a_part_of_a_shared_storage_is_read_as_it_is(tmp_path: Path) -> None:
    whole = torch.arange(40.0 * 32).reshape(40, 32)
    torch.save({WEIGHT: whole[8:], "0.0.linear.bias": whole[:, 0][:32]}, tmp_path / "heads.pt")
    weights = read_checkpoint(tmp_path / "heads.pt").weights
    assert torch.equal(weights.residual_weight[0, 0], whole[8:]) and torch.equal(
        weights.residual_bias[0, 0], whole[:32, 0]
    )


def test_a_name_that_asks_for_millions_of_blocks(tmp_path: Path) -> None:
    save_file({WEIGHT: torch.zeros(4, 4), "9999.9999.linear.weight": torch.zeros(4, 4)}, tmp_path / "h.safetensors")
    assert "0.1.linear.weight is missing" in refused(tmp_path / "h.safetensors")


def test_entries_of_an_archive_that_lie_over_one_another(tmp_path: Path) -> None:
    """A directory that lists the same bytes many times is a bomb without compression."""
    file = tmp_path / "heads.pt"
    torch.save({WEIGHT: torch.zeros(64, 64)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        (largest,) = (entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
        for copy in range(50):
            twin = zipfile.ZipInfo(f"heads/data/{copy + 1}")
            twin.header_offset, twin.file_size, twin.compress_size, twin.CRC = (
                largest.header_offset,
                largest.file_size,
                largest.compress_size,
                largest.CRC,
            )
            archive.filelist.append(twin)
        archive._didModify = True  # type: ignore[attr-defined]
    assert "over one another" in refused(file)


def test_a_header_of_a_million_tensors(tmp_path: Path) -> None:
    """Well-formed, and a hundred times its size once it is read."""
    entries = {f"{index}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(300_000)}
    header = json.dumps(entries).encode()
    (tmp_path / "heads.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "header of" in refused(tmp_path / "heads.safetensors")
