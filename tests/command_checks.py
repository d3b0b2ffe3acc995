"""Runs of the console commands, and the checks of how they end and what they leave."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

BUILD = [sys.executable, "-m", "medusa_engine.exporter.build_cli"]
EXPORT = [sys.executable, "-m", "medusa_engine.exporter.cli"]
RUN = [sys.executable, "-m", "medusa_engine.runtime.cli"]

ExportRefuses = Callable[..., None]  # of the fixture `export_refuses`

_PROGRESS = {
    "medusa-export": re.compile(r"(loading|tracing|fusing|comparing|quantising|writing) .*\.\.\. ?(\d+ s)?"),
    "medusa-build": re.compile(r"(verifying|parsing|building|writing|running) .*\.\.\. ?(\d+\.\d s)?"),
}


def check_refused(status: int, stderr: str, command: str, *named: str | Path) -> None:
    """Check that a command ended with a user error: exit status 1, and exactly two lines behind its progress.

    Args:
        command: name of the command, which starts both lines.
        named: what the first line has to name; words are looked for outside the paths.
    """
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith(f"{command}: ")]
    assert status == 1, stderr
    assert "Traceback" not in stderr
    assert len(errors) == 2 and lines[-2:] == errors, stderr
    progress = _PROGRESS.get(command)
    strange = [line for line in lines[:-2] if line and not (progress and progress.fullmatch(line))]
    assert strange == []
    problem, hint = (line.removeprefix(f"{command}: ") for line in errors)
    assert len(problem) < 500
    for path in (str(path) for path in named if isinstance(path, Path)):
        assert path in problem
        problem = problem.replace(path, "")
    for text in (text for text in named if not isinstance(text, Path)):
        assert text in problem
    assert len(hint) > 10 and hint != problem


@contextlib.contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Check that the block leaves every file in these folders as it was and adds none, hidden ones included."""
    before = [contents(folder) for folder in folders]
    yield
    assert [contents(folder) for folder in folders] == before


def contents(folder: Path) -> dict[str, tuple[int, int, str] | None]:
    """Relative path -> size, modification time and hash of every file below a folder; None for folders."""
    found: dict[str, tuple[int, int, str] | None] = {}
    for path in sorted(folder.rglob("*")):
        facts = None
        if path.is_file():
            data = path.read_bytes()
            facts = (len(data), path.stat().st_mtime_ns, hashlib.sha256(data).hexdigest())
        found[str(path.relative_to(folder))] = facts
    return found


def offline_environment(home: Path | None = None) -> dict[str, str]:
    """The environment of a command that may not ask the hub, with its local cache in `home`."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return environment | ({"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")} if home else {})


class Commands:
    """Runs the console commands in this process and checks how they end."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def export(self, *arguments: str | Path) -> str:
        """Run medusa-export to its end; returns what it prints."""
        from medusa_engine.exporter.cli import main

        return self._finish(main, arguments)

    def run(self, *arguments: str | Path) -> str:
        """Run medusa-run to its end; returns what it prints."""
        from medusa_engine.runtime.cli import main

        return self._finish(main, arguments)

    def build(self, *arguments: str | Path) -> str:
        """Run medusa-build to its end; returns what it prints."""
        from medusa_engine.exporter.build_cli import main

        return self._finish(main, arguments)

    def build_refuses(self, *arguments: str | Path, named: Sequence[str | Path]) -> None:
        """Check that medusa-build refuses, in two lines of which the first names these."""
        from medusa_engine.exporter.build_cli import main

        self._refuse(main, "medusa-build", arguments, named)

    def export_refuses(self, *arguments: str | Path, named: Sequence[str | Path]) -> None:
        """Check that medusa-export refuses, in two lines of which the first names these."""
        from medusa_engine.exporter.cli import main

        self._refuse(main, "medusa-export", arguments, named)

    def run_refuses(self, *arguments: str | Path, named: Sequence[str | Path]) -> None:
        """Check that medusa-run refuses, in two lines of which the first names these."""
        from medusa_engine.runtime.cli import main

        self._refuse(main, "medusa-run", arguments, named)

    def _finish(self, main: Callable[[Sequence[str]], int], arguments: Sequence[str | Path]) -> str:
        self._capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        output = self._capfd.readouterr()
        assert status == 0, output.err
        return output.out

    def _refuse(
        self,
        main: Callable[[Sequence[str]], int],
        command: str,
        arguments: Sequence[str | Path],
        named: Sequence[str | Path],
    ) -> None:
        self._capfd.readouterr()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            status = main([str(argument) for argument in arguments])
        output = self._capfd.readouterr()
        check_refused(status, output.err, command, *named)
        assert output.out == ""
        # In a process of its own these would be lines on standard error.
        assert [entry for entry in warned if not issubclass(entry.category, DeprecationWarning)] == []
