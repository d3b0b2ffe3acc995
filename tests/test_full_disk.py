"""A disk that is full, at several points of an export and under what training writes: said so, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_tree
from command_checks import Commands, contents

from medusa_engine.exporter import bundle, checkpoint
from medusa_engine.exporter.saved_tokenizer import save_tokenizer
from medusa_engine.runtime.bundle_files import verify_files
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import read_manifest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("free", [60_000, 260_000], ids=["weights", "graphs"])
def test_export_onto_a_disk_that_fills(
    free: int, small_disk: Path, chat_bundle: Path, tmp_path: Path, commands: Commands
) -> None:
    model = chat_bundle.parent / "llama"
    tree = write_tree(tmp_path / "tree.json")
    output = Path(shutil.copytree(chat_bundle, small_disk / "bundle"))
    space = os.statvfs(small_disk)
    with (small_disk / "other").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_bsize - free)
    before = contents(small_disk)
    arguments = ("--model", model, "--untrained-heads", "2", "--tree", tree, "-o", output, "--force")
    commands.export_refuses(*arguments, named=[output, "cannot write the bundle", os.strerror(errno.ENOSPC)])
    assert contents(small_disk) == before
    verify_files(output, read_manifest(output))


def full(*_arguments: object, **_options: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_in_rust(*_arguments: object, **_options: object) -> Any:
    """As the tokenizers library says it."""
    raise Exception("No space left on device (os error 28)")


@pytest.mark.slow
def test_a_disk_that_is_full_for_the_last_file(
    chat_bundle: Path, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path(shutil.copytree(chat_bundle, tmp_path / "engines" / "bundle"))
    before = contents(output.parent)
    tree = write_tree(tmp_path / "tree.json")
    monkeypatch.setattr(bundle, "write_manifest", full)
    model = chat_bundle.parent / "llama"
    arguments = ("--model", model, "--untrained-heads", "2", "--tree", tree, "-o", output, "--force")
    commands.export_refuses(*arguments, named=[output, "cannot write the bundle", os.strerror(errno.ENOSPC)])
    assert contents(output.parent) == before


@pytest.mark.parametrize("name", ["sync", "_put_in_place", "_exchange"])
def test_a_bundle_that_cannot_be_put_in_place(
    name: str, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path(shutil.copytree(chat_bundle, tmp_path / "engines" / "bundle"))
    before = contents(output.parent)
    monkeypatch.setattr(bundle, name, full)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(UserError, match="cannot write the bundle: No space left"))
        folder = stack.enter_context(bundle.new_bundle(output))
        shutil.copytree(chat_bundle, folder, dirs_exist_ok=True)
    assert contents(output.parent) == before


def test_a_tokenizer_that_finds_the_disk_full(
    chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerBase

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full_in_rust)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        save_tokenizer(checkpoint.find_source(str(chat_bundle.parent / "llama")), tmp_path)


# What training writes


def test_a_log_and_a_plot_on_a_full_disk(tmp_path: Path) -> None:
    from medusa_engine.training.training_log import HeadScores, TrainingLog

    log = TrainingLog(tmp_path, 1, report=lambda _line: None)
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left") as error:
        log.epoch(0, 1.0, HeadScores.zero(1), 1.0)
    assert str(tmp_path / "log.jsonl") in error.value.problem


def test_a_file_that_is_put_in_place_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_engine.exporter.output_file import write_file

    path = tmp_path / "tree.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left") as error:
        write_file(path, b"new")
    assert str(path) in error.value.problem
    assert contents(tmp_path) == {"tree.json": contents(tmp_path)["tree.json"]} and path.read_text() == "old"


def test_a_shard_that_does_not_fit_leaves_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_engine.training.shards import KEPT_TOP, ShardWriter, StoredConversation

    def conversation(number: int) -> StoredConversation:
        top = np.zeros((3, KEPT_TOP))
        tokens, owned, hidden = np.arange(3, dtype=np.int32), np.ones(3, dtype=np.bool_), np.zeros((3, 4), np.float16)
        return StoredConversation(number, tokens, owned, hidden, top.astype(np.int32), top.astype(np.float16))

    writer = ShardWriter(tmp_path, 1)
    writer.add(conversation(0))
    before = contents(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", full)
        with pytest.raises(UserError, match="No space left"):
            writer.add(conversation(1))
    assert contents(tmp_path) == before
    assert ShardWriter(tmp_path, 1).written == {0}


def test_heads_that_do_not_fit_leave_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints import ARTIFACTS

    from medusa_engine.exporter.head_checkpoint import read_checkpoint, write_checkpoint

    heads = read_checkpoint(ARTIFACTS / "good_heads.safetensors")
    path = tmp_path / "medusa_lm_head.safetensors"
    write_checkpoint(heads, heads.format, path)
    before = contents(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left") as error:
        write_checkpoint(heads, heads.format, path)
    assert str(path) in error.value.problem
    assert contents(tmp_path) == before
