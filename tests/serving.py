"""A server on loopback, in a thread of the test's process, and its clients."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import uvicorn

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.serve.app import make_app
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.serve.pool import SessionPool

TIMEOUT_SECONDS = 60


class Serving:
    """A running server.

    Attributes:
        url: of its root.
        http: a plain client.
        openai: OpenAI's own client, which does not try again by itself.
        pool: its sessions.
        loop_thread: the thread of its event loop.
    """

    def __init__(
        self, url: str, pool: SessionPool, server: uvicorn.Server, loop_thread: threading.Thread, api_key: str
    ) -> None:
        self.url = url
        self.pool = pool
        self._server = server
        self.loop_thread = loop_thread
        headers = {"Authorization": f"Bearer {api_key}"}
        self.http = httpx2.Client(base_url=url, timeout=TIMEOUT_SECONDS, headers=headers)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=TIMEOUT_SECONDS)

    def post(self, path: str, **fields: Any) -> httpx2.Response:
        return self.http.post(path, json=fields)

    def complete(self, prompt_ids: list[int], **fields: Any) -> dict[str, Any]:
        """The document of a completion that has to succeed, with its token ids."""
        response = self.post("/v1/completions", prompt=prompt_ids, return_token_ids=True, **fields)
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    def figure(self, line: str) -> float:
        """The value behind a name and its labels in /metrics; 0 where there is none."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(found.rsplit(" ", 1)[1]) for found in lines if found.startswith(f"{line} ")), 0.0)

    def wait_until_clients_have_left(self) -> None:
        """Wait until no connection is owed an answer, and what follows from that has been started."""

        def owed(connection: Any) -> bool:
            return connection.cycle is not None and not connection.cycle.response_complete

        wait_until(lambda: not any(owed(connection) for connection in list(self._server.server_state.connections)))
        self.http.get("/health")  # a turn of the event loop

    def end(self) -> None:
        """Ask the server to end, as a signal does."""
        self._server.should_exit = True

    def watch_passes(self, before: Callable[[], None]) -> Callable[[], None]:
        """Call `before` ahead of each round of every idle session, on the thread of the round; returns the undo."""
        states = [session._state for session in self.pool._idle]

        def watch(state: Any) -> None:
            round_ = state.round

            def watched(*arguments: Any) -> None:
                before()
                round_(*arguments)

            state.round = watched

        for state in states:
            watch(state)
        return lambda: [delattr(state, "round") for state in states] and None


@contextlib.contextmanager
def serving(engine: Engine, *, shutdown_seconds: int = 5, **options: Any) -> Iterator[Serving]:
    """Serve an engine under the name `tiny` until the block ends."""
    app = make_app(engine, ServeOptions(**{"model_name": "tiny", **options}))
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="on", log_config=None, timeout_graceful_shutdown=shutdown_seconds
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        serving = Serving(f"http://{host}:{port}", app.state.pool, server, thread, options.get("api_key") or "none")
        try:
            yield serving
        finally:
            serving.http.close()
            serving.openai.close()
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
