"""A session keeps its cache from turn to turn, and its answers stay those of a new session."""

from __future__ import annotations

import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.session import Session
from medusa_engine.runtime.tree import Tree, parse_tree

if TYPE_CHECKING:
    from tiny_models import Exported

Turn = tuple[list[int], dict[str, Any]]

SMALL = parse_tree([[0], [1], [0, 0], [1, 0], [0, 0, 0]], "six rows")
TREES: list[Tree | None] = [None, SMALL, Tree(())]
PROMPT = [5, 1, 4, 9, 9, 2, 30]


def fresh(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    return engine.generate(prompt_ids=prompt, max_new_tokens=tokens).token_ids


def common(first: list[int], second: list[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


@pytest.mark.parametrize("bundle", ["own_heads", "rigged_64"])
@pytest.mark.parametrize("seed", range(4))
def test_turns_that_share_any_part_of_what_came_before_are_those_of_new_sessions(
    request: pytest.FixtureRequest, bundle: str, seed: int
) -> None:
    engine = request.getfixturevalue(bundle).engine
    generator = np.random.default_rng(seed)
    turns: list[list[int]] = []  # tokens in the cache after each turn
    with engine.session() as session:
        for _ in range(12):
            held = session.token_ids
            kept = int(generator.integers(max(len(held) - 8, 0), len(held) + 1))
            if len(held) > 40 or generator.random() < 0.2:
                kept = int(generator.integers(0, len(held) + 1)) // 3
            new = generator.integers(0, 40, int(generator.integers(0 if kept else 1, 6))).tolist()
            prompt = [*held[:kept], *new]
            budget = int(generator.integers(0, 10))
            stream = session.stream(
                prompt_ids=prompt,
                max_new_tokens=budget,
                speculation=bool(generator.random() < 0.8),
                tree=TREES[generator.integers(len(TREES))],
            )
            if generator.random() < 0.3:  # left in the middle
                next(stream, None)
                stream.close()
            answer = stream.generation
            assert answer.cached_tokens == min(common(held, prompt), len(prompt) - 1)
            assert answer.token_ids == fresh(engine, prompt, budget)[: answer.generated_tokens]
            if answer.finish_reason != "closed":
                assert answer.generated_tokens == budget
                assert session.token_ids == [*prompt, *answer.token_ids] or not budget
            turns.append(session.token_ids)
    assert len({len(tokens) for tokens in turns}) > 3


def test_the_next_turn_runs_only_its_new_tokens(own_heads: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = own_heads.engine
    with engine.session() as session:
        answer = session.generate(prompt_ids=PROMPT, max_new_tokens=12)
        ran: list[tuple[list[int], int]] = []
        prefill = session._state.prefill

        def observed(token_ids: Any, start: int, next_tree: Any) -> None:
            ran.append((token_ids.tolist(), start))
            prefill(token_ids, start, next_tree)

        monkeypatch.setattr(session._state, "prefill", observed)
        prompt = [*PROMPT, *answer.token_ids, 8, 3]
        assert session.generate(prompt_ids=prompt, max_new_tokens=12).token_ids == fresh(engine, prompt, 12)
        assert ran == [([8, 3], len(PROMPT) + 12)]


def test_a_stream_that_is_closed_says_so_and_keeps_what_it_published(own_heads: Exported) -> None:
    engine = own_heads.engine
    with engine.session() as session:
        stream = session.stream(prompt_ids=PROMPT, max_new_tokens=20)
        published = next(stream).token_ids
        stream.close()
        stream.close()
        assert next(stream, None) is None
        assert (stream.generation.finish_reason, stream.generation.token_ids) == ("closed", published)
        assert session.token_ids == [*PROMPT, *published]
        unstarted = session.stream(prompt_ids=PROMPT)
        unstarted.close()
        assert unstarted.generation.finish_reason == "closed"


def test_leaving_a_stream_closes_it(own_heads: Exported) -> None:
    with own_heads.engine.session() as session:
        with session.stream(prompt_ids=PROMPT, max_new_tokens=20) as stream:
            published = next(stream).token_ids
        assert (stream.generation.finish_reason, stream.generation.token_ids) == ("closed", published)
        with session.stream(prompt_ids=PROMPT, max_new_tokens=3) as stream:
            list(stream)
        assert stream.generation.finish_reason == "length"


def test_a_new_answer_closes_the_one_before(own_heads: Exported) -> None:
    engine = own_heads.engine
    with engine.session() as session:
        first = session.stream(prompt_ids=PROMPT, max_new_tokens=20)
        next(first)
        second = session.generate(prompt_ids=[*PROMPT, 8], max_new_tokens=9)
        assert first.generation.finish_reason == "closed"
        assert second.token_ids == fresh(engine, [*PROMPT, 8], 9)


def test_a_refused_request_leaves_the_session_and_its_answer_as_they_were(own_heads: Exported) -> None:
    engine = own_heads.engine
    with engine.session() as session:
        stream = session.stream(prompt_ids=PROMPT, max_new_tokens=20)
        published = list(next(stream).token_ids)
        for refused in ([], [1] * 601, [999]):
            with pytest.raises(UserError):
                session.stream(prompt_ids=refused)
        published += [token for piece in stream for token in piece.token_ids]
        assert published == fresh(engine, PROMPT, 20)


def test_after_a_pass_that_failed_the_cache_is_not_relied_on(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_heads.engine
    with engine.session() as session:
        stream = session.stream(prompt_ids=PROMPT, max_new_tokens=20)
        next(stream)
        round_ = session._state.round

        def interrupted(*arguments: Any) -> None:
            round_(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(session._state, "round", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        with pytest.raises(RuntimeError, match="ended by an error"):
            _ = stream.generation
        assert session.token_ids == []
        again = session.generate(prompt_ids=[*PROMPT, 8], max_new_tokens=12)
        assert (again.cached_tokens, again.token_ids) == (0, fresh(engine, [*PROMPT, 8], 12))


# Forks


@pytest.mark.parametrize("rounds_run", [0, 1, None], ids=["unused", "in an answer", "answered"])
def test_forks_go_on_alone_from_what_they_share(own_heads: Exported, rounds_run: int | None) -> None:
    engine = own_heads.engine
    with engine.session() as session:
        if rounds_run != 0:
            stream = session.stream(prompt_ids=PROMPT, max_new_tokens=20, tree=SMALL)
            for _ in zip(range(rounds_run or 100), stream, strict=False):
                pass
        shared = session.token_ids
        with session.fork() as fork, fork.fork() as second:
            assert fork.token_ids == second.token_ids == shared
            for turn, branch in enumerate((fork, session, second, fork, session)):
                prompt = [*shared, 7 + turn, 3]
                answer = branch.generate(prompt_ids=prompt, max_new_tokens=12)
                assert answer.cached_tokens == len(shared)
                assert answer.token_ids == fresh(engine, prompt, 12)


def test_a_fork_copies_accepted_rows_from_where_the_tree_had_them(rigged_64: Exported) -> None:
    engine = rigged_64.engine
    scattered = False
    with engine.session() as session:
        for _ in session.stream(prompt_ids=[0], max_new_tokens=30, tree=SMALL):
            slot, shared = session._state.slot, session.token_ids
            rows = slot.pending_rows[: slot.pending_count[0]].tolist()
            scattered |= rows != list(range(len(rows)))
            with session.fork() as fork, engine.session() as new:
                new.generate(prompt_ids=shared, max_new_tokens=1)
                for name, buffer in fork._state.cache.items():
                    forked, expected = (
                        cache.numpy()[:, :, : len(shared)] for cache in (buffer, new._state.cache[name])
                    )
                    np.testing.assert_allclose(forked, expected, atol=1e-4)
    assert scattered, "no round accepted a path other than the first rows"


# Closing


def test_a_closed_session_is_refused_whatever_is_asked_of_it(own_heads: Exported) -> None:
    session = own_heads.engine.session()
    stream = session.stream(prompt_ids=PROMPT)
    next(stream)
    session.close()
    session.close()
    assert stream.generation.finish_reason == "closed"
    asked: list[Any] = [session.stream, session.generate, session.astream, lambda prompt_ids: session.fork()]
    for ask in asked:
        with pytest.raises(UserError, match="the session is closed"):
            ask(prompt_ids=PROMPT)


def test_closing_releases_the_cache_at_once_even_where_a_stream_is_kept(own_heads: Exported) -> None:
    gc.collect()
    gc.disable()
    try:
        with own_heads.engine.session() as session:
            cache = weakref.ref(session._state)
            streams = [session.stream(prompt_ids=PROMPT, max_new_tokens=5) for _ in range(3)]
            next(streams[-1])
        assert cache() is None
        with own_heads.engine.session() as session:
            session.generate(prompt_ids=PROMPT, max_new_tokens=5)
            cache = weakref.ref(session._state)
        assert cache() is None
    finally:
        gc.enable()


# Sharing an engine


def test_sessions_on_several_threads_answer_as_each_alone(own_heads: Exported) -> None:
    engine = Engine.open(own_heads.bundle, threads=1)  # its graphs are loaded by whichever thread is first

    def converse(first: int) -> list[list[int]]:
        with engine.session() as session:
            return [turn(session, first + index, speculation=first % 2 == 0) for index in range(4)]

    def turn(session: Session, token: int, *, speculation: bool) -> list[int]:
        prompt = [*session.token_ids, token]
        return session.generate(prompt_ids=prompt, max_new_tokens=8, speculation=speculation).token_ids

    with ThreadPoolExecutor(max_workers=4) as pool:
        together = list(pool.map(converse, range(8)))
    assert together == [converse(first) for first in range(8)]


def test_nothing_is_printed_and_loggers_tell_on_request(
    own_heads: Exported, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=3)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, logger="medusa_engine"):
        own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=3)
    assert any("answer of 3 tokens" in record.message for record in caplog.records)
    caplog.clear()
    assert capfd.readouterr() == ("", "")
