"""Trees chosen when their round is launched, of candidates that the pass before proposed for all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from drafts import ObservedState

from medusa_engine.runtime.adaptive_plans import AdaptivePlans, AdaptiveTrees
from medusa_engine.runtime.lookup import latest_match, lookup_tokens
from medusa_engine.runtime.lookup_replay import Match
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree, rows_among

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiny_models import Exported, Rigged

    from medusa_engine.runtime.engine import Engine

PAIR = parse_tree([[0]], "pair")
WIDE = parse_tree([[0], [1], [0, 0], [1, 0], [0, 1], [1, 1], [0, 0, 0]], "wide")
SECOND = parse_tree([[1], [1, 1], [1, 1, 0]], "second")  # no rank 0 of the first head
MIXED = parse_tree([[0], ["L"], ["L", "L"], ["L", "L", "L"]], "mixed")
LOOKUP = parse_tree([["L"], ["L", "L"]], "lookup")
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5]


def take(monkeypatch: pytest.MonkeyPatch, plans: AdaptivePlans, trees: Iterable[int], *, heads: bool = True) -> None:
    """Let the choice be this, whatever is measured."""
    chosen = cycle(trees)
    monkeypatch.setattr(plans._choice, "choose", lambda _match, heads: next(chosen))
    monkeypatch.setattr(plans._choice, "wants_heads", lambda _match: heads)


def decode(engine: Engine, plans: AdaptivePlans, prompt: list[int], count: int) -> Decoding:
    state = engine.backend.new_state()
    return Decoding(state, engine.limits, prompt, plan=plans, max_new_tokens=count, stop_ids=frozenset())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3, 1, 2, 0), (2, 1, 3)], ids=str)
def test_each_round_verifies_the_candidates_of_its_own_tree(
    rigged_64: Exported, rigged_heads: Rigged, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    trees = AdaptiveTrees([PAIR, WIDE, SECOND], rigged_64.engine.limits, late=True)
    plans = trees.session()
    take(monkeypatch, plans, order)
    rounds = list(decode(rigged_64.engine, plans, [3, 0], 40))
    assert [token for round_ in rounds for token in round_.token_ids] == rigged_heads.answer([3, 0], 40)
    frontier, published = 0, []
    for plan, _ in zip(cycle([trees.plans[tree] for tree in order]), rounds, strict=False):
        published.append(rigged_heads.published_per_round([frontier], plan.tree, 99)[0])
        frontier = rigged_heads.answer([frontier], published[-1])[-1]
    assert [len(round_.token_ids) for round_ in rounds[:-1]] == published[:-1]
    assert {3, 4} & set(published)


@pytest.mark.parametrize("heads", [True, False])
def test_rounds_of_heads_and_lookup_write_what_plain_steps_do(
    own_heads: Exported, monkeypatch: pytest.MonkeyPatch, heads: bool
) -> None:
    engine = own_heads.engine
    trees = AdaptiveTrees([MIXED, WIDE, LOOKUP], engine.limits, late=True)
    chosen = [2, 0, 3, 1, 0, 2, 1] if heads else [2, 3, 2, 2]
    for prompt in (PROMPT, [3]):
        plain = engine.generate(prompt_ids=prompt, max_new_tokens=60, speculation=False).token_ids
        plans = trees.session()
        take(monkeypatch, plans, chosen, heads=heads)
        context = list(prompt)
        longest = 1
        for number, round_ in enumerate(decode(engine, plans, prompt, 60)):
            lookup = trees.plans[chosen[number % len(chosen)]].tree.lookup
            found = lookup_tokens([*context, round_.token_ids[0]], lookup).tolist() if lookup else []
            behind = plain[len(context) - len(prompt) + 1 :]
            right = next((step for step, token in enumerate(found) if behind[step : step + 1] != [token]), lookup)
            assert len(round_.token_ids) > right  # no node of the lookup is lost
            longest = max(longest, right)
            context += round_.token_ids
        assert context[len(prompt) :] == plain
        assert longest > 1 or prompt != PROMPT


def test_a_tree_is_chosen_for_the_match_behind_its_root(own_heads: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = own_heads.engine
    plans = AdaptiveTrees([MIXED], engine.limits, late=True).session()
    seen: list[Match] = []

    def choose(match: Match, *, heads: bool) -> int:
        seen.append(match)
        return 1

    monkeypatch.setattr(plans._choice, "choose", choose)
    tokens = [round_.token_ids[0] for round_ in decode(engine, plans, PROMPT, 40)]
    contexts = [[*PROMPT, *tokens[: count + 1]] for count in range(len(tokens))]
    assert [match.key for match in seen] == [latest_match(context)[0] for context in contexts]
    assert {0, 3} <= {match.key for match in seen}
    streak = 0
    for match, context in zip(seen, contexts, strict=True):
        streak = streak + 1 if lookup_tokens(context[:-1], 1)[0] == context[-1] else 0
        assert match.streak == streak


def test_without_heads_only_lookups_are_proposed(own_heads: Exported) -> None:
    limits = own_heads.engine.limits
    trees = AdaptiveTrees([MIXED, WIDE], limits, late=True)
    lookups, everything = trees.proposals
    behind = limits.heads * limits.topk
    assert lookups.tree_indices.tolist() == [0, behind + 1, behind + 2, behind + 3]
    slots = {slot for plan in trees.plans for slot in plan.full.tree_indices.tolist()}
    assert len(everything.tree_indices) == len(slots) and set(everything.tree_indices.tolist()) == slots
    for tree in (lookups, everything):  # a candidate stands behind as many tokens wherever its node is
        depths = [0 if slot == 0 else 1 + (slot - 1) // limits.topk for slot in tree.tree_indices.tolist()]
        depths = [
            slot - behind if slot > behind else depth for slot, depth in zip(tree.tree_indices, depths, strict=True)
        ]
        assert tree.position_offsets.tolist() == depths


def test_candidates_may_be_more_than_the_nodes_of_a_tree(own_heads: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = own_heads.engine
    limits = replace(engine.limits, max_tree_nodes=8)  # 15 candidates of heads, and those of lookup

    def widest(head: int) -> Tree:
        before = [[0] * depth for depth in range(1, head + 1)]
        return parse_tree([*before, *([*[0] * head, rank] for rank in range(1, 5))], f"head {head}")

    chain = parse_tree([["L"] * depth for depth in range(1, limits.lookup + 1)], "chain")
    trees = AdaptiveTrees([widest(0), widest(1), widest(2), chain], limits, late=True)
    assert len(trees.proposals[True].tree_indices) > 2 * limits.max_tree_nodes
    plans = trees.session()
    take(monkeypatch, plans, range(5))
    monkeypatch.setattr(engine.backend, "limits", limits)  # of which a state makes its buffers
    tokens = [token for round_ in decode(engine, plans, PROMPT, 40) for token in round_.token_ids]
    assert tokens == engine.generate(prompt_ids=PROMPT, max_new_tokens=40, speculation=False).token_ids


def test_rows_among_what_was_proposed_are_found_by_candidate() -> None:
    proposed = parse_tree([[0], [2], [0, 1], ["L"]], "proposed")
    tree = parse_tree([[2], ["L"], [2, 1]], "tree")
    buffers = [compile_tree(each, topk=4, depth=3, heads=2) for each in (proposed, tree)]
    rows = rows_among(*buffers)
    assert buffers[0].tree_indices[rows].tolist() == buffers[1].tree_indices.tolist()
    with pytest.raises(KeyError):
        rows_among(buffers[1], buffers[0])


def test_at_the_end_of_the_cache_trees_shrink(
    rigged_32: Exported, rigged_heads: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, limits = rigged_32.engine, rigged_32.engine.limits
    shrunk = 0
    for prompt_tokens in range(22, 32):
        plans = AdaptiveTrees([PAIR, WIDE], limits, late=True).session()
        take(monkeypatch, plans, [1, 0, 2])
        rows: list[int] = []

        def observe(state: OnnxRuntimeState, tree: TreeBuffers, rows: list[int] = rows) -> None:
            rows.append(len(tree.tree_indices))
            assert rows[-1] == state.rows_ready
            assert state.slot.past_length[0] + state.slot.pending_count[0] + rows[-1] <= limits.max_length

        prompt = [3] * prompt_tokens
        state = ObservedState(engine.backend.new_state(), observe)
        decoding = Decoding(state, limits, prompt, plan=plans, max_new_tokens=99, stop_ids=frozenset())
        tokens = [token for round_ in decoding for token in round_.token_ids]
        assert tokens == rigged_heads.answer(prompt, limits.max_length - prompt_tokens)
        shrunk += sum(count < nodes for count, nodes in zip(rows, cycle((8, 2, 1)), strict=False))
    assert shrunk


def test_an_engine_chooses_late_on_onnx_runtime(own_heads: Exported) -> None:
    engine = own_heads.engine
    engine.generate(prompt_ids=PROMPT, max_new_tokens=4)
    assert engine._adaptive["greedy"].late


def test_kept_rows_have_tokens_and_positions_of_what_was_proposed(own_heads: Exported) -> None:
    engine = own_heads.engine
    state = engine.backend.new_state()
    everything = compile_tree(WIDE, topk=engine.limits.topk, depth=engine.limits.depth, heads=engine.limits.heads)
    state.prefill(np.array(PROMPT), 0, everything)
    before = state.slot.input_ids[0].copy(), state.slot.position_ids[0].copy()
    rows = np.array([0, 5, 2, 2])
    state.keep_proposed(rows)
    assert state.rows_ready == 4
    assert state.proposed().tolist() == before[0][rows].tolist()
    assert state.slot.position_ids[0, :4].tolist() == before[1][rows].tolist()
    assert len(set(state.slot.position_ids[0, :4].tolist())) > 1
