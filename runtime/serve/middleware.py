"""What is done for every request, whatever its path: its figures are counted and its key is compared."""

from __future__ import annotations

import secrets
import time
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_engine.runtime.serve.errors import RequestError
from medusa_engine.runtime.serve.metrics import Metrics

_CLIENT_LEFT = 499  # no answer was begun; the number is nginx's
_OPEN_PATHS = ("/health",)


class CountRequests:
    """Counts requests by endpoint and status.

    Args:
        app: behind it.
        metrics: of the server.
        endpoints: paths that are counted by name; all others are one.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, endpoints: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        sent: int | None = None

        async def noting_status(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
            await send(message)

        status = _CLIENT_LEFT
        try:
            await self._app(scope, receive, noting_status)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception:
            status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        finally:
            endpoint = scope["path"] if scope["path"] in self._endpoints else "other"
            self._metrics.requested(endpoint, status if sent is None else sent, time.perf_counter() - started)


class RequireKey:
    """Refuses requests without `Authorization: Bearer KEY`; /health needs none.

    Args:
        app: behind it.
        api_key: of the server.
    """

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() == b"bearer" and secrets.compare_digest(key.lstrip(b" "), self._expected):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            f"the API key is {'wrong' if given else 'missing'}: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            status=HTTPStatus.UNAUTHORIZED,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)
