"""A plan, its files and its sidecar come to their place together or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_checks import contents, unchanged

from medusa_engine.exporter import plan_files
from medusa_engine.exporter.plan_files import check_plan_target, new_plan
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import files_folder, sidecar_path


def write(place: Path, text: str) -> None:
    (files_folder(place) / "tree.json").write_text(text)
    place.write_text(text)
    sidecar_path(place).write_text(f'{{"format": "medusa-plan", "text": "{text}"}}')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A plan that is to be replaced, alone in its folder."""
    with new_plan(tmp_path / "model.plan", force=False) as place:
        write(place, "old")
    return tmp_path / "model.plan"


def said_by(path: Path) -> set[str]:
    parts = path.read_text(), (files_folder(path) / "tree.json").read_text(), sidecar_path(path).read_text()
    return {"old" if "old" in part else "new" for part in parts}


def test_new_plan_replaces_all_three_parts(path: Path) -> None:
    with new_plan(path, force=True) as place:
        write(place, "new")
        assert said_by(path) == {"old"}
    assert said_by(path) == {"new"}
    assert {part.name for part in path.parent.iterdir()} == {"model.plan", "model.plan.json", "model.plan.files"}


def test_failure_while_writing_leaves_the_old_plan(path: Path) -> None:
    def fail() -> None:
        with new_plan(path, force=True) as place:
            write(place, "new")
            raise ZeroDivisionError

    with unchanged(path.parent), pytest.raises(ZeroDivisionError):
        fail()


@pytest.mark.parametrize("failing", range(6))
def test_failure_while_moving_leaves_the_old_plan(failing: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts go and three come."""
    rename, calls = os.rename, []

    def failing_rename(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == failing + 1:
            raise OSError(28, os.strerror(28))
        rename(source, target)

    with unchanged(path.parent):
        monkeypatch.setattr(plan_files.os, "rename", failing_rename)
        with pytest.raises(UserError, match="cannot write the plan"), new_plan(path, force=True) as place:
            write(place, "new")
    assert len(calls) == 2 * failing + 1, "each move before it is undone"


@pytest.mark.parametrize("moves", range(7))
def test_kill_while_moving_leaves_a_whole_plan_or_none(moves: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies there, played by an exception that no clean-up comes behind."""

    class Killed(BaseException):
        pass

    rename, calls = os.rename, []

    def killed_rename(source: Path, target: Path) -> None:
        if len(calls) == moves:
            raise Killed
        calls.append(source)
        rename(source, target)

    monkeypatch.setattr(plan_files.os, "rename", killed_rename)
    monkeypatch.setattr(plan_files.contextlib.ExitStack, "callback", lambda *_arguments: None)
    monkeypatch.setattr("medusa_engine.exporter.partial_folder.shutil.rmtree", lambda *_arguments, **_options: None)
    killed = False
    try:
        with new_plan(path, force=True) as place:
            write(place, "new")
    except Killed:
        killed = True
    assert killed == (moves < 6)
    if sidecar_path(path).exists():  # then it tells the truth
        assert said_by(path) == {"new" if moves == 6 else "old"}


def test_what_a_killed_build_left_goes_with_the_next(path: Path) -> None:
    left = path.with_name(".model.plan.partial-12ab")
    left.mkdir()
    (left / "model.plan").write_text("half")
    before = contents(path.parent)
    with new_plan(path, force=True) as place:
        write(place, "new")
    assert contents(path.parent).keys() == {name for name in before if "partial" not in name}


def test_plan_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"

    def build() -> None:
        with new_plan(path, force=True) as place:
            write(place, "new")
            path.write_text("somebody else's")

    with pytest.raises(UserError, match="exists and is no plan"):
        build()
    assert path.read_text() == "somebody else's"
    assert list(tmp_path.iterdir()) == [path]


def test_sidecar_alone_may_be_replaced(path: Path) -> None:
    path.unlink()
    check_plan_target(path, force=True)
    with pytest.raises(UserError, match="exists already"):
        check_plan_target(path, force=False)


def test_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_files.os, "access", lambda *_arguments: False)
    with pytest.raises(UserError, match="no permission to write"):
        check_plan_target(tmp_path / "model.plan", force=False)
