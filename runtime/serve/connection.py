"""The two ends of a request: its body, within bounds, and the client that may leave before the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from medusa_engine.runtime.serve.errors import RequestError


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        RequestError: it is larger than that (413), or its type is not JSON (415).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page elsewhere may send other types without asking
        raise RequestError(
            "the request's body is not declared as JSON: send the header Content-Type: application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:  # the server drops the rest
            raise RequestError(
                f"the request's body is larger than {max_bytes} bytes: shorten it",
                code="request_too_large",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the work; cancel it if the client leaves.

    Args:
        receive: of a request whose body has been read.
        work: has ended when this returns or raises, cancelled or not.

    Raises:
        ClientDisconnect: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        for task in (working, leaving):
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # raised above, or given way to the cancellation


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
