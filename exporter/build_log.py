"""What TensorRT says while it parses and builds, and one readable line out of it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from medusa_engine.runtime.command_line import EXIT_INTERRUPTED

_NODE = re.compile(r"(?P<name>.+) \[(?P<op>\w+)\] inputs: (?P<tensors>.*)")
_PLACE = re.compile(r"\s*(?:\(|\b)In (?:function )?[\w:~]+ at /\S+:\d+\)?")  # in the library's own sources
_PREFIX = re.compile(
    r"^(?:Invalid Node - \S+ )?(?:\w+::\w+: )?Error Code \d+: (?:API Usage Error|Internal Error|Myelin|\w+)? ?\(?"
)
_MYELIN = re.compile(r"\[\S+:\d+: \w+\] (?:MyelinCheckException: \S+:\d+: )?")
_NO_GPU = "cudaError 35"  # no driver: said of every failure on a machine without a GPU, and never the cause
_LONGEST = 300  # characters


class Messages:
    """The library's messages.

    Attributes:
        errors, warnings: in order.
        nodes: name of each node parsed -> its operator and the shapes and types of its inputs.
        verbose: whether each goes to standard error as it comes.
    """

    def __init__(self) -> None:
        self.clear(verbose=False)

    def clear(self, *, verbose: bool) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.nodes: dict[str, str] = {}
        self.verbose = verbose

    def add(self, severity: int, text: str) -> None:
        """Take a message; severity is the library's: 0 and 1 errors, 2 warnings."""
        if severity <= 1:
            self.errors.append(text)
        elif severity == 2:
            self.warnings.append(text)
        elif node := _NODE.fullmatch(text.strip()):
            self.nodes[node["name"]] = f"{node['op']} of {node['tensors'].rstrip(', ')}"
        if self.verbose:
            print(text, file=sys.stderr)

    def essence(self) -> str:
        """The first error as one line, with what is known of the node it names."""
        first = next((line for text in self.errors if (line := essence(text))), None)  # the others follow from it
        if first is None:
            return "it gives no reason"
        named = [name for name in self.nodes if re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/])", first)]
        name = max(named, key=len, default=None)
        return first if name is None else f"{first} ({name}: {self.nodes[name]}"[: 2 * _LONGEST] + ")"


def essence(text: str) -> str:
    """A message without where in the library it was raised."""
    lines = [line for line in text.splitlines() if _NO_GPU not in line]
    text = _MYELIN.sub("", _PREFIX.sub("", _PLACE.sub("", " ".join(lines)))).strip()
    if text.endswith(")") and text.count(")") > text.count("("):
        text = text[:-1]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@functools.cache
def logger(module: Any) -> Any:
    """The logger of a library, with its `messages`; one per process, as the library keeps the first it is given."""

    class BuildLogger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.messages = Messages()

        def log(self, severity: Any, text: str) -> None:
            self.messages.add(int(severity), text)

    return BuildLogger()


@contextlib.contextmanager
def native_work(*, verbose: bool) -> Iterator[None]:
    """Around a long call into the library, which writes to the terminal itself and would hold up Python's handlers.

    What it writes is dropped unless `verbose`: its logger is told the same. Signals end the process at once, as nothing
    is on disk yet.
    """
    with contextlib.ExitStack() as stack:
        terminal = 2  # where standard error goes
        if not verbose:
            sys.stdout.flush()
            sys.stderr.flush()
            sink = stack.enter_context(tempfile.TemporaryFile())
            for descriptor in (1, 2):
                with contextlib.suppress(OSError):  # closed before the start
                    terminal = os.dup(descriptor)
                    os.dup2(sink.fileno(), descriptor)
                    stack.callback(_restore, terminal, descriptor)
        stack.enter_context(_ended_at_once(terminal))
        yield


def _restore(saved: int, descriptor: int) -> None:
    os.dup2(saved, descriptor)
    os.close(saved)


@contextlib.contextmanager
def _ended_at_once(terminal: int) -> Iterator[None]:
    """Let signals end the process while the library holds the main thread, which alone runs Python's handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    watcher = threading.Thread(target=_end_at_signal, args=(receiving, terminal), daemon=True)
    before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sending.close()  # which ends the watcher
        watcher.join()
        receiving.close()


def _end_at_signal(receiving: socket.socket, terminal: int) -> None:
    """Read the numbers of signals that Python has handlers for, until the other end is closed."""
    while numbers := receiving.recv(1):
        (number,) = numbers
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(terminal, b"\nmedusa-build: interrupted\n")
            os._exit(EXIT_INTERRUPTED)
        if number in (signal.SIGTERM, signal.SIGHUP):
            os._exit(128 + number)
