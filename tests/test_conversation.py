"""`medusa-run --chat` on a terminal: turn after turn, until the user ends it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT_SECONDS = 60


class Terminal:
    """A program behind a terminal of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self._main, side = pty.openpty()
        command = [sys.executable, "-m", "medusa_engine.runtime.cli", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, close_fds=True)
        os.close(side)
        self.shown = ""

    def read_until(self, text: str) -> str:
        """What was shown since the last call, up to `text`."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            try:
                self.shown += os.read(self._main, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                assert text in self.shown, self.shown
        before, _, self.shown = self.shown.partition(text)
        return before

    def write(self, text: str) -> None:
        os.write(self._main, text.encode())

    def close(self) -> int:
        self.write("\x04")
        status = self.process.wait(TIMEOUT_SECONDS)
        os.close(self._main)
        return status


def test_conversation_goes_on_until_the_end_of_input(chat_bundle: Path) -> None:
    terminal = Terminal("--engine", chat_bundle, "--chat", "--max-new-tokens", "4", "--ignore-eos")
    assert "Ctrl-D" in terminal.read_until("> ")
    for line in ("hello", "", "again"):
        terminal.write(f"{line}\n")
        answer = terminal.read_until("> ")
        assert ("(cut: length)" in answer) == bool(line), "an empty line asks again, any other is answered"
    assert terminal.close() == 0


def test_conversation_longer_than_the_cache_drops_its_oldest_turns(chat_bundle: Path) -> None:
    terminal = Terminal("--engine", chat_bundle, "--chat", "--max-new-tokens", "40", "--ignore-eos")
    terminal.read_until("> ")
    shown = ""
    for _ in range(4):
        terminal.write("more\n")
        shown += terminal.read_until("> ")
    assert "its oldest turn is dropped" in shown
    assert terminal.close() == 0


def test_message_longer_than_the_cache_is_refused_and_the_conversation_goes_on(chat_bundle: Path) -> None:
    terminal = Terminal("--engine", chat_bundle, "--chat", "--max-new-tokens", "4", "--ignore-eos")
    terminal.read_until("> ")
    terminal.write("all of it " * 20 + "\n")
    assert "the cache holds 64" in terminal.read_until("> ")
    terminal.write("hello\n")
    assert "(cut: length)" in terminal.read_until("> ")
    assert terminal.close() == 0


def test_a_turn_runs_only_what_is_new_in_it(chat_bundle: Path) -> None:
    terminal = Terminal("--engine", chat_bundle, "--chat", "--max-new-tokens", "4", "--ignore-eos", "--stats")
    terminal.read_until("> ")
    kept = []
    for line in ("hi", "no"):
        terminal.write(f"{line}\n")
        shown = terminal.read_until("> ")
        match = re.search(r"prompt +(\d+) tokens in [\d.]+ s(?:, (\d+) of them kept from before)?", shown)
        assert match, shown
        kept.append((int(match[1]), int(match[2] or 0)))
    (first, first_kept), (second, second_kept) = kept
    assert first_kept == 0
    assert first <= second_kept < second
    assert terminal.close() == 0
