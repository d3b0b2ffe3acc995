"""What every command does around its work: errors in two lines, exit codes, quiet interruption."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from types import FrameType

from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.memory_errors import MEMORY_HINT, NO_MEMORY, ran_out_of_memory
from medusa_engine.runtime.providers import PROVIDERS
from medusa_engine.runtime.strict_json import shown

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 130

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO)  # of standard output where the error names no file


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let `--version` print the program and the version of the package."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('medusa-engine')}")


def add_provider(parser: argparse.ArgumentParser) -> None:
    """Let `--provider` choose what ONNX Runtime runs a bundle on."""
    parser.add_argument(
        "--provider",
        choices=tuple(PROVIDERS),
        help="what ONNX Runtime runs a bundle on; cuda needs onnxruntime-gpu in place of onnxruntime; default: cpu",
    )


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
    *,
    extra: str | None = None,
) -> int:
    """Parse the arguments and run the command.

    Args:
        parser, run, arguments: of the command; None for the process's own arguments.
        extra: the optional dependencies the command needs; it says so where one of them is not installed.

    Returns:
        0 when done; 1 after a `UserError`, or where memory ran out, printed to standard error as one line saying what
        is wrong and one saying what to do; 130 when interrupted. Wrong usage exits with 2 from the parser, SIGTERM and
        SIGHUP with 128 and their number.
    """
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal's encoding lacks is no reason to stop
    try:
        with _ended_by_signals(), _needs(extra):
            run(options)
        if sys.stdout is not None:  # closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError as error:
        if error.filename is not None:
            raise
        _leave_output()  # a reader that has gone, as `head` does, is no mistake to report
        return EXIT_USER_ERROR
    except Exception as error:
        refusal = _refusal(error, options)
        if refusal is None:
            raise
        for text in (refusal.problem, refusal.hint):
            # A library's message or a file's name may span lines.
            print(f"{parser.prog}: {' '.join(text.split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _refusal(error: Exception, options: argparse.Namespace) -> UserError | None:
    """What to tell the user of an error; None for those that are nobody's mistake but ours."""
    if isinstance(error, UserError):
        if ran_out_of_memory(error.__cause__) and NO_MEMORY not in error.problem:  # met while a file was read
            return UserError(f"{NO_MEMORY}: {error.problem}", MEMORY_HINT)
        if isinstance(error, WrongValueError) and hasattr(options, error.name):
            return UserError(f"--{error.name.replace('_', '-')} is {error.value}", error.hint)
        return error
    if ran_out_of_memory(error):
        while isinstance(error, ImportError) and isinstance(error.__cause__, ImportError):
            error = error.__cause__  # numpy wraps what the system said into a page of advice
        return UserError(f"{NO_MEMORY}: {error}".removesuffix(": "), MEMORY_HINT)
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENAMETOOLONG:  # of every call that is given the path
        return UserError(f"{shown(error.filename)}: {error.strerror}", "give a path that the system allows")
    if error.filename is None and error.errno in _OUTPUT_ERRORS:
        _leave_output()
        return UserError(
            f"cannot write to standard output: {error.strerror}", "free space there, or write the output elsewhere"
        )
    return None


def _leave_output() -> None:
    """Keep Python from writing there again while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _needs(extra: str | None) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        own = error.name is None or error.name.startswith("medusa_engine")
        if extra is None or own or ran_out_of_memory(error):
            raise
        raise UserError(
            f"the package {error.name} is not installed",
            f"install what this command needs: pip install '.[{extra}]' in a clone of medusa-engine",
        ) from error


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an exception does, so that half-written files are removed.

    A signal that is ignored, as nohup has it, or handled already stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
