"""An export that is killed at any stage leaves nothing that looks finished, and the bundle that was there before."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_tree
from command_checks import EXPORT, contents, offline_environment, unchanged

from medusa_engine.exporter import bundle
from medusa_engine.runtime.bundle_files import verify_files
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import MANIFEST_NAME, read_manifest

# Where the export is held up, from its first file to its last step.
STAGES = [
    ("export", "write_generation_config"),
    ("graphs", "write_weights"),
    ("graphs", "write_graph"),
    ("bundle", "write_manifest"),
    ("bundle", "_put_in_place"),
]
HELD = """
import sys, time
from medusa_engine.exporter import {module}
from medusa_engine.exporter.cli import main

def wait(*_arguments, **_options):
    print("held", file=sys.stderr, flush=True)
    time.sleep(600)

{module}.{function} = wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def output(chat_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that is to be replaced, alone in its folder."""
    return Path(shutil.copytree(chat_bundle, tmp_path / "engines" / "bundle"))


def signals_as_on_a_terminal() -> None:
    """A test run in the background, or under nohup, hands on that some are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def export_held_at(stage: tuple[str, str] | None, model: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """An export into `output`, handed over when it comes to a function, or while it traces."""
    start = EXPORT
    if stage is not None:
        start = [sys.executable, "-c", HELD.format(module=stage[0], function=stage[1])]
    tree = write_tree(output.parents[1] / "tree.json")
    command = [*start, "--model", model, "--untrained-heads", "2", "--no-lookup"]
    command += ["--tree", tree, "-o", output, "--force"]
    process = subprocess.Popen(
        list(map(str, command)),
        env=offline_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=signals_as_on_a_terminal,
    )
    with process:
        assert process.stderr is not None
        said = ""
        while not said.endswith("held" if stage else "tracing"):
            character = process.stderr.read(1)
            assert character, said
            said += character
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage[1])
def test_killed_export_leaves_the_earlier_bundle(stage: tuple[str, str], llama_folder: Path, output: Path) -> None:
    with unchanged(output), export_held_at(stage, llama_folder, output) as process:
        process.kill()
    assert process.returncode == -signal.SIGKILL
    verify_files(output, read_manifest(output))
    (left,) = (path for path in output.parent.iterdir() if path != output)
    assert left.name.startswith(".")
    assert not (left / MANIFEST_NAME).exists() or stage[1] == "_put_in_place"

    before = contents(output)
    with pytest.raises(ZeroDivisionError), bundle.new_bundle(output):
        raise ZeroDivisionError
    assert list(output.parent.iterdir()) == [output], "the next export clears what the killed one left"
    assert contents(output) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "stage"),
    [
        (signal.SIGINT, 130, None),
        (signal.SIGTERM, 128 + signal.SIGTERM, ("export", "check_logits")),
        (signal.SIGHUP, 128 + signal.SIGHUP, ("export", "write_generation_config")),
    ],
    ids=["interrupted", "terminated", "hung up"],
)
def test_stopped_export_clears_up_behind_itself(
    number: signal.Signals, status: int, stage: tuple[str, str] | None, llama_folder: Path, output: Path
) -> None:
    with unchanged(output.parent), export_held_at(stage, llama_folder, output) as process:
        process.send_signal(number)
        assert process.stderr is not None
        rest = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in rest


@pytest.mark.parametrize("point", ["before", "after"])
def test_kill_around_the_exchange_leaves_one_whole_bundle(
    point: str, chat_bundle: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies there, played by an exception that no clean-up comes behind."""
    old = contents(output)
    exchange = bundle._exchange

    class Killed(BaseException):
        pass

    def killed_exchange(*folders: Path) -> bool:
        assert point == "before" or exchange(*folders)
        raise Killed

    monkeypatch.setattr(bundle, "_exchange", killed_exchange)
    monkeypatch.setattr(bundle.shutil, "rmtree", lambda *_arguments, **_options: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(Killed))
        folder = stack.enter_context(bundle.new_bundle(output))
        shutil.copytree(chat_bundle, folder, dirs_exist_ok=True)
        (folder / "new").touch()
    assert contents(output) == old if point == "before" else "new" in contents(output)
    verify_files(output, read_manifest(output))


@pytest.mark.parametrize("failure", [None, "target.rename", "partial.rename"])
def test_replacement_without_an_atomic_exchange(
    failure: str | None, chat_bundle: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = contents(output)
    monkeypatch.setattr(bundle, "_exchange", lambda *_folders: False)
    rename = Path.rename

    def failing_rename(self: Path, target: Path) -> Path:
        if (failure, self) == ("target.rename", output) or (failure == "partial.rename" and ".partial-" in self.name):
            raise OSError(28, os.strerror(28))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with contextlib.ExitStack() as stack:
        if failure:
            stack.enter_context(pytest.raises(UserError, match="cannot write"))
        folder = stack.enter_context(bundle.new_bundle(output))
        shutil.copytree(chat_bundle, folder, dirs_exist_ok=True)
        (folder / "new").touch()
    assert ("new" in contents(output)) == (failure is None)
    assert failure is None or contents(output) == old
    assert list(output.parent.iterdir()) == [output]
