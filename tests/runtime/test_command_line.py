"""What every command does around its work: errors in two lines, exit codes, signals."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable

import pytest

from medusa_engine.runtime.command_line import run_command
from medusa_engine.runtime.errors import UserError


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


def test_error_of_the_program_itself_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)


def test_interruption_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: signal.raise_signal(signal.SIGINT)) == 130
    assert capsys.readouterr().err == "medusa-try: interrupted\n"


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
