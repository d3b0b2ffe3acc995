"""Where an answer ends inside a pass: the graphs publish what the numpy reference leaves of what they accept."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from graph_probe import Pending, RoundProbe, chunk_buffers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import RANDOM_VOCAB, Exported
from tree_strategies import trees

from medusa_engine.runtime.accept import accept_greedy
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs
from medusa_engine.runtime.stopping import Cut, cut
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree

PROMPT = 5
CERTAIN = 30.0  # logit of the predicted token, of the others 0: every policy takes it
POLICIES = ["greedy", "sample", "typical"]

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


class Limits(NamedTuple):
    """What a pass is given of stopping."""

    stop_ids: list[int]
    token_budget: int
    finished: bool

    def inputs(self) -> Arrays:
        return {
            "stop_ids": np.array(self.stop_ids, dtype=np.int64),
            "token_budget": np.array([self.token_budget]),
            "finished": np.array([self.finished]),
        }


class Prober:
    """The graphs of a policy over logits that the test gives, behind a prompt of five tokens."""

    def __init__(self, exported: Exported, policy: str, kind: str = "round", **parameters: Any) -> None:
        self.probe = RoundProbe(exported.bundle, given_logits=True, policy=policy, kind=kind)
        self.limits = self.probe.limits
        self._constant = constant_inputs(AcceptancePolicy(policy, **parameters), self.limits.vocab_size)
        self.run_pass(
            np.arange(PROMPT),
            np.zeros((PROMPT, RANDOM_VOCAB)),
            Pending(0, []),
            chunk_buffers(PROMPT, self.limits.depth),
        )

    def __call__(self, tokens: Ints, logits: npt.NDArray[Any], tree: TreeBuffers, **replaced: Any) -> Arrays:
        return self.run_pass(tokens, logits, Pending(PROMPT - 1, [0]), tree, keep_cache=False, **replaced)

    def run_pass(
        self, tokens: Ints, logits: npt.NDArray[Any], pending: Pending, tree: TreeBuffers, **options: Any
    ) -> Arrays:
        uniforms = np.full(len(tokens), 0.5, dtype=np.float32)
        logits = logits.astype(np.float32)
        return self.probe.run(tokens, pending, tree, logits=logits, uniforms=uniforms, **self._constant, **options)


@pytest.fixture(scope="module", params=POLICIES)
def round_prober(request: pytest.FixtureRequest, own_heads: Exported) -> Prober:
    return Prober(own_heads, request.param)


@pytest.fixture(scope="module", params=["greedy", "sample"])
def step_prober(request: pytest.FixtureRequest, own_heads: Exported) -> Prober:
    return Prober(own_heads, request.param, "step")


def certain(predicted: Ints) -> npt.NDArray[np.float32]:
    """Logits [N, V] that predict a token behind each row."""
    return np.float32(CERTAIN) * np.eye(RANDOM_VOCAB, dtype=np.float32)[predicted]


limits_of = st.builds(Limits, st.lists(st.integers(-1, 3), max_size=4), st.integers(0, 6), st.booleans())


def check_pass(values: Arrays, path: list[int], tokens: Ints, predicted: Ints, expected: Cut) -> None:
    """Check a pass that accepted a path of rows against what is left of it."""
    count = expected.published
    assert values["accepted_count"].tolist() == values["next_pending_count"].tolist() == [count]
    assert values["accepted_tokens"][:count].tolist() == tokens[path[:count]].tolist()
    assert (values["accepted_tokens"][count:] == -1).all()
    assert values["next_token_budget"].tolist() == [expected.token_budget]
    assert values["next_finished"].tolist() == [expected.finished]
    assert values["next_past_length"].tolist() == [PROMPT]
    assert values["next_pending_rows"][:count].tolist() == path[:count]
    # The next pass begins behind what is published, with the target's own token.
    assert values["next_position_ids"][0, 0] == PROMPT + count
    assert values["next_input_ids"][0, 0] == predicted[path[max(count - 1, 0)]]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_round_publishes_what_the_limits_leave_of_what_it_accepts(round_prober: Prober, data: Any) -> None:
    depth, topk = round_prober.limits.depth, round_prober.limits.topk
    tree = data.draw(trees(depth=depth, topk=topk, max_nodes=16))
    few = st.lists(st.integers(0, 2), min_size=tree.nodes, max_size=tree.nodes)
    tokens, predicted, limits = np.array(data.draw(few)), np.array(data.draw(few)), data.draw(limits_of)
    buffers = compile_tree(tree, topk=topk, depth=depth)
    accepted = accept_greedy(tokens, predicted, buffers.retrieve_indices)
    values = round_prober(tokens, certain(predicted), buffers, **limits.inputs())
    expected = cut(accepted.published_tokens.tolist(), **limits._asdict())
    path = accepted.path_rows[: accepted.published_count].tolist()
    check_pass(values, path, tokens, predicted, expected)


CHAIN = parse_tree([[0], [1], [0, 0], [0, 0, 0]], "a chain and a leaf")
CHAIN_TOKENS = np.array([11, 12, 50, 13, 14])  # rows 0, 1, 3, 4 are the chain
CHAIN_PREDICTED = np.array([12, 13, 51, 14, 15])
CHAIN_PATH = [0, 1, 3, 4]
WORKED: dict[str, tuple[Limits, Cut]] = {
    "nothing ends it": (Limits([], 9, False), Cut(4, 5, False)),
    "padding is no stop token": (Limits([-1, -1], 9, False), Cut(4, 5, False)),
    "the root stops": (Limits([-1, 11], 9, False), Cut(1, 8, True)),
    "the second of several": (Limits([60, 14, 12], 9, False), Cut(2, 7, True)),
    "the last stops": (Limits([14], 9, False), Cut(4, 5, True)),
    "a token of another branch does not": (Limits([50], 9, False), Cut(4, 5, False)),
    "nor does one that is only predicted": (Limits([15], 9, False), Cut(4, 5, False)),
    "the budget is inside": (Limits([], 3, False), Cut(3, 0, True)),
    "the budget is used up exactly": (Limits([], 4, False), Cut(4, 0, True)),
    "a stop token at the budget": (Limits([13], 3, False), Cut(3, 0, True)),
    "a budget of none": (Limits([], 0, False), Cut(0, 0, True)),
    "finished before": (Limits([], 9, True), Cut(0, 9, True)),
}


@pytest.mark.parametrize("name", WORKED)
def test_a_round_ends_as_worked_by_hand(round_prober: Prober, name: str) -> None:
    limits, expected = WORKED[name]
    tree = compile_tree(CHAIN, topk=round_prober.limits.topk, depth=round_prober.limits.depth)
    values = round_prober(CHAIN_TOKENS, certain(CHAIN_PREDICTED), tree, **limits.inputs())
    check_pass(values, CHAIN_PATH, CHAIN_TOKENS, CHAIN_PREDICTED, expected)


@settings(deadline=None, max_examples=30)
@given(token=st.integers(0, 3), limits=limits_of)
def test_a_step_publishes_what_the_limits_leave_of_its_token(step_prober: Prober, token: int, limits: Limits) -> None:
    tree = compile_tree(parse_tree([], "root"), topk=1, depth=step_prober.limits.depth)
    tokens, predicted = np.array([token]), np.array([44])
    values = step_prober(tokens, certain(predicted), tree, **limits.inputs())
    check_pass(values, [0], tokens, predicted, cut([token], **limits._asdict()))


# Logits that decide nothing

SPOILED: dict[str, Any] = {
    "one is NaN": lambda row: row.__setitem__(40, np.nan),
    "the predicted one is NaN": lambda row: row.__setitem__(row.argmax(), np.nan),
    "all are NaN": lambda row: row.fill(np.nan),
    "one is infinite": lambda row: row.__setitem__(40, np.inf),
    "none is above minus infinity": lambda row: row.fill(-np.inf),
}


def spoiled(rows: list[int], how: str) -> npt.NDArray[np.float32]:
    logits = certain(CHAIN_PREDICTED)
    for row in rows:
        SPOILED[how](logits[row])
    return logits


@pytest.mark.parametrize("how", SPOILED)
def test_a_round_ends_before_the_token_that_its_logits_do_not_decide(round_prober: Prober, how: str) -> None:
    tree = compile_tree(CHAIN, topk=round_prober.limits.topk, depth=round_prober.limits.depth)
    for place, row in enumerate(CHAIN_PATH):
        values = round_prober(CHAIN_TOKENS, spoiled([row], how), tree)
        assert values["accepted_tokens"][: place + 1].tolist() == CHAIN_TOKENS[CHAIN_PATH[: place + 1]].tolist()
        assert values["accepted_count"].tolist() == [place + 1]
        assert values["next_input_ids"][0, 0] == -1
        assert values["next_finished"].tolist() == [True]


@pytest.mark.parametrize("how", SPOILED)
def test_rows_that_decide_no_published_token_do_not_matter(round_prober: Prober, how: str) -> None:
    tree = compile_tree(CHAIN, topk=round_prober.limits.topk, depth=round_prober.limits.depth)
    values = round_prober(CHAIN_TOKENS, spoiled([2], how), tree)  # the leaf of the other branch
    check_pass(values, CHAIN_PATH, CHAIN_TOKENS, CHAIN_PREDICTED, Cut(4, 996, False))
    values = round_prober(CHAIN_TOKENS, spoiled([3, 4], how), tree, stop_ids=np.array([12]))
    check_pass(values, CHAIN_PATH, CHAIN_TOKENS, CHAIN_PREDICTED, Cut(2, 998, True))


def test_tokens_that_are_masked_out_are_no_fault(round_prober: Prober) -> None:
    tree = compile_tree(CHAIN, topk=round_prober.limits.topk, depth=round_prober.limits.depth)
    logits = np.where(certain(CHAIN_PREDICTED) > 0, np.float32(CERTAIN), np.float32(-np.inf))
    check_pass(round_prober(CHAIN_TOKENS, logits, tree), CHAIN_PATH, CHAIN_TOKENS, CHAIN_PREDICTED, Cut(4, 996, False))


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("parameters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str)
def test_no_draw_hides_it(own_heads: Exported, parameters: dict[str, Any], how: str) -> None:
    typical = {"typical_root": "drawn", "posterior_threshold": 0.0}
    for policy, more in (("sample", {}), ("typical", typical)):
        prober = Prober(own_heads, policy, **parameters, **more)
        tree = compile_tree(CHAIN, topk=prober.limits.topk, depth=prober.limits.depth)
        values = prober(CHAIN_TOKENS, spoiled([3], how), tree)
        assert values["accepted_count"].tolist() == [3]
        assert (values["next_input_ids"][0, 0], values["next_finished"][0]) == (-1, True)


@pytest.mark.parametrize("how", SPOILED)
def test_a_step_says_that_its_logits_decide_no_token(step_prober: Prober, how: str) -> None:
    tree = compile_tree(parse_tree([], "root"), topk=1, depth=step_prober.limits.depth)
    values = step_prober(np.array([11]), spoiled([0], how)[:1], tree)
    assert (values["accepted_count"][0], values["accepted_tokens"][0]) == (1, 11)
    assert (values["next_input_ids"][0, 0], values["next_finished"][0]) == (-1, True)
