"""`medusa-serve`: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from command_checks import check_refused
from serving import TIMEOUT_SECONDS

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.serve import cli as serve_cli
from medusa_engine.runtime.serve.cli import API_KEY_VARIABLE, main

SERVE = [sys.executable, "-m", "medusa_engine.runtime.serve.cli"]
EXTRA = ("prometheus_client", "starlette", "uvicorn")


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that should have been refused fails instead of serving for ever."""

    def fail(*_: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr(serve_cli, "_serve_until_signal", fail)


@contextlib.contextmanager
def command(*arguments: str | Path, key: str | None = None) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """The command on a free port, and a client of it."""
    environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    environment |= {} if key is None else {API_KEY_VARIABLE: key}
    process = subprocess.Popen(
        [*SERVE, "--port", "0", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in the background
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line, line or process.communicate()
        url = line.split(" at ")[1].strip()
        with httpx2.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_lets_the_running_answer_end_and_exits_with_0(chat_bundle: Path, number: signal.Signals) -> None:
    with command("--engine", chat_bundle, "--served-model-name", "mine") as (process, client):
        assert client.get("/models").json()["data"][0]["id"] == "mine"
        body = {"prompt": "hello", "max_tokens": 40, "stream": True, "ignore_eos": True, "return_token_ids": True}
        with client.stream("POST", "/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(number)
            assert "data: [DONE]" in list(lines)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        assert (process.returncode, errors) == (0, "")


def test_key_comes_from_option_file_or_environment(chat_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    for options, key in ((["--api-key-file", tmp_path / "key"], "other"), ([], "s3cret")):
        with command("--engine", chat_bundle, *options, key=key) as (_, client):
            assert client.get("/models").status_code == 401
            assert client.get("/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_log_level_info_logs_requests_to_standard_error(chat_bundle: Path) -> None:
    with command("--engine", chat_bundle, "--log-level", "info") as (process, client):
        client.get("/models")
        process.terminate()
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        assert output == "" and "GET /v1/models" in errors


@pytest.mark.usefixtures("never_started")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--sessions", "0"], "sessions"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--deadline-ms", "nan"], "deadline"),
        (["--shutdown-seconds", "-1"], "--shutdown-seconds"),
        (["--shutdown-seconds", "1" * 300], "--shutdown-seconds"),
        (["--deadline-ms", "5e-324"], "--deadline-ms is 5e-324"),
        (["--served-model-name", ""], "model name"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "two words"], "--api-key"),
        (["--api-key-file", "no/such/file"], "no/such/file"),
        (["--acceptance", "sample"], "without --acceptance sample"),
        (["--acceptance", "lucky"], "lucky"),
        (["--top-p", "0.5"], "--top-p"),
        (["--tree", "no_such_tree.json"], "no_such_tree.json"),
        (["--tree", "64"], "tree 64"),
        (["--tree", "64", "--no-speculation"], "--no-speculation"),
        (["--port", "70000"], "70000"),
        (["--port", "-1"], "-1"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_bad_option_is_refused_in_two_lines(
    chat_bundle: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    named: str,
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    status = main(["--engine", str(chat_bundle), "--port", "0", *options])
    check_refused(status, capfd.readouterr().err, "medusa-serve", named)


def test_address_in_use_is_refused_before_the_engine_is_opened(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = main(["--engine", "no/such/bundle", "--port", str(port)])
    check_refused(status, capfd.readouterr().err, "medusa-serve", str(port), "in use")


def test_speculation_is_chosen_as_for_an_answer_of_the_command(chat_bundle: Path) -> None:
    engine = Engine.open(chat_bundle, threads=1)
    chosen = {"--no-adaptive": (False, True), "--no-speculation": (True, False), "--no-verify": (True, True)}
    for given, expected in chosen.items():
        options = serve_cli.build_parser().parse_args(["--engine", str(chat_bundle), given])
        served = serve_cli._serve_options(options, engine, AcceptancePolicy(), None)
        assert (served.adaptive, served.speculation) == expected


def test_without_the_extra_the_command_names_it_in_two_lines(chat_bundle: Path) -> None:
    done = without_extra("sys.exit(main(sys.argv[1:]))", "--engine", chat_bundle, "--port", "0")
    check_refused(done.returncode, done.stderr, "medusa-serve", "uvicorn")
    assert ".[serve]" in done.stderr


def test_runtime_and_help_need_nothing_of_the_extra() -> None:
    done = without_extra("import medusa_engine.runtime.engine, medusa_engine.runtime.cli; main(['--help'])")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "greedily" in words and "does not preserve the model's distribution" in words


def without_extra(statement: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a statement, in which `main` is the command's, where nothing of the extra can be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRA!r}))\n"
        f"from medusa_engine.runtime.serve.cli import main\n{statement}\n"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)


def test_server_of_a_thread_leaves_the_threads_it_found(chat_bundle: Path) -> None:
    from serving import serving

    engine = Engine.open(chat_bundle, threads=1)
    before = set(threading.enumerate())
    with serving(engine) as server:
        server.complete([5, 6], max_tokens=4)
    assert set(threading.enumerate()) <= before
