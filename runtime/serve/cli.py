"""`medusa-serve`: answer over HTTP with an exported engine."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from medusa_engine.runtime.command_line import add_provider, add_version, run_command
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.huge_pages import restart_with_huge_pages
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_options import add_policy_options, policy_of
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.utf8_file import read_utf8_file

if TYPE_CHECKING:  # imported where they are needed: loading them can be interrupted quietly
    import uvicorn

    from medusa_engine.runtime.engine import Engine

API_KEY_VARIABLE = "MEDUSA_API_KEY"

_LOG_LEVELS = ("debug", "info", "warning", "error")
_LARGEST_PORT = 65535
_MOST_SHUTDOWN_SECONDS = 86400
_BACKLOG = 2048  # connections that the system holds until they are accepted


def build_parser() -> argparse.ArgumentParser:
    default = ServeOptions
    parser = argparse.ArgumentParser(
        prog="medusa-serve",
        description="Serve an exported engine over HTTP with OpenAI's interface: /v1/completions, /v1/chat/completions,"
        " /v1/models; /health and Prometheus' /metrics. A request without temperature, top_p, top_k and min_p is"
        " answered as the acceptance options below say, by default greedily, where OpenAI would sample. One that gives"
        " a temperature above 0 asks for sampling, and is refused if the bundle was exported without.",
    )
    parser.add_argument(
        "--engine", required=True, type=Path, help="bundle folder of medusa-export, or NAME.plan of medusa-build"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default: %(default)s, this machine only"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    parser.add_argument("--served-model-name", metavar="NAME", help="of the model in requests; default: the bundle's")
    key = parser.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key", metavar="KEY", help=f"that requests have to bring; default: ${API_KEY_VARIABLE}, or none"
    )
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the key")
    parser.add_argument(
        "--sessions",
        type=int,
        default=default.sessions,
        help="answers written at once, each with a cache; default: %(default)s",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=default.max_queue,
        help="requests that wait for a session; more are refused with 429; default: %(default)s",
    )
    parser.add_argument("--max-body-bytes", type=int, default=default.max_body_bytes, help="default: %(default)s")
    parser.add_argument(
        "--deadline-ms", type=float, help="end an answer after the round that takes longer, prompt included"
    )
    parser.add_argument(
        "--shutdown-seconds",
        type=int,
        default=10,
        help="time that answers have to end in after SIGINT or SIGTERM; default: %(default)s",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        help="verify this tree, a file or the name of a shipped one, in every round; the engine stays as it is",
    )
    parser.add_argument(
        "--no-adaptive",
        action="store_true",
        help="verify the bundle's first tree in every round; without it and --tree, answers change between the bundle's"
        " trees and plain steps to what is fastest, the tokens stay the same",
    )
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding: no tree, no heads")
    parser.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    add_provider(parser)
    parser.add_argument("--no-verify", action="store_true", help="do not hash the engine's files before the start")
    parser.add_argument(
        "--log-level",
        choices=_LOG_LEVELS,
        default="warning",
        help="info logs every request to stderr; default: %(default)s",
    )
    add_policy_options(parser)
    add_version(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    if arguments is None:  # the process is this command's own
        restart_with_huge_pages()
    return run_command(build_parser(), _run, arguments, extra="serve")


def _run(options: argparse.Namespace) -> None:
    import uvicorn

    from medusa_engine.runtime.engine import Engine
    from medusa_engine.runtime.serve.app import make_app

    if options.tree and options.no_speculation:
        raise UserError("--tree and --no-speculation are given together", "drop one: plain decoding has no tree")
    if not 0 <= options.shutdown_seconds <= _MOST_SHUTDOWN_SECONDS:
        problem = f"--shutdown-seconds is {shown(options.shutdown_seconds)}"
        raise UserError(problem, f"give 0 to {_MOST_SHUTDOWN_SECONDS}")
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    policy, api_key = policy_of(options), _api_key(options)
    with _listen(options.host, options.port) as listener:
        engine = Engine.open(
            options.engine, threads=options.threads, verify=not options.no_verify, provider=options.provider
        )
        served = _serve_options(options, engine, policy, api_key)
        app = make_app(engine, served)
        engine.load(speculation=served.speculation, policy=policy.graph)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=options.log_level in ("debug", "info"),
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=options.shutdown_seconds,
        )
        _announce(listener, served)
        _serve_until_signal(uvicorn.Server(config), listener)


def _api_key(options: argparse.Namespace) -> str | None:
    key: str | None
    if options.api_key_file is not None:
        key = read_utf8_file(options.api_key_file, hint="save the key as one line of ASCII text").strip()
        source = str(options.api_key_file)
    else:
        key = os.environ.get(API_KEY_VARIABLE) if options.api_key is None else options.api_key
        source = f"${API_KEY_VARIABLE}" if options.api_key is None else "--api-key"
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(
            f"{source}: the API key is {'not one word of printable ASCII' if key else 'empty'}",
            "give a key that fits into an HTTP header, or leave it out to ask for none",
        )
    return key


def _serve_options(
    options: argparse.Namespace, engine: Engine, policy: AcceptancePolicy, api_key: str | None
) -> ServeOptions:
    from medusa_engine.runtime.tree import load_tree

    given = {field.name: getattr(options, field.name, None) for field in fields(policy) if field.name != "name"}
    return ServeOptions(
        model_name=engine.manifest.name if options.served_model_name is None else options.served_model_name,
        sessions=options.sessions,
        max_queue=options.max_queue,
        max_body_bytes=options.max_body_bytes,
        deadline_ms=options.deadline_ms,
        api_key=api_key,
        tree=load_tree(options.tree) if options.tree else None,
        speculation=not options.no_speculation,
        adaptive=not options.no_adaptive,
        acceptance=policy.name,
        parameters={name: value for name, value in given.items() if value is not None},
    )


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens: before the engine is loaded, as an address in use need not wait for that."""
    if not 0 <= port <= _LARGEST_PORT:  # the system would take its last 16 bits
        raise UserError(f"--port is {shown(port)}", f"give 0, for a free one, to {_LARGEST_PORT}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host}, port {port}: {reason}", "give another --port or --host") from error


def _announce(listener: socket.socket, served: ServeOptions) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    print(f"{served.model_name} at http://{address}:{port}/v1", flush=True)
    if served.api_key is None and not (host.startswith("127.") or host == "::1"):
        print("note: no --api-key: whoever reaches this address may use it", file=sys.stderr)


def _serve_until_signal(server: uvicorn.Server, listener: socket.socket) -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # The server's own handlers are there only while it runs; once it has ended it raises the signals again.
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
