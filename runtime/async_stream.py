"""An answer for `async for`: passes run on a thread, the event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TypeVar

from medusa_engine.runtime.generation import Generation, GenerationStream, Piece

T = TypeVar("T")


async def finish_in_thread(call: Callable[[], T]) -> T:
    """The result of a call that runs on a thread; a task cancelled meanwhile ends only once the call has."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # an error of that call gives way to the cancellation
        raise


class AsyncGenerationStream(AsyncIterator[Piece]):
    """Iterates over the pieces of an answer.

    As an asynchronous context manager it closes the answer when it is left.

    A cancelled task waits for the pass that is running, at most one, and closes the answer: its session can be used
    again at once.
    """

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Piece:
        try:
            piece = await finish_in_thread(lambda: next(self._stream, None))
        except asyncio.CancelledError:
            self._stream.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> AsyncGenerationStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the answer here, as `GenerationStream.close` does."""
        self._stream.close()

    @property
    def generation(self) -> Generation:
        """The finished answer, once the iteration has ended; before, it runs the rest without giving way."""
        return self._stream.generation
