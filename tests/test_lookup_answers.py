"""Trees with lookup nodes: what a round looks up is what the context says, and answers stay those of plain decoding."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cache_invariants import check_cache, prefill_cache
from chi_square import check_counts
from drafts import ObservedState
from greedy_check import check_greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_answers import sampled_ids
from tiny_models import RIGGED_HEADS, RIGGED_VOCAB, Exported, Rigged, greedy_ids
from tree_strategies import trees

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import GenerationStream
from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import PLAIN, Decoding, TreePlan
from medusa_engine.runtime.tree import LOOKUP, Tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers

CHAIN = parse_tree([["L"] * length for length in (1, 2, 3)], "lookup alone")
BOTH = parse_tree([[0], [1], [0, 0], ["L"], ["L", "L"], ["L", "L", "L"]], "heads and lookup")
REPETITIVE = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


class Proposal(NamedTuple):
    """What a round verified: tokens by path, and the position of its root."""

    root_position: int
    root: int
    lookup: list[int]


class Observer:
    """Notes the lookup tokens of every round, of all sessions, that a test runs."""

    def __init__(self) -> None:
        self.proposals: list[Proposal] = []

    def __call__(self, state: OnnxRuntimeState, tree: TreeBuffers) -> None:
        limits = state._backend.limits
        tokens = state.proposed()[: len(tree.tree_indices)]
        looked_up = tree.tree_indices > limits.heads * limits.topk
        # Siblings among them there are none: they stand in the order of their depth.
        self.proposals.append(Proposal(int(state.slot.position_ids[0, 0]), int(tokens[0]), tokens[looked_up].tolist()))

    def check(self, tokens: list[int]) -> None:
        """Compare with what the reference looks up in the tokens of prompt and answer; forget them."""
        assert self.proposals
        for position, root, lookup in self.proposals:
            assert lookup == lookup_tokens([*tokens[:position], root], len(lookup)).tolist()
        self.proposals = []


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    watched = Observer()
    run = OnnxRuntimeState.round

    def round_(state: OnnxRuntimeState, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        watched(state, tree)
        run(state, tree, next_tree)

    monkeypatch.setattr(OnnxRuntimeState, "round", round_)
    return watched


def plain(engine: Engine, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    return engine.generate(prompt_ids=prompt, max_new_tokens=tokens, speculation=False, **options).token_ids


@st.composite
def repetitive(draw: st.DrawFn, vocab_size: int) -> list[int]:
    """A prompt in which things recur."""
    parts = draw(st.lists(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=5), min_size=1, max_size=3))
    return [
        token
        for index in draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        for token in parts[index % len(parts)]
    ]


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_answers_are_those_of_transformers_and_lookups_those_of_the_reference(
    request: pytest.FixtureRequest, bundle: str, observer: Observer, data: Any
) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    limits = exported.engine.limits
    tree = data.draw(trees(depth=limits.heads, topk=limits.topk, max_nodes=limits.max_tree_nodes, lookup=limits.lookup))
    prompt = data.draw(repetitive(limits.vocab_size))
    state = exported.engine.backend.new_state()
    decoding = Decoding(state, limits, prompt, plan=TreePlan(tree, limits), max_new_tokens=30, stop_ids=frozenset())
    answer = [token for round_ in decoding for token in round_.token_ids]
    check_greedy(answer, greedy_ids(exported.model, prompt, 30), prompt, exported.model)
    check_cache(state, len(prompt) + 30, prefill_cache(exported.model, [*prompt, *answer]))
    observer.check([*prompt, *answer])


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
def test_what_recurs_is_found(request: pytest.FixtureRequest, bundle: str) -> None:
    engine = request.getfixturevalue(bundle).engine
    published: list[int] = []
    for token in range(0, engine.limits.vocab_size, 8):
        answer = engine.generate(prompt_ids=[token], max_new_tokens=60, tree=CHAIN)
        assert answer.token_ids == plain(engine, [token], 60)
        published += answer.published_per_round
    assert {1, 2, 3, 4} <= set(published)  # greedy answers of small models run in circles


def test_in_a_text_that_goes_round_every_round_publishes_the_whole_chain(
    rigged_64: Exported, rigged_heads: Rigged
) -> None:
    # The second time round its cycle every token is looked up right, wherever the heads are.
    engine = rigged_64.engine
    circle = rigged_heads.answer([0], RIGGED_VOCAB)
    prompt = [0, *circle[:-1], *circle[-1:], *circle[:2]]
    count = 64 - len(prompt)
    answer = engine.generate(
        prompt_ids=prompt, max_new_tokens=count, tree=parse_tree([["L"] * n for n in range(1, 5)], "L4")
    )
    assert answer.token_ids == rigged_heads.answer(prompt, count)
    assert answer.published_per_round == [5, 5, count - 10]
    assert engine.limits.lookup == RIGGED_HEADS


def test_turns_forks_and_ends_of_any_kind_leave_the_lookups_right(own_heads: Exported, observer: Observer) -> None:
    engine = own_heads.engine
    generator = np.random.default_rng(3)
    with engine.session() as session:
        prompt = REPETITIVE
        for turn in range(10):
            budget = int(generator.integers(1, 14))
            options: dict[str, Any] = [{"tree": BOTH}, {"tree": CHAIN}, {"speculation": False}][turn % 3]
            stream = session.stream(prompt_ids=prompt, max_new_tokens=budget, **options)
            if turn % 4 == 2:  # left in the middle
                next(stream, None)
                stream.close()
            tokens = [*prompt, *stream.generation.token_ids]
            assert stream.generation.token_ids == plain(engine, prompt, budget)[: len(tokens) - len(prompt)]
            if "tree" in options:
                observer.check(tokens)
            with session.fork() as fork:
                other = [*tokens[: len(tokens) - int(generator.integers(0, 3))], 5, 6, 7]
                answer = fork.generate(prompt_ids=other, max_new_tokens=12, tree=BOTH).token_ids
                assert answer == plain(engine, other, 12)
                observer.check([*other, *answer])
            kept = int(generator.integers(len(REPETITIVE), len(tokens) + 1))
            prompt = [*tokens[:kept], *generator.integers(0, 12, 2).tolist()]


def test_sessions_in_turn_look_up_their_own_tokens(own_heads: Exported) -> None:
    engine = own_heads.engine
    prompts = [REPETITIVE, [9, 3, 9, 3, 9], [2], [40, 41, 42, 40, 41]]
    streams = [
        engine.stream(prompt_ids=prompt, max_new_tokens=24, tree=(BOTH, CHAIN)[number % 2])
        for number, prompt in enumerate(prompts)
    ]
    answers: list[list[int]] = [[] for _ in prompts]
    while sum([_next_into(*each) for each in zip(streams, answers, strict=True)]):
        pass
    assert answers == [plain(engine, prompt, 24) for prompt in prompts]


def _next_into(stream: GenerationStream, answer: list[int]) -> bool:
    piece = next(stream, None)
    answer += piece.token_ids if piece else []
    return piece is not None


@pytest.mark.parametrize("trees", [[PLAIN, BOTH], [CHAIN, PLAIN, PLAIN, BOTH, CHAIN]], ids=["two", "five"])
def test_lookups_are_right_whatever_tree_came_before(
    own_heads: Exported, observer: Observer, trees: list[Tree]
) -> None:
    engine = own_heads.engine
    plans = [TreePlan(tree, engine.limits) for tree in trees]
    turns = cycle(plans)

    class Turns(TreePlan):
        def choose(self) -> TreePlan:
            return next(turns)

    for prompt in (REPETITIVE, [7, 7], [5, 1, 4, 9]):
        state = engine.backend.new_state()
        decoding = Decoding(
            state, engine.limits, prompt, plan=Turns(BOTH, engine.limits), max_new_tokens=30, stop_ids=frozenset()
        )
        answer = [token for round_ in decoding for token in round_.token_ids]
        assert answer == plain(engine, prompt, 30)
        observer.check([*prompt, *answer])


def test_texts_that_end_an_answer_end_it_where_they_do_without_lookup(chat_bundle: Path) -> None:
    engine = Engine.open(chat_bundle, threads=1)
    whole = engine.generate("abc abc abc", max_new_tokens=40, ignore_eos=True, speculation=False)
    tree = parse_tree([[0], ["L"], ["L", "L"]], "both")
    for start in range(0, len(whole.text or "") - 3, 4):
        stop = (whole.text or "")[start : start + 3]
        options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "stop": stop}
        answer = engine.generate("abc abc abc", **options, tree=tree)
        expected = engine.generate("abc abc abc", **options, speculation=False)
        assert (answer.text, answer.token_ids, answer.finish_reason) == (expected.text, expected.token_ids, "stop")


@pytest.mark.parametrize("budget", range(1, 8))
def test_budgets_fall_inside_a_copied_chain(rigged_64: Exported, rigged_heads: Rigged, budget: int) -> None:
    circle = rigged_heads.answer([0], RIGGED_VOCAB)
    prompt = [0, *circle, *circle[:2]]
    answer = rigged_64.engine.generate(prompt_ids=prompt, max_new_tokens=budget, tree=CHAIN)
    assert answer.token_ids == rigged_heads.answer(prompt, budget)
    assert answer.published_per_round == [4] * (budget // 4) + [budget % 4] * (budget % 4 > 0)
    assert answer.finish_reason == "length"


def test_stop_tokens_and_the_end_of_the_cache_are_where_plain_decoding_has_them(rigged_32: Exported) -> None:
    engine = rigged_32.engine
    prompt = [3, 1, 4, 3, 1, 4, 3, 1]
    for start in range(12):
        for ignore_eos in (False, True):
            options: dict[str, Any] = {"prompt_ids": [*prompt, start], "max_new_tokens": 60, "ignore_eos": ignore_eos}
            answer = engine.generate(**options, tree=BOTH)
            expected = engine.generate(**options, speculation=False)
            assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason)


def test_lookups_in_prompts_of_several_chunks(own_heads: Exported, observer: Observer) -> None:
    prompt = np.random.default_rng(0).integers(0, 20, 530).tolist()
    answer = own_heads.engine.generate(prompt_ids=prompt, max_new_tokens=20, tree=BOTH).token_ids
    assert answer == plain(own_heads.engine, prompt, 20)
    observer.check([*prompt, *answer])


# Sampling


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
@pytest.mark.parametrize(
    "policy",
    [AcceptancePolicy("sample", temperature=0.5, seed=3), AcceptancePolicy("sample", top_k=2, seed=4)],
    ids=str,
)
def test_sampled_answers_are_those_of_the_same_seed_without_lookup(
    request: pytest.FixtureRequest, bundle: str, policy: AcceptancePolicy, observer: Observer
) -> None:
    exported = request.getfixturevalue(bundle)
    tree = BOTH if exported.engine.limits.heads else CHAIN
    answer = exported.engine.generate(prompt_ids=REPETITIVE, max_new_tokens=40, acceptance=policy, tree=tree)
    assert answer.token_ids == sampled_ids(exported, REPETITIVE, 40, policy)
    assert max(answer.published_per_round) > 1
    observer.check([*REPETITIVE, *answer.token_ids])


def test_typical_rounds_accept_of_a_lookup_what_is_likely_enough(own_heads: Exported, observer: Observer) -> None:
    engine, epsilon, alpha = own_heads.engine, 0.2, 0.9
    policy = AcceptancePolicy("typical", posterior_threshold=epsilon, posterior_alpha=alpha)
    answer = engine.generate(prompt_ids=REPETITIVE, max_new_tokens=60, acceptance=policy, tree=BOTH)
    tokens = [*REPETITIVE, *answer.token_ids]
    proposals = list(observer.proposals)
    observer.check(tokens)
    with torch.inference_mode():
        logits = own_heads.model(torch.tensor([tokens])).logits[0].double()
    probabilities = logits.softmax(-1)
    threshold = (alpha * (probabilities * logits.log_softmax(-1)).sum(-1).exp()).clamp(max=epsilon)
    position, copied, refused = len(REPETITIVE), 0, 0
    for published, (root_position, root, lookup) in zip(answer.published_per_round, proposals, strict=True):
        assert (root_position, root) == (position, tokens[position]) == (position, int(logits[position - 1].argmax()))
        drafts = tokens[position + 1 : position + published]
        for at, draft in enumerate(drafts, position):
            assert probabilities[at, draft] > threshold[at]
        copied += bool(drafts) and drafts == lookup[: len(drafts)]
        if published == 1 and position + 1 < len(tokens):
            assert probabilities[position, lookup[0]] <= threshold[position]
            refused += 1
        position += published
    assert copied and refused


def test_heads_and_lookup_that_propose_the_same_tokens_count_once(own_heads: Exported) -> None:
    # Both branches say what is right, down to a depth of their own.
    engine, generator = own_heads.engine, np.random.default_rng(0)
    tree = parse_tree([[0], [0, 0], [0, 0, 0], ["L"], ["L", "L"], ["L", "L", "L"]], "twice")
    for policy in (AcceptancePolicy(), AcceptancePolicy("sample", seed=8)):
        answer = (
            sampled_ids(own_heads, [7, 3, 1], 40, policy) if policy.name == "sample" else plain(engine, [7, 3, 1], 40)
        )
        planned: list[int] = []

        def plant(state: OnnxRuntimeState, buffers: TreeBuffers) -> None:
            begin = int(state.slot.position_ids[0, 0]) - 3
            right = [*answer[begin:], *[0] * 4]  # noqa: B023
            depths = generator.integers(0, 4, 2)
            for path, depth in zip(buffers.retrieve_indices, depths, strict=False):
                for edges, row in enumerate(path.tolist()):
                    if edges and row >= 0:
                        token = right[edges] if edges <= depth else (right[edges] + 1) % engine.limits.vocab_size
                        state.slot.input_ids[0, row] = token
            planned.append(1 + int(depths.max()))  # noqa: B023

        state = engine.backend.new_state()
        state.use(policy)
        decoding = Decoding(
            ObservedState(state, plant),  # type: ignore[arg-type]
            engine.limits,
            [7, 3, 1],
            plan=TreePlan(tree, engine.limits),
            max_new_tokens=36,
            stop_ids=frozenset(),
        )
        assert [token for round_ in decoding for token in round_.token_ids] == answer[:36]
        assert [len(round_.token_ids) for round_ in decoding.rounds][:-1] == planned[:-1]


def test_sampled_pairs_behind_a_lookup_have_the_models_probabilities(no_heads: Exported) -> None:
    engine, ranks = no_heads.engine, 3

    def best(tokens: list[int]) -> tuple[list[int], torch.Tensor]:
        with torch.inference_mode():
            logits = no_heads.model(torch.tensor([tokens])).logits[0, -1]
        values, ids = logits.topk(ranks)
        return ids.tolist(), values.double().softmax(0)

    # The prompt has the first token of every pair before, so that the second is looked up.
    firsts, first = best([*REPETITIVE, 8])
    prompt = REPETITIVE
    for token in firsts:
        seconds, _ = best([*REPETITIVE, token])
        prompt = [*prompt, 8, token, seconds[0]]
    prompt = [*prompt, *REPETITIVE[-3:], 8]
    firsts, first = best(prompt)
    cells, probabilities = {}, []
    for token, share in zip(firsts, first, strict=True):
        seconds, second = best([*prompt, token])
        for other, rest in zip(seconds, second, strict=True):
            cells[token, other] = len(cells)
            probabilities.append(float(share * rest))
    counts, rounds = np.zeros(len(cells)), 0
    with engine.session() as session:
        for seed in range(500):
            policy = AcceptancePolicy("sample", top_k=ranks, seed=seed)
            answer = session.generate(prompt_ids=prompt, max_new_tokens=2, acceptance=policy, tree=CHAIN)
            counts[cells[tuple(answer.token_ids)]] += 1  # type: ignore[index]
            rounds += answer.rounds
    check_counts(counts, np.array(probabilities))
    assert rounds < 1000, "no lookup was ever right"


# What is refused


def test_trees_beyond_what_the_engine_looks_up_are_refused(own_heads: Exported, no_heads: Exported) -> None:
    deep = Tree(tuple((LOOKUP,) * length for length in range(1, 6)), "deep")
    with pytest.raises(UserError, match="has 5 lookup nodes, but the engine offers 3") as error:
        own_heads.engine.generate(prompt_ids=[1], tree=deep)
    assert "--lookup-depth 5" in error.value.hint
    with pytest.raises(UserError, match="the engine has 0 heads"):
        no_heads.engine.generate(prompt_ids=[1], tree=parse_tree([[0]], "head"))
    assert (no_heads.engine.limits.heads, no_heads.engine.limits.lookup, no_heads.engine.tree.lookup) == (0, 4, 3)


def test_rejection_takes_no_lookup(every_graph: Exported) -> None:
    with pytest.raises(UserError, match="lookup nodes, but rejection accepts a chain"):
        every_graph.engine.generate(prompt_ids=[1], tree=CHAIN, acceptance=AcceptancePolicy("rejection"))


def test_lookup_with_the_repetition_penalty(every_graph: Exported, observer: Observer) -> None:
    options: dict[str, Any] = {"prompt_ids": REPETITIVE, "max_new_tokens": 30}
    policy = AcceptancePolicy(repetition_penalty=1.05)
    answer = every_graph.engine.generate(**options, acceptance=policy, tree=BOTH).token_ids
    assert answer == every_graph.engine.generate(**options, acceptance=policy, speculation=False).token_ids
    observer.check([*REPETITIVE, *answer])


def test_a_bundle_keeps_its_lookup_trees_as_files_have_them(no_heads: Exported) -> None:
    document = json.loads((no_heads.bundle / "tree.json").read_text())
    assert document["paths"] == [["L"], ["L", "L"], ["L", "L", "L"]]
