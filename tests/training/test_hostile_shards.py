"""Shards and training states that are not what they claim: refused by name, with nothing run and no memory filled."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medusa_engine.runtime.errors import UserError
from medusa_engine.training.shards import KEPT_TOP, read_shard


def arrays() -> dict[str, Any]:
    """A right shard of one conversation of three tokens."""
    return {
        "numbers": np.array([0]),
        "lengths": np.array([3]),
        "tokens": np.arange(3, dtype=np.int32),
        "owned": np.ones(3, dtype=np.bool_),
        "hidden": np.zeros((3, 4), dtype=np.float16),
        "top_ids": np.zeros((3, KEPT_TOP), dtype=np.int32),
        "top_logprobs": np.zeros((3, KEPT_TOP), dtype=np.float16),
    }


def refused(path: Path) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as error:
        read_shard(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert str(path) in error.value.problem
    return error.value.problem


def test_the_right_one_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "shard.npz", **arrays())
    assert read_shard(tmp_path / "shard.npz").keys() == arrays().keys()


def test_a_compressed_shard_may_be_a_bomb(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "shard.npz", **arrays() | {"hidden": np.zeros((3, 1 << 24), dtype=np.float16)})
    assert "compressed" in refused(tmp_path / "shard.npz")


class Hostile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (self.folder,))


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    hostile = np.array([Hostile(tmp_path / "ran")], dtype=object)
    np.savez(tmp_path / "shard.npz", **arrays() | {"numbers": hostile})
    refused(tmp_path / "shard.npz")
    (tmp_path / "other.npz").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    refused(tmp_path / "other.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("elements", [1 << 33, 1 << 62, 10**30])
def test_a_header_that_claims_more_than_the_file_holds(elements: int, tmp_path: Path) -> None:
    path = tmp_path / "shard.npz"
    np.savez(path, **{name: value for name, value in arrays().items() if name != "tokens"})
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": (elements,)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("tokens.npy", header.getvalue() + bytes(12))
    refused(path)


@pytest.mark.parametrize("size", [0, 30, -30])
def test_a_shard_cut_short(size: int, tmp_path: Path) -> None:
    path = tmp_path / "shard.npz"
    np.savez(path, **arrays())
    os.truncate(path, size % path.stat().st_size)
    refused(path)
