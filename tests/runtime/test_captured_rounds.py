"""Rounds of a plan as CUDA graphs: captured behind a warm-up, replayed, and never waited for as a whole.

CUDA and TensorRT are stand-ins here, see `fake_cuda`: what a real capture takes is for a GPU to show.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cache_invariants import prefill_cache
from fake_cuda import FakeCudart, cudaError_t
from fake_tensorrt import FakeContext, FakePlan, make_plan, open_plan
from plan_states import check_plan_cache, device_array

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import compile_tree
from medusa_engine.runtime.tree_plan import TreePlan

if TYPE_CHECKING:
    from tiny_models import Exported, Rigged

TREE = parse_tree([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]], "ten rows")
ASK: dict[str, Any] = {"tree": TREE, "ignore_eos": True}
STOP = 30  # tokens of an answer


@pytest.fixture(params=["late", "early"])
def plan(request: pytest.FixtureRequest, rigged_96: Exported, tmp_path: Path) -> FakePlan:
    cudart = FakeCudart()
    cudart.early = request.param == "early"
    return open_plan(rigged_96.bundle, make_plan(rigged_96.bundle, tmp_path / "a.plan"), cudart)


def late_plan(rigged_96: Exported, folder: Path, **module: Any) -> FakePlan:
    return open_plan(rigged_96.bundle, make_plan(rigged_96.bundle, folder / "a.plan"), **module)


# The loop


@pytest.mark.parametrize("options", [{}, {"speculation": False, "tree": None}], ids=["rounds", "plain"])
def test_the_next_pass_is_in_flight_whenever_one_is_read_and_nothing_waits_for_the_stream(
    rigged_96: Exported, tmp_path: Path, options: dict[str, Any]
) -> None:
    plan = late_plan(rigged_96, tmp_path)
    budget = 12
    stream = plan.engine.stream(prompt_ids=[3], max_new_tokens=budget, **ASK | options)
    (on_gpu,) = plan.cudart.streams.values()
    for piece in stream:
        budget -= len(piece.token_ids)
        # What is left in the stream behind the pass that was waited for is the pass behind it, not begun.
        assert on_gpu.waiting or not budget
        assert plan.cudart.calls["cudaStreamSynchronize"] == 0
    assert budget == 0


def test_a_round_is_warmed_up_captured_once_per_ring_slot_and_replayed(plan: FakePlan, rigged_heads: Rigged) -> None:
    with plan.engine.session() as session:
        for turn in range(3):
            prompt = [*session.token_ids, 3]
            answer = session.generate(prompt_ids=prompt, max_new_tokens=12, **ASK)
            assert answer.token_ids == rigged_heads.answer([3], 12)
            calls = plan.cudart.calls
            assert calls["cudaStreamBeginCapture"] == calls["cudaGraphInstantiate"] == 2
            if turn == 0:
                allocations = calls["cudaMalloc"] + calls["cudaHostAlloc"]
                launches = plan.cudart.launches
        assert calls["cudaMalloc"] + calls["cudaHostAlloc"] == allocations
        assert plan.cudart.launches > launches
        decode = next(context for context in plan.contexts if context.profile == 0)
        assert decode.passes == 3  # the warm-up and two captures


def test_a_session_takes_over_what_the_one_before_had_on_the_gpu(plan: FakePlan, rigged_heads: Rigged) -> None:
    for token in (3, 9, 20):
        answer = plan.engine.generate(prompt_ids=[token], max_new_tokens=12, **ASK)
        assert answer.token_ids == rigged_heads.answer([token], 12)
    assert plan.cudart.calls["cudaStreamBeginCapture"] == 2
    assert len(plan.contexts) == 2


def test_addresses_never_change_and_lie_apart(plan: FakePlan) -> None:
    with plan.engine.session() as session:
        session.generate(prompt_ids=[3], max_new_tokens=9, **ASK)
        session.generate(prompt_ids=[*session.token_ids, 4], max_new_tokens=9, speculation=False)
        before = [dict(context.addresses) for context in plan.contexts]
        session.generate(prompt_ids=list(range(30)), max_new_tokens=9, **ASK)
        assert [context.addresses for context in plan.contexts] == before
        buffers = session._state._device.buffers  # type: ignore[attr-defined]
        ends = sorted((place.offset, place.offset + place.count) for place in buffers.places.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
        assert ends[-1][1] <= buffers.size


@pytest.mark.parametrize("lengths", [[1, 40, 2], [30, 1, 17]], ids=str)
def test_replays_behind_prompts_of_any_length_equal_passes_that_were_never_captured(
    rigged_96: Exported, tmp_path: Path, lengths: list[int]
) -> None:
    def conversation(folder: str, *, captured: bool) -> tuple[list[list[int]], list[Any]]:
        (tmp_path / folder).mkdir()
        plan = late_plan(rigged_96, tmp_path / folder)
        if not captured:
            plan.cudart.fail["cudaStreamBeginCapture"] = cudaError_t.cudaErrorInvalidValue
        answers, caches = [], []
        with plan.engine.session() as session:
            for number, length in enumerate(lengths):
                prompt = [(7 * number + index) % 48 for index in range(length)]
                answers.append(session.generate(prompt_ids=prompt, max_new_tokens=9, **ASK).token_ids)
                state: Any = session._state
                check_plan_cache(state, session.token_ids, prefill_cache(rigged_96.model, session.token_ids))
                caches.append(device_array(state, "key.1").copy())
        assert (plan.cudart.launches > 0) == captured
        return answers, caches

    replayed, plain = conversation("replayed", captured=True), conversation("plain", captured=False)
    assert replayed[0] == plain[0]
    for one, other in zip(replayed[1], plain[1], strict=True):
        np.testing.assert_array_equal(one, other)


# A capture that fails


def refusing(context: FakeContext) -> bool:
    return all(stream.captured is None for stream in context.engine.cudart.streams.values())


def allocating(context: FakeContext) -> bool:
    if not refusing(context):
        context.engine.cudart.cudaMalloc(64)
    return True


@pytest.mark.parametrize(
    ("fail", "before_pass", "named"),
    [
        ("cudaStreamBeginCapture", None, "cudaStreamBeginCapture"),
        ("cudaStreamEndCapture", None, "cudaStreamEndCapture"),
        ("cudaGraphInstantiate", None, "cudaGraphInstantiate"),
        (None, refusing, "execute_async_v3"),
        (None, allocating, "cudaErrorStreamCaptureInvalidated"),
    ],
)
def test_a_capture_that_fails_is_said_and_rounds_go_on_plainly(
    rigged_96: Exported,
    tmp_path: Path,
    rigged_heads: Rigged,
    caplog: pytest.LogCaptureFixture,
    fail: str | None,
    before_pass: Callable[[FakeContext], bool] | None,
    named: str,
) -> None:
    plan = late_plan(rigged_96, tmp_path, **({"before_pass": before_pass} if before_pass else {}))
    if fail:
        plan.cudart.fail[fail] = cudaError_t.cudaErrorInvalidValue
    answer = plan.engine.generate(prompt_ids=[3], max_new_tokens=STOP, **ASK)
    assert answer.token_ids == rigged_heads.answer([3], STOP)
    assert plan.cudart.launches == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert named in record.getMessage() and "not captured" in record.getMessage()


# Passes behind the end


def test_passes_behind_the_finished_flag_publish_nothing_and_change_nothing(
    plan: FakePlan, rigged_96: Exported, rigged_heads: Rigged
) -> None:
    engine = plan.engine
    expected = rigged_heads.answer([3], STOP)
    tree = TreePlan(TREE, engine.limits).full
    for options in ({"max_new_tokens": 11, "stop_ids": frozenset()}, {"max_new_tokens": 50, "stop_ids": {expected[7]}}):
        state = engine.backend.new_state()
        decoding = Decoding(state, engine.limits, [3], plan=TreePlan(TREE, engine.limits), **options)  # type: ignore[arg-type]
        tokens = [token for round_ in decoding for token in round_.token_ids]
        assert tokens == expected[: len(tokens)] and len(tokens) in (11, 8)
        before = state.read() if decoding.finish_reason == "stop" else state._last  # type: ignore[attr-defined]
        for _ in range(5):
            state.round(tree, tree)
            after = state.read()
            assert after.tokens.size == 0 and after.finished
            assert after.token_budget == before.token_budget
            check_plan_cache(state, [3, *tokens], prefill_cache(rigged_96.model, [3, *tokens]))  # type: ignore[arg-type]


# Policies


@pytest.mark.parametrize("acceptance", ["sample", "typical"])
def test_a_plan_of_another_policy_draws_what_the_bundle_draws_and_is_greedy_too(
    own_heads: Exported, tmp_path: Path, acceptance: str
) -> None:
    path = make_plan(own_heads.bundle, tmp_path / "a.plan", acceptance=acceptance)
    plan = open_plan(own_heads.bundle, path, acceptance=acceptance)
    own: dict[str, Any] = {"posterior_threshold": 0.002, "typical_root": "drawn"} if acceptance == "typical" else {}
    policies = [
        AcceptancePolicy(acceptance, temperature=0.8, seed=5, **own),
        AcceptancePolicy(acceptance, temperature=1.3, top_k=4, top_p=0.9, min_p=0.02, seed=6),
        AcceptancePolicy(acceptance, temperature=0),
        AcceptancePolicy(),
    ]
    prompt = [5, 1, 4, 9] * 5
    for policy in policies:
        ask: dict[str, Any] = {"prompt_ids": prompt, "max_new_tokens": 20, "tree": TREE, "acceptance": policy}
        assert plan.engine.generate(**ask).token_ids == own_heads.engine.generate(**ask).token_ids, policy
    if acceptance == "sample":
        plain: dict[str, Any] = {"prompt_ids": prompt, "max_new_tokens": 20, "speculation": False}
        ask = plain | {"acceptance": policies[0]}
        assert plan.engine.generate(**ask).token_ids == own_heads.engine.generate(**ask).token_ids
    (other,) = {"sample", "typical"} - {acceptance}
    for refused, mend in (
        (AcceptancePolicy(other), f"medusa-build --acceptance {other}"),
        (AcceptancePolicy("rejection"), "no plan has it"),
        (AcceptancePolicy(repetition_penalty=1.5), "no plan has it"),
    ):
        with pytest.raises(UserError, match=f"the plan runs greedy and {acceptance}") as caught:
            plan.engine.generate(prompt_ids=[1], acceptance=refused)
        assert mend in caught.value.hint


# What the model or the device gets wrong


def test_logits_that_are_nan_end_an_answer_in_an_error_and_leave_nothing_behind(
    own_heads: Exported, tmp_path: Path
) -> None:
    from nan_weights import EMBEDDING, with_nan_row

    prompt = [7, 3, 1]
    right = own_heads.engine.generate(prompt_ids=prompt, max_new_tokens=40, tree=TREE).token_ids
    seen = {*prompt, *right}
    drafted = own_heads.engine.session()
    with drafted as session:
        for _ in session.stream(prompt_ids=prompt, max_new_tokens=40, tree=TREE):
            seen.update(session._state.proposed().tolist())
    unseen = min(set(range(own_heads.engine.limits.vocab_size)) - seen)
    bundle = with_nan_row(own_heads.bundle, tmp_path / "bundle", EMBEDDING, unseen)
    engine = open_plan(bundle, make_plan(bundle, tmp_path / "a.plan")).engine

    def check_finite(state: Any) -> None:
        # The graph here reads the live rows alone; that of a plan reads them all, and a masked NaN is one.
        assert np.isfinite(device_array(state, "key.0")).all() and np.isfinite(device_array(state, "value.1")).all()

    with engine.session() as session:
        for bad in ([unseen], [*prompt, unseen, 5], [*prompt, unseen]):
            with pytest.raises(UserError, match=r"a\.plan: the model's logits behind the last token are NaN"):
                session.generate(prompt_ids=bad, max_new_tokens=6, tree=TREE)
            assert session.token_ids == []
            assert session.generate(prompt_ids=prompt, max_new_tokens=40, tree=TREE).token_ids == right
            check_finite(session._state)
        # A deadline ends an answer whose prompt was run; its rows stay out of what comes next.
        ended = session.generate(prompt_ids=[*prompt, unseen, *prompt * 20], deadline=1e-9)
        assert ended.token_ids == [] and unseen in session.token_ids
        assert session.generate(prompt_ids=prompt, max_new_tokens=4, tree=TREE).token_ids == right[:4]
        check_finite(session._state)
    assert engine.generate(prompt_ids=prompt, max_new_tokens=40, tree=TREE).token_ids == right


def test_a_device_that_fails_in_the_loop_ends_the_answer_with_what_failed(plan: FakePlan, rigged_heads: Rigged) -> None:
    with plan.engine.session() as session:
        stream = session.stream(prompt_ids=[3], max_new_tokens=STOP, **ASK)
        next(stream)
        plan.cudart.fail["cudaEventSynchronize"] = cudaError_t.cudaErrorIllegalAddress
        with pytest.raises(UserError, match="cudaEventSynchronize failed: cudaErrorIllegalAddress"):
            next(stream)
        assert session.token_ids == []
        plan.cudart.fail.clear()
        assert session.generate(prompt_ids=[3], max_new_tokens=9, **ASK).token_ids == rigged_heads.answer([3], 9)


# Memory


def test_closed_sessions_leave_one_set_of_memory_and_a_closed_engine_none(plan: FakePlan) -> None:
    held = set()
    for _ in range(4):
        with plan.engine.session() as session:
            session.generate(prompt_ids=[3], max_new_tokens=9, **ASK)
            with session.fork() as fork:
                fork.generate(prompt_ids=[*fork.token_ids, 4], max_new_tokens=9, **ASK)
        held.add(plan.cudart.allocated)
    assert len(held) == 1
    cudart = plan.cudart
    plan.contexts.clear()
    del plan.engine, session, fork
    gc.collect()
    assert cudart.allocated == 0


def test_a_tree_of_one_row_runs_as_a_plain_step(plan: FakePlan) -> None:
    limits = plan.engine.limits
    root, tree = (
        compile_tree(tree, topk=limits.topk, depth=limits.depth) for tree in (parse_tree([], "root alone"), TREE)
    )
    state = plan.engine.backend.new_state()
    state.prefill(np.array([3]), 0, root)
    state.read()
    state.round(root, tree)
    assert {context.profile for context in plan.contexts} == {1}
    assert state.rows_ready == TREE.nodes
    state.round(tree, root)
    assert {context.profile for context in plan.contexts} == {0, 1}
    assert state.rows_ready == 1
