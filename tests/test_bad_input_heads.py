"""medusa-export refuses heads that are damaged, hostile or of another model, in two lines, and writes nothing."""

from __future__ import annotations

import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import ARTIFACTS, write_tree
from command_checks import Commands, unchanged
from safetensors.torch import load_file, save_file

Refuses = Callable[..., None]
ZERO_WEIGHT = "0.0.linear.weight"


@pytest.fixture
def refuses(tmp_path: Path, llama_folder: Path, commands: Commands) -> Refuses:
    """Check that an export with these heads is refused and leaves everything as it was."""
    tree = write_tree(tmp_path / "tree.json")

    def check(heads: str | Path, *, named: list[str | Path]) -> None:
        arguments = ["--model", llama_folder, "--tree", tree, "-o", tmp_path / "new" / "bundle", "--heads", heads]
        with unchanged(tmp_path, llama_folder):
            commands.export_refuses(*arguments, named=named)

    return check


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("wrong_hidden.safetensors", ["40", "32"]),
        ("wrong_vocab.safetensors", ["100", "128"]),
        ("gap_in_heads.safetensors", [" 1.", "missing"]),
        ("nan_weight.safetensors", ["1.0.linear.weight", "NaN"]),
        ("zero3_empty_shards.safetensors", ["no elements"]),
        ("truncated_body.safetensors", []),
        ("trailing_bytes.safetensors", []),
        ("offset_past_end.safetensors", []),
        ("shape_overflow.safetensors", []),
        ("unknown_dtype.safetensors", ["F8_WHAT"]),
        ("hdr_not_json.safetensors", []),
        ("hdr_len_2p40.safetensors", []),
        ("deep_json.safetensors", []),
        ("lfs_pointer.safetensors", ["Git LFS pointer"]),
        ("html_page.pt", []),
        ("empty.pt", ["empty"]),
    ],
)
def test_damaged_or_foreign_heads_file(name: str, named: list[str], refuses: Refuses) -> None:
    refuses(ARTIFACTS / name, named=[ARTIFACTS / name, *named])


@pytest.mark.parametrize("name", ["hdr_len_2p40.safetensors", "zip_bomb_64MiB.pt", "deep_json.safetensors"])
def test_small_file_that_claims_to_be_huge_costs_little_memory(name: str, refuses: Refuses) -> None:
    refuses(ARTIFACTS / "empty.pt", named=[])  # what loading the model and the libraries takes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuses(ARTIFACTS / name, named=[ARTIFACTS / name])
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 << 10


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (self.folder,))


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "heads.bin", "heads.pth", "heads"])
@pytest.mark.parametrize("archive", [True, False], ids=["zip", "pickle"])
def test_code_in_a_pickle_is_not_run(name: str, archive: bool, tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / name
    content = {ZERO_WEIGHT: torch.zeros(32, 32), "run": Hostile(tmp_path / "ran")}
    if archive:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    refuses(file, named=[file])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([torch.zeros(2)], "dictionary"),
        ({"state_dict": {ZERO_WEIGHT: torch.zeros(32, 32)}}, "dictionary"),
        ({0: torch.zeros(2)}, "dictionary"),
        ({}, "no head weights"),
        ({ZERO_WEIGHT: torch.zeros(32, 32, dtype=torch.int64)}, ZERO_WEIGHT),
        ({ZERO_WEIGHT: torch.zeros(32, 32, dtype=torch.complex64)}, ZERO_WEIGHT),
    ],
    ids=["list", "nested", "numbered", "nothing", "integers", "complex"],
)
def test_pt_file_without_heads(content: object, named: str, tmp_path: Path, refuses: Refuses) -> None:
    file = tmp_path / "heads.pt"
    torch.save(content, file)
    refuses(file, named=[file, named])


@pytest.mark.parametrize(
    "name", sorted(name for name in load_file(ARTIFACTS / "good_heads.safetensors") if name.endswith("weight"))
)
def test_missing_weight_is_named(name: str, tmp_path: Path, refuses: Refuses) -> None:
    tensors = load_file(ARTIFACTS / "good_heads.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "heads.safetensors")
    # Without its last head's block, a checkpoint has that head's projection too much.
    refuses(tmp_path / "heads.safetensors", named=[tmp_path / "heads.safetensors", name[:2]])


@pytest.mark.parametrize(
    "name",
    ["3.0.linear.bias", "0.0.linear.scale", "lm_head.weight", "0.0\n.weight", "9" * 5000 + ".0.linear.weight"],
)
def test_tensor_that_belongs_to_no_head(name: str, tmp_path: Path, refuses: Refuses) -> None:
    tensors = load_file(ARTIFACTS / "good_heads.safetensors") | {name: torch.zeros(32)}
    save_file(tensors, tmp_path / "heads.safetensors")
    refuses(tmp_path / "heads.safetensors", named=[tmp_path / "heads.safetensors"])


def test_heads_that_do_not_exist(tmp_path: Path, refuses: Refuses) -> None:
    missing = tmp_path / "missing" / "medusa_lm_head.pt"
    refuses(missing, named=[missing])


def test_folder_without_heads(tmp_path: Path, refuses: Refuses) -> None:
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", named=[tmp_path / "empty", "medusa_lm_head"])


def test_tree_deeper_than_the_heads(
    llama_folder: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_engine.exporter.checkpoint.load_model", pytest.fail)  # it is refused before that
    tree = write_tree(tmp_path / "deep.json", [[0] * length for length in range(1, 5)])
    heads = shutil.copy(ARTIFACTS / "good_heads.safetensors", tmp_path / "heads.safetensors")
    arguments = ("--model", llama_folder, "--tree", tree, "-o", tmp_path / "bundle", "--heads", heads)
    with unchanged(tmp_path):
        commands.export_refuses(*arguments, named=["tree deep", "depth 4", "3 heads"])
