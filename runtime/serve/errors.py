"""Refused requests, in the JSON shape of OpenAI's errors."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from medusa_engine.runtime.errors import UserError

_log = logging.getLogger(__name__)


class RequestError(Exception):
    """What ends a request with an error.

    Args:
        message: what is wrong, and what to do.
        param: the field at fault.
        code: for programs.
        status: of HTTP.
        headers: more than the usual ones.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = HTTPStatus.BAD_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = int(status)
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.document(), status=self.status, headers=self.headers)


def server_failure() -> RequestError:
    """A mistake of the server itself, whose log tells what it was."""
    return RequestError("the server failed: its log tells why", status=HTTPStatus.INTERNAL_SERVER_ERROR)


def ending() -> RequestError:
    """What a request is told whose answer the server no longer has time for."""
    return RequestError("the server is shutting down: try again later", status=HTTPStatus.SERVICE_UNAVAILABLE)


@contextlib.contextmanager
def naming(param: str | None, *, status: int = HTTPStatus.BAD_REQUEST, code: str | None = None) -> Iterator[None]:
    """Let a `UserError` of the block refuse the request, with this field at fault."""
    try:
        yield
    except UserError as error:
        raise RequestError(told(error), param=param, status=status, code=code) from error


def told(error: UserError) -> str:
    """What a client is told of an error: files of the server are named in its log alone."""
    if error.problem != error.problem_without_file:
        _log.warning("%s: %s", error.problem, error.hint)
    return f"{error.problem_without_file}: {error.hint}"


def to_json(document: object) -> bytes:
    """JSON text in UTF-8; half of a surrogate pair, which UTF-8 does not have, is written as an escape."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(
    document: object, *, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(to_json(document), status_code=status, headers=headers, media_type="application/json")
