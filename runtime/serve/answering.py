"""Completions and chat completions: from the request to the last byte of the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from medusa_engine.runtime.async_stream import AsyncGenerationStream, finish_in_thread
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import Generation, Piece
from medusa_engine.runtime.serve.asked import Asked, read_request
from medusa_engine.runtime.serve.connection import read_body, while_connected
from medusa_engine.runtime.serve.documents import Documents
from medusa_engine.runtime.serve.errors import (
    RequestError,
    ending,
    json_response,
    naming,
    server_failure,
    to_json,
    told,
)
from medusa_engine.runtime.serve.metrics import Metrics
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.serve.pool import SessionPool
from medusa_engine.runtime.session import Session

_log = logging.getLogger(__name__)

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front shall pass pieces on as they come
]

OnPiece = Callable[[Piece], Awaitable[None]]


class AnswerEndpoint:
    """An ASGI application for one path. Nothing that takes long runs on the event loop.

    A request that the server cancels, as its time to end is over, is told so.

    Args:
        engine, pool, metrics, options: of the server.
        chat: whether requests have messages instead of a prompt.
    """

    def __init__(
        self, engine: Engine, pool: SessionPool, metrics: Metrics, options: ServeOptions, *, chat: bool
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._metrics = metrics
        self._options = options
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        body = await read_body(Request(scope, receive), max_bytes=self._options.max_body_bytes)
        begun = False

        async def noting_begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await while_connected(receive, self._answer(body, started, scope, receive, noting_begin))
        except asyncio.CancelledError:
            if not begun:
                raise ending() from None

    async def _answer(self, body: bytes, started: float, scope: Scope, receive: Receive, send: Send) -> None:
        asked = await finish_in_thread(lambda: read_request(body, self._engine, self._options, chat=self._chat))
        documents = Documents(asked, self._options.model_name)
        queued = time.perf_counter()
        async with self._pool.session(asked.prompt_ids) as session:
            self._metrics.queued(time.perf_counter() - queued)
            stream = await self._start(asked, session)
            if asked.stream:
                await self._send_stream(stream, documents, started, send)  # the session is busy until all is sent
                return
            generation = await self._run(stream, started)
        await json_response(documents.answer(generation))(scope, receive, send)

    async def _start(self, asked: Asked, session: Session) -> AsyncGenerationStream:
        with naming(None, status=HTTPStatus.INTERNAL_SERVER_ERROR):  # no field is to blame for a graph that won't load
            await finish_in_thread(
                lambda: self._engine.load(speculation=self._options.speculation, policy=asked.policy.graph)
            )
        with naming(None):
            return await finish_in_thread(lambda: session.astream(**asked.options))

    async def _run(self, stream: AsyncGenerationStream, started: float, on_piece: OnPiece | None = None) -> Generation:
        """Run an answer to its end; `started` is when the request came."""
        begun = False
        try:
            async for piece in stream:
                if not begun:
                    self._metrics.begun(time.perf_counter() - started)
                    begun = True
                if on_piece is not None:
                    await on_piece(piece)
        except asyncio.CancelledError:
            await stream.aclose()
            self._metrics.answered(stream.generation)
            raise
        except Exception as error:
            await stream.aclose()
            self._metrics.failed()
            if isinstance(error, UserError):  # of a pass: the request was sound
                raise RequestError(told(error), status=HTTPStatus.INTERNAL_SERVER_ERROR) from error
            raise
        self._metrics.answered(stream.generation)
        return stream.generation

    async def _send_stream(
        self, stream: AsyncGenerationStream, documents: Documents, started: float, send: Send
    ) -> None:
        """Send an answer as server-sent events; an error in the middle of it is the last one."""

        async def event(document: object | None) -> None:
            if document is not None:
                await body(b"data: " + to_json(document) + b"\n\n")

        async def body(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def piece_event(piece: Piece) -> None:
            await event(documents.piece(piece))

        await send({"type": "http.response.start", "status": int(HTTPStatus.OK), "headers": _EVENT_HEADERS})
        await event(documents.first())
        try:
            generation = await self._run(stream, started, piece_event)
        except asyncio.CancelledError:  # nobody reads this if the client has left
            await event(ending().document())
            await body(b"", more=False)
            raise
        except RequestError as error:
            await event(error.document())
        except Exception:  # noqa: BLE001 - the status has been sent: only an event can tell
            _log.exception("an answer failed")
            await event(server_failure().document())
        else:
            for document in documents.last(generation):
                await event(document)
            await body(b"data: [DONE]\n\n")
        await body(b"", more=False)
