"""An answer for `async for`: passes run on a thread, the event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from medusa_engine.runtime.generation import Generation, GenerationStream, Piece


class AsyncGenerationStream(AsyncIterator[Piece]):
    """Iterates over the pieces of an answer.

    As an asynchronous context manager it closes the answer when it is left.

    A cancelled task waits for the pass that is running, at most one, and closes the answer: its session can be used
    again at once.
    """

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Piece:
        running = asyncio.ensure_future(asyncio.to_thread(next, self._stream, None))
        try:
            piece = await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            running.exception()  # an error of that pass gives way to the cancellation
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
