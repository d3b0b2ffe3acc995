"""Exports into one folder at once: each ends with a whole bundle or an error, and none removes another's files."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from medusa_engine.exporter import bundle
from medusa_engine.runtime.errors import UserError

MANIFEST = '{"format": "medusa-bundle"}'

# Begins and ends many bundles of two files in one place; says so when a file is not there that it has just written.
EXPORTS = """
import sys
from pathlib import Path
from medusa_engine.exporter.bundle import new_bundle

target, mark = Path(sys.argv[1]), sys.argv[2]
for number in range(40):
    with new_bundle(target) as folder:
        (folder / "manifest.json").write_text('{"format": "medusa-bundle"}')
        (folder / "one").write_text(f"{mark} {number}")
        (folder / "two").write_text(f"{mark} {number}")
"""


def test_exports_at_once_leave_one_whole_bundle(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    command = [sys.executable, "-c", EXPORTS, str(target)]
    started = [subprocess.Popen([*command, str(mark)], stderr=subprocess.PIPE, text=True) for mark in range(4)]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert (target / "one").read_text() == (target / "two").read_text()
    assert list(tmp_path.iterdir()) == [target]


def test_a_bundle_that_another_export_finished_meanwhile_is_kept_without_force(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(UserError, match="exists already"))
        late = stack.enter_context(bundle.new_bundle(target, force=False))
        (late / "manifest.json").write_text(MANIFEST)
        with bundle.new_bundle(target, force=False) as early:
            (early / "manifest.json").write_text(MANIFEST)
            (early / "text").touch()
        assert late.is_dir()
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "text"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_new_folder_is_not_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other export begins between the making of a folder and its lock."""
    target = tmp_path / "bundle"
    mkdir = Path.mkdir
    others: list[threading.Thread] = []

    def other() -> None:
        with bundle.new_bundle(target) as folder:
            (folder / "manifest.json").write_text(MANIFEST)

    def mkdir_and_begin_another(self: Path, *arguments: int, **options: bool) -> None:
        mkdir(self, *arguments, **options)
        if ".partial-" in self.name and not others:
            others.append(threading.Thread(target=other))
            others[0].start()
            others[0].join(0.3)

    monkeypatch.setattr(Path, "mkdir", mkdir_and_begin_another)
    with bundle.new_bundle(target) as folder:
        (folder / "manifest.json").write_text(MANIFEST)
        (folder / "mine").touch()
    others[0].join()
    assert others and target.is_dir()
