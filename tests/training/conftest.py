"""What tests of medusa-tree share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command_checks import unchanged

from medusa_engine.training.tree_cli import main

PROMPTS = "hello\nworld, hello\r\n\n  \nlow\nlower\nhello hello\nwell\n"

Refuses = Callable[..., None]
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def tree_run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run medusa-tree to its end; gives its output and what it says."""

    def check(*arguments: object) -> tuple[str, str]:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        output = capfd.readouterr()
        assert status == 0, output.err
        return output.out, output.err

    return check


@pytest.fixture
def tree_refuses(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Refuses:
    """Check that medusa-tree ends with two lines, the first naming these, and writes nothing."""

    def check(*arguments: object, named: Sequence[object]) -> None:
        capfd.readouterr()
        with unchanged(tmp_path):
            status = main([str(argument) for argument in arguments])
        output = capfd.readouterr()
        assert status == 1 and output.out == ""
        problem, hint = output.err.splitlines()[-2:]
        assert "Traceback" not in output.err
        assert problem.startswith("medusa-tree: ") and hint.startswith("medusa-tree: ") and len(hint) > 20
        for text in named:
            assert str(text) in problem, output.err

    return check


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_bytes(PROMPTS.encode())
    return path


@pytest.fixture(scope="module")
def calibration(chat_bundle: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    arguments = ["calibrate", "--engine", chat_bundle, "--prompts", prompts, "-o", path, "--max-new-tokens", 10]
    assert main([str(argument) for argument in arguments]) == 0
    return path
