"""Answers for `async for`."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from medusa_engine.runtime.engine import Engine
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


def test_the_engine_is_loaded_on_the_thread_of_the_first_pass(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(own_heads.bundle, threads=1)
    load, threads = engine.backend.load, []

    def watched(**options: Any) -> None:
        threads.append(threading.get_ident())
        load(**options)

    monkeypatch.setattr(engine.backend, "load", watched)

    async def answer() -> Any:
        with pytest.raises(UserError, match="the prompt is empty"):
            engine.astream(prompt_ids=[])
        stream = engine.astream(prompt_ids=PROMPT, max_new_tokens=2)
        assert not threads
        async for _ in stream:
            pass
        return stream.generation

    assert asyncio.run(answer()).timings.load > 0
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("speculation", [True, False])
def test_a_graph_that_does_not_load_ends_the_answer_and_no_other(
    own_heads: Exported, tmp_path: Path, speculation: bool
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(own_heads.bundle, bundle)
    graph = bundle / ("round.onnx" if speculation else "step.onnx")
    graph.write_bytes(bytes(graph.stat().st_size))
    engine = Engine.open(bundle, threads=1, verify=False)
    ask: Any = {"prompt_ids": PROMPT, "max_new_tokens": 4}
    with engine.session() as session:
        expected = session.generate(**ask, speculation=not speculation).token_ids
        stream = session.stream(prompt_ids=[*session.token_ids, 5], speculation=speculation)
        with pytest.raises(UserError, match=r"does not load|not an ONNX graph") as refused:
            next(stream)
        assert str(graph) in refused.value.problem and str(bundle) not in refused.value.problem_without_file
        assert session.generate(**ask, speculation=not speculation).token_ids == expected


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
