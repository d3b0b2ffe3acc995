"""A fixed number of sessions and a bounded queue before them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.kept_cache import shared_length
from medusa_engine.runtime.serve.errors import RequestError
from medusa_engine.runtime.session import Session

_MOST_RETRY_SECONDS = 60  # OpenAI's client does not wait for longer
_RECENT = 0.2  # weight of the last answer in the running mean

_log = logging.getLogger(__name__)


class SessionPool:
    """Lends sessions to requests, in the order in which these come.

    Use it on one event loop.

    Args:
        engine: of the sessions.
        sessions: caches; as many requests have one at once.
        max_queue: requests that may wait; one more is refused.
    """

    def __init__(self, engine: Engine, *, sessions: int, max_queue: int) -> None:
        self._sessions = sessions
        self._max_queue = max_queue
        self._idle = [engine.session() for _ in range(sessions)]  # the one that was used last is at the end
        self._free = asyncio.Semaphore(sessions)
        self._waiting = 0
        self._mean_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting

    @property
    def running(self) -> int:
        """Requests that have a session."""
        return self._sessions - len(self._idle)

    @contextlib.asynccontextmanager
    async def session(self, prompt_ids: Sequence[int]) -> AsyncIterator[Session]:
        """Wait for a session: of those idle the one whose cache shares most with the prompt.

        Raises:
            RequestError: the queue is full; status 429 and a Retry-After.
        """
        if self._free.locked() and self._waiting >= self._max_queue:
            raise RequestError(
                f"{counted(self._waiting, 'request')} waiting already: try again later",
                code="queue_full",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                headers={"Retry-After": str(self._seconds_until_room())},
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        session = max(self._idle, key=lambda idle: shared_length(idle.token_ids, prompt_ids))  # of equals the oldest
        self._idle.remove(session)
        started = time.monotonic()
        try:
            yield session
        finally:
            self._mean_seconds += _RECENT * (time.monotonic() - started - self._mean_seconds)
            self._idle.append(session)
            self._free.release()

    async def close(self) -> None:
        """Wait for the sessions that are lent, and close all."""
        for _ in range(self._sessions):
            await self._free.acquire()
        for session in self._idle:
            session.close()
        _log.debug("%d sessions closed", self._sessions)

    def _seconds_until_room(self) -> int:
        """About how long the queue takes to move on by one."""
        return min(max(math.ceil(self._mean_seconds / self._sessions), 1), _MOST_RETRY_SECONDS)
