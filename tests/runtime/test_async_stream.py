"""Answers for `async for`."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.session import Session

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPT = [5, 1, 4]


def test_pieces_are_those_of_the_plain_iterator(own_heads: Exported) -> None:
    async def answer() -> tuple[list[list[int]], Any]:
        stream = own_heads.engine.astream(prompt_ids=PROMPT, max_new_tokens=12)
        return [piece.token_ids async for piece in stream], stream.generation

    pieces, generation = asyncio.run(answer())
    plain = list(own_heads.engine.stream(prompt_ids=PROMPT, max_new_tokens=12))
    assert pieces == [piece.token_ids for piece in plain]
    assert all(piece.seconds > 0 for piece in plain)
    assert generation.finish_reason == "length"


def test_passes_do_not_run_on_the_thread_of_the_event_loop(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = watch_rounds(session := own_heads.engine.session(), monkeypatch)

    async def answer() -> None:
        async for _ in session.astream(prompt_ids=PROMPT, max_new_tokens=12):
            pass

    asyncio.run(answer())
    assert threads and threading.get_ident() not in threads


def test_a_cancelled_answer_leaves_the_session_exact(own_heads: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    session = own_heads.engine.session()
    running, go_on = threading.Event(), threading.Event()
    round_ = session._state.round

    def slow(*arguments: Any) -> None:
        running.set()
        assert go_on.wait(60)
        round_(*arguments)

    monkeypatch.setattr(session._state, "round", slow)

    async def answer() -> None:
        stream = session.astream(prompt_ids=PROMPT, max_new_tokens=12)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(running.wait)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # again, while it waits for the pass
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.generation.finish_reason == "closed"

    asyncio.run(answer())
    prompt = [*session.token_ids, 7]
    assert len(prompt) > len(PROMPT) + 1
    again = session.generate(prompt_ids=prompt, max_new_tokens=12)
    assert again.cached_tokens == len(prompt) - 1
    assert again.token_ids == own_heads.engine.generate(prompt_ids=prompt, max_new_tokens=12).token_ids


def test_an_answer_that_is_left_can_be_closed(own_heads: Exported) -> None:
    async def answer() -> str:
        stream = own_heads.engine.astream(prompt_ids=PROMPT, max_new_tokens=12)
        async for _ in stream:
            break
        await stream.aclose()
        return stream.generation.finish_reason

    async def managed() -> str:
        async with own_heads.engine.astream(prompt_ids=PROMPT, max_new_tokens=12) as stream:
            await anext(stream)
        return stream.generation.finish_reason

    assert asyncio.run(answer()) == asyncio.run(managed()) == "closed"


def test_a_bad_request_is_refused_before_the_iteration(own_heads: Exported) -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        own_heads.engine.astream(prompt_ids=[])


def watch_rounds(session: Session, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Threads that a session's rounds run on."""
    threads: set[int] = set()
    round_ = session._state.round

    def watched(*arguments: Any) -> None:
        threads.add(threading.get_ident())
        round_(*arguments)

    monkeypatch.setattr(session._state, "round", watched)
    return threads
