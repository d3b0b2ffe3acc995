"""What every command does around its work: errors in two lines, exit codes, signals."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medusa_engine.runtime.command_line import run_command
from medusa_engine.runtime.errors import UserError


@pytest.fixture(autouse=True)
def signals_as_on_a_terminal() -> Iterator[None]:
    """A process started in the background, or under nohup, inherits that some are ignored."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(work: Callable[[], object]) -> int:
    return run_command(argparse.ArgumentParser(prog="medusa-try"), lambda _options: work() and None, [])


def refuse(problem: str, hint: str) -> object:
    raise UserError(problem, hint)


def test_finished_work_exits_with_0() -> None:
    assert run(lambda: None) == 0


@pytest.mark.parametrize("problem", ["a file: is wrong", "a\nfile: is\r\nwrong", "a\u2028file: is\twrong"])
def test_user_error_is_two_lines_whatever_it_says(problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: refuse(problem, "mend\nit")) == 1
    output = capsys.readouterr()
    assert output.err == "medusa-try: a file: is wrong\nmedusa-try: mend it\n"
    assert output.out == ""


def test_full_disk_behind_standard_output_is_two_lines() -> None:
    program = (
        "import sys, argparse; from medusa_engine.runtime.command_line import run_command;"
        "sys.exit(run_command(argparse.ArgumentParser(prog='medusa-try'), lambda _: print('x', flush=True), []))"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "medusa-try: cannot write to standard output: No space left on device"
    assert len(done.stderr.splitlines()) == 2


def test_error_of_the_program_itself_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)


def test_interruption_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: signal.raise_signal(signal.SIGINT)) == 130
    assert capsys.readouterr().err == "medusa-try: interrupted\n"


COMMANDS = {
    "exporter.build_cli": ["x"],
    "exporter.cli": ["--model", "x", "--tree", "x"],
    "exporter.heads_cli": ["inspect", "x"],
    "exporter.verify_cli": ["--model", "x", "--engine", "x"],
    "runtime.cli": ["--engine", "x", "--prompt-ids", "1"],
    "runtime.serve.cli": ["--engine", "x"],
    "training.distill_cli": ["--model", "x", "-o", "/dev/null/x"],
    "training.train_cli": ["--model", "x", "--data", "x", "-o", "/dev/null/x"],
}


@pytest.mark.parametrize("command", COMMANDS)  # medusa-bench and medusa-tree have numpy before they begin
def test_a_command_loads_its_libraries_where_it_can_be_interrupted(command: str) -> None:
    program = (
        "import os, signal, sys\n"
        f"from medusa_engine.{command} import main\n"
        "early = {'numpy', 'onnxruntime', 'tokenizers', 'torch', 'uvicorn'} & set(sys.modules)\n"
        "assert not early, early\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting:\n"  # while numpy is being loaded
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.exit(main({COMMANDS[command]}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith(": interrupted\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_work_as_an_exception_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    cleared_up = False

    def work() -> None:
        nonlocal cleared_up
        try:
            os.kill(os.getpid(), number)
        finally:
            cleared_up = True

    with pytest.raises(SystemExit) as stop:
        run(work)
    assert stop.value.code == 128 + number
    assert cleared_up
    assert signal.getsignal(number) == before


def test_hang_up_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(lambda: signal.raise_signal(signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_missing_optional_package_names_the_extra_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_options: argparse.Namespace) -> None:
        import no_such_package_of_anyone  # noqa: F401

    assert run_command(argparse.ArgumentParser(prog="medusa-try"), work, [], extra="train") == 1
    error = capsys.readouterr().err
    assert "no_such_package_of_anyone is not installed" in error and ".[train]" in error


def test_missing_part_of_the_package_itself_is_no_users_mistake() -> None:
    def work(_options: argparse.Namespace) -> None:
        import medusa_engine.runtime.no_such_part  # noqa: F401

    with pytest.raises(ModuleNotFoundError):
        run_command(argparse.ArgumentParser(prog="medusa-try"), work, [], extra="train")
