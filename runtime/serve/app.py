"""The application: its paths, and how it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.serve.answering import AnswerEndpoint
from medusa_engine.runtime.serve.asked import check_model
from medusa_engine.runtime.serve.errors import RequestError, json_response, server_failure
from medusa_engine.runtime.serve.metrics import Metrics
from medusa_engine.runtime.serve.middleware import CountRequests, RequireKey
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.serve.pool import SessionPool
from medusa_engine.runtime.strict_json import shown

_READING_THREADS = 4  # for requests that are read while every session runs
_METHODS = {
    "/health": "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
}


def make_app(engine: Engine, options: ServeOptions) -> Starlette:
    """The ASGI application of an engine.

    Its lifespan has to run: it makes the threads of the passes, and closes the sessions. `app.state.pool` is the
    `SessionPool`.

    Raises:
        UserError: the engine cannot run the options' tree or policy.
    """
    policy = AcceptancePolicy(options.acceptance, **options.parameters)
    engine.check_policy(policy, speculation=options.speculation)
    if options.tree is not None:
        engine.plans(policy, tree=options.tree)
    pool = SessionPool(engine, sessions=options.sessions, max_queue=options.max_queue)
    metrics = Metrics(pool, depth=engine.limits.depth)
    models = _Models(engine, options)

    async def health(_request: Request) -> Response:
        return json_response({"status": "ok"})

    async def figures(_request: Request) -> Response:
        return metrics.response()

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        executor = ThreadPoolExecutor(options.sessions + _READING_THREADS, thread_name_prefix="medusa-serve")
        asyncio.get_running_loop().set_default_executor(executor)
        yield
        await pool.close()

    endpoints: dict[str, Callable[..., Any]] = {
        "/health": health,
        "/metrics": figures,
        "/v1/models": models.every,
        "/v1/completions": AnswerEndpoint(engine, pool, metrics, options, chat=False),
        "/v1/chat/completions": AnswerEndpoint(engine, pool, metrics, options, chat=True),
    }
    routes = [Route(path, endpoints[path], methods=[method]) for path, method in _METHODS.items()]
    middleware = [Middleware(CountRequests, metrics=metrics, endpoints=frozenset(_METHODS))]
    if options.api_key is not None:
        middleware.append(Middleware(RequireKey, api_key=options.api_key))
    app = Starlette(
        routes=[*routes, Route("/v1/models/{name:path}", models.one, methods=["GET"])],
        middleware=middleware,
        exception_handlers={RequestError: _refuse, HTTPException: _refuse_path, Exception: _fail},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.pool = pool
    return app


class _Models:
    """The one model, as `/v1/models` shows it."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self._options = options
        self._model = {
            "id": options.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "medusa-engine",
            "max_model_len": engine.limits.max_length,
        }

    async def every(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model]})

    async def one(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._options)
        return json_response(self._model)


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response()


async def _refuse_path(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{shown(path)} does not take {method}: send {_METHODS.get(path, 'GET')}"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {shown(path)}: the paths are {', '.join(_METHODS)}"
    else:
        message = error.detail
    return RequestError(message, status=error.status_code, headers=error.headers).response()


async def _fail(_request: Request, _error: Exception) -> Response:
    return server_failure().response()
