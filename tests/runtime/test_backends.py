"""What an answer and a session promise, on every backend: the bundle on ONNX Runtime, and plans."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cache_invariants import check_cache, prefill_cache
from fake_cuda import FakeCudart
from fake_tensorrt import make_plan, open_plan
from plan_states import check_plan_cache

from medusa_engine.runtime.cuda import open_cuda
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_plan import PLAIN, TreePlan

if TYPE_CHECKING:
    from tiny_models import Exported, Rigged

# Plans: of a graph for ONNX Runtime or of one for TensorRT (fixed), whose work the stand-ins run as late as they may
# or at once (early); and built, on a GPU.
BACKENDS = ["onnxruntime", "late", "early", "fixed", pytest.param("gpu", marks=pytest.mark.gpu)]
PAIR = parse_tree([[0], [1]], "pair")
CHAIN = parse_tree([[0], [0, 0], [0, 0, 0]], "chain")
WIDE = parse_tree([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 1, 0, 1]], "wide")
TREES = [WIDE, PAIR, CHAIN, PLAIN]


def in_words(trees: list[Tree]) -> str:
    return ", ".join(tree.name for tree in trees)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if request.param == "onnxruntime":
        exported: Exported = request.getfixturevalue("rigged_96")
        yield Engine.open(exported.bundle, threads=1)
        return
    path = tmp_path_factory.mktemp("plan") / "rigged.plan"
    if request.param == "gpu":
        _need_gpu()
        yield Engine.open(build_plan(request.getfixturevalue("rigged_fixed").bundle, path))
        return
    cudart = FakeCudart()
    cudart.early = request.param == "early"
    exported = request.getfixturevalue("rigged_fixed" if request.param == "fixed" else "rigged_96")
    yield open_plan(exported.bundle, make_plan(exported.bundle, path), cudart).engine


def _need_gpu() -> None:
    try:
        open_cuda()
    except UserError:
        pytest.skip("needs a CUDA device")


def build_plan(bundle: Path, path: Path) -> Path:
    """A real plan, for the GPU here."""
    command = [str(Path(sys.executable).with_name("medusa-build")), str(bundle), "-o", str(path)]
    flavor = "tensorrt" if _importable("tensorrt") else "tensorrt-rtx"
    subprocess.run([*command, "--flavor", flavor], check=True)
    return path


def _importable(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


def check_rows(engine: Engine, state: Any, token_ids: list[int], exported: Exported) -> None:
    """Check the cache rows of these tokens; rows of tokens behind them do not count."""
    if not token_ids:
        return
    expected = prefill_cache(exported.model, token_ids)
    if isinstance(state, OnnxRuntimeState):
        check_cache(state, len(token_ids), expected)
    elif "Imaginary" in engine.backend._cuda.name:  # type: ignore[attr-defined]
        check_plan_cache(state, token_ids, expected)


# Exactness


@pytest.mark.parametrize("tree", [*TREES, None], ids=lambda t: t.name if t else "adaptive")
def test_answers_are_those_of_greedy_decoding_for_every_tree(
    engine: Engine, rigged_heads: Rigged, tree: Tree | None
) -> None:
    for prompt in ([3], [7] * 40, [1, 2]):  # shorter and longer than a chunk of the plan
        answer = engine.generate(prompt_ids=prompt, max_new_tokens=20, tree=tree, ignore_eos=True)
        assert answer.token_ids == rigged_heads.answer(prompt, 20)
        if tree is not None:
            assert answer.published_per_round == rigged_heads.published_per_round(prompt, tree, 20)
            assert set(answer.round_trees) == {tree.name}


def test_lookup_finds_what_recurs_in_prompt_and_answer(engine: Engine, rigged_heads: Rigged) -> None:
    circle = [3, *rigged_heads.answer([3], len(rigged_heads.next_token) - 1)]
    chain = parse_tree([["L"] * length for length in range(1, 5)], "lookup alone")
    for prompt in ([*circle, *circle[:3]], [*circle[:30], 7, *circle[:3]]):
        answer = engine.generate(prompt_ids=prompt, max_new_tokens=20, tree=chain, ignore_eos=True)
        assert answer.token_ids == rigged_heads.answer(prompt, 20)
        assert answer.published_per_round == [5, 5, 5, 5]
    # In a conversation, and in a fork of it, what was answered before is found too.
    with engine.session() as session:
        first = session.generate(prompt_ids=[3], max_new_tokens=24, tree=TREES[0], ignore_eos=True).token_ids
        prompt = [3, *first, 5, *first[:3]]
        with session.fork() as fork:
            for each in (session, fork):
                answer = each.generate(prompt_ids=prompt, max_new_tokens=15, tree=chain, ignore_eos=True)
                assert answer.token_ids == rigged_heads.answer(prompt, 15)
                assert answer.published_per_round == [5, 5, 5]


def test_plain_steps_give_the_same(engine: Engine, rigged_heads: Rigged) -> None:
    answer = engine.generate(prompt_ids=[3], max_new_tokens=20, speculation=False, ignore_eos=True)
    assert answer.token_ids == rigged_heads.answer([3], 20)
    assert answer.published_per_round == [1] * 20


class Pattern:
    """`Plans` that go through trees in turn; several may be chosen before the first of them is recorded."""

    used = PLAIN

    def __init__(self, engine: Engine, trees: list[Tree]) -> None:
        plans = {tree.name: TreePlan(tree, engine.limits) for tree in trees}
        self._turns = cycle([plans[tree.name] for tree in trees])
        self.recorded: list[str] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Nothing depends on it."""

    def choose(self) -> TreePlan:
        return next(self._turns)

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        assert token_ids and seconds > 0
        if whole:
            self.recorded.append(plan.tree.name)


@pytest.mark.parametrize("trees", [[WIDE, PLAIN], [PLAIN, PLAIN, CHAIN, WIDE], [PAIR, PAIR, PAIR, WIDE]], ids=in_words)
def test_trees_may_change_from_round_to_round(
    engine: Engine, rigged_96: Exported, rigged_heads: Rigged, trees: list[Tree]
) -> None:
    state = engine.backend.new_state()
    plans = Pattern(engine, trees)
    decoding = Decoding(state, engine.limits, [3, 0], plan=plans, max_new_tokens=30, stop_ids=frozenset())
    tokens: list[int] = []
    frontier = 0
    for round_, tree in zip(decoding, cycle(trees), strict=False):
        assert round_.tree == tree.name
        if len(tokens) < 25:
            assert len(round_.token_ids) == rigged_heads.published_per_round([frontier], tree, 99)[0]
        tokens += round_.token_ids
        frontier = tokens[-1]
    assert tokens == rigged_heads.answer([0], 30)
    assert plans.recorded == [round_.tree for round_ in decoding.rounds][:-1]
    check_rows(engine, state, [3, 0, *tokens], rigged_96)


# What ends an answer


def test_a_stop_token_ends_an_answer_and_the_session_goes_on(
    engine: Engine, rigged_96: Exported, rigged_heads: Rigged
) -> None:
    for tree in (None, WIDE, CHAIN, PLAIN):
        with engine.session() as session:
            answer = session.generate(prompt_ids=[0], max_new_tokens=25, tree=tree)
            assert (answer.token_ids, answer.finish_reason) == (rigged_heads.answer([0], 10), "stop")
            assert session.token_ids == [0, *answer.token_ids]
            prompt = [*session.token_ids, 5, 3]
            again = session.generate(prompt_ids=prompt, max_new_tokens=7, tree=tree, ignore_eos=True)
            assert again.token_ids == rigged_heads.answer([3], 7)
            assert again.cached_tokens == 11
            check_rows(engine, session._state, session.token_ids, rigged_96)


def test_an_answer_has_exactly_as_many_tokens_as_its_budget(
    engine: Engine, rigged_96: Exported, rigged_heads: Rigged
) -> None:
    with engine.session() as session:
        for budget in range(13):
            prompt = [*session.token_ids[:3], 8, 3]
            answer = session.generate(prompt_ids=prompt, max_new_tokens=budget, tree=WIDE, ignore_eos=True)
            assert answer.token_ids == rigged_heads.answer([3], budget)
            assert answer.finish_reason == "length"
            check_rows(engine, session._state, session.token_ids, rigged_96)


@pytest.mark.parametrize("options", [{"tree": WIDE}, {"tree": PLAIN}, {}, {"speculation": False}])
def test_an_answer_ends_where_the_cache_ends(engine: Engine, rigged_heads: Rigged, options: dict[str, Any]) -> None:
    most = engine.limits.max_length
    for room in (0, 1, 2, 9):
        prompt = [3] * (most - room)
        answer = engine.generate(prompt_ids=prompt, max_new_tokens=50, ignore_eos=True, **options)
        assert (answer.token_ids, answer.finish_reason) == (rigged_heads.answer([3], room), "cache_full")


def test_behind_a_deadline_the_session_goes_on(engine: Engine, rigged_96: Exported, rigged_heads: Rigged) -> None:
    with engine.session() as session:
        for _ in range(3):
            prompt = [*session.token_ids, 4, 3]
            stream = session.stream(prompt_ids=prompt, max_new_tokens=40, deadline=1e4, tree=WIDE, ignore_eos=True)
            next(stream)
            next(stream)
            stream._decoding._deadline = 1e-9  # type: ignore[union-attr]
            answer = stream.generation
            assert answer.finish_reason == "deadline" and answer.rounds == 2
            assert answer.token_ids == rigged_heads.answer([3], answer.generated_tokens)
            assert session.token_ids == [*prompt, *answer.token_ids]
            check_rows(engine, session._state, session.token_ids, rigged_96)


def test_an_answer_may_be_closed_behind_every_round(engine: Engine, rigged_96: Exported, rigged_heads: Rigged) -> None:
    with engine.session() as session:
        for rounds in range(5):
            prompt = [*session.token_ids, 6, 3]
            with session.stream(prompt_ids=prompt, max_new_tokens=30, tree=WIDE, ignore_eos=True) as stream:
                tokens = [token for _ in range(rounds) for token in next(stream).token_ids]
            assert tokens == rigged_heads.answer([3], len(tokens))
            if rounds:
                assert session.token_ids == [*prompt, *tokens]
                check_rows(engine, session._state, session.token_ids, rigged_96)


def test_an_answer_may_end_inside_a_round_that_was_read(
    engine: Engine, rigged_96: Exported, rigged_heads: Rigged
) -> None:
    plan = TreePlan(WIDE, engine.limits)
    scattered = False
    for start in range(0, 48, 4):
        for rounds, kept in ((1, 1), (1, 2), (2, 2), (2, 3)):
            state = engine.backend.new_state()
            decoding = Decoding(state, engine.limits, [0, start], plan=plan, max_new_tokens=30, stop_ids=frozenset())
            for index, round_ in enumerate(decoding):
                if index + 1 == rounds:
                    length = len(round_.token_ids)
                    decoding.stop(min(kept, length))
            if kept >= length:
                continue
            scattered |= kept > 1
            tokens = [0, start, *(token for round_ in decoding.rounds for token in round_.token_ids)]
            assert decoding.held == tokens == [0, start, *rigged_heads.answer([start], len(tokens) - 2)]
            check_rows(engine, state, tokens, rigged_96)
            state.wind_back(len(tokens))
            again = Decoding(
                state,
                engine.limits,
                [*tokens, 9, 3],
                plan=plan,
                max_new_tokens=6,
                stop_ids=frozenset(),
                cached_tokens=len(tokens),
            )
            assert [token for round_ in again for token in round_.token_ids] == rigged_heads.answer([3], 6)
            check_rows(engine, state, again.held, rigged_96)
    assert scattered, "no answer was cut behind a row that may lie elsewhere"


# Sessions


def test_interleaved_answers_are_what_each_is_alone(engine: Engine, rigged_heads: Rigged) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt_ids": [5, 1, 4], "tree": WIDE},
        {"prompt_ids": list(range(40)), "tree": CHAIN},
        {"prompt_ids": [9], "speculation": False},
        {"prompt_ids": [7, 7, 2, 30, 11]},
    ]
    streams = [engine.stream(**options, max_new_tokens=20, ignore_eos=True) for options in asked]
    tokens: list[list[int]] = [[] for _ in streams]
    unfinished = set(range(len(streams)))
    while unfinished:
        for index in sorted(unfinished):
            piece = next(streams[index], None)
            if piece is None:
                unfinished.remove(index)
            else:
                tokens[index] += piece.token_ids
    assert tokens == [rigged_heads.answer(options["prompt_ids"], 20) for options in asked]


@pytest.mark.parametrize("seed", range(3))
def test_turns_that_share_any_part_of_what_came_before(
    engine: Engine, rigged_96: Exported, rigged_heads: Rigged, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    with engine.session() as session:
        for _ in range(10):
            held = session.token_ids
            kept = int(generator.integers(max(len(held) - 8, 0), len(held) + 1))
            if len(held) > 35:
                kept = int(generator.integers(0, len(held) + 1)) // 3
            prompt = [*held[:kept], *generator.integers(0, 40, int(generator.integers(0 if kept else 1, 6))).tolist()]
            budget = int(generator.integers(0, 10))
            stream = session.stream(
                prompt_ids=prompt,
                max_new_tokens=budget,
                ignore_eos=True,
                speculation=bool(generator.random() < 0.8),
                tree=[None, WIDE, CHAIN, PLAIN][generator.integers(4)],
            )
            if generator.random() < 0.3:  # left in the middle
                next(stream, None)
                stream.close()
            tokens = stream.generation.token_ids
            assert tokens == rigged_heads.answer(prompt, len(tokens))
            if stream.generation.finish_reason != "closed":
                assert len(tokens) == budget
                check_rows(engine, session._state, session.token_ids, rigged_96)


@pytest.mark.parametrize("rounds", [0, 1, 2, None], ids=["unused", "one round", "two rounds", "answered"])
def test_forks_go_on_alone_from_what_they_share(
    engine: Engine, rigged_96: Exported, rigged_heads: Rigged, rounds: int | None
) -> None:
    for start in range(0, 48, 8):
        with engine.session() as session:
            if rounds != 0:
                stream = session.stream(prompt_ids=[0, start], max_new_tokens=12, tree=WIDE, ignore_eos=True)
                for _ in zip(range(rounds or 100), stream, strict=False):
                    pass
            shared = session.token_ids
            with session.fork() as fork, fork.fork() as second:
                for turn, branch in enumerate((session, second, fork, session)):
                    prompt = [*shared, 7 + turn, 3]
                    answer = branch.generate(prompt_ids=prompt, max_new_tokens=9, ignore_eos=True)
                    assert answer.cached_tokens == len(shared)
                    assert answer.token_ids == rigged_heads.answer([3], 9)
                    check_rows(engine, branch._state, branch.token_ids, rigged_96)


def test_a_fork_keeps_its_rows_whatever_the_session_writes_next(engine: Engine, rigged_96: Exported) -> None:
    with engine.session() as session:
        session.generate(prompt_ids=[0, 3], max_new_tokens=12, tree=WIDE, ignore_eos=True)
        with session.fork() as fork:
            session.generate(prompt_ids=[9, 8, 7, 6, 5], max_new_tokens=20, tree=WIDE, ignore_eos=True)
            check_rows(engine, fork._state, fork.token_ids, rigged_96)
