"""Answers of `rejection`: round by round those of the numpy references, and of the target's distribution."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cache_invariants import check_cache, prefill_cache
from chi_square import check_counts
from command_checks import Commands
from tiny_models import Exported, export

from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.posterior import accept_rejection
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    draw,
    penalised_logits,
    processed_probabilities,
    uniforms,
)
from medusa_engine.runtime.tree import Tree, chain, parse_tree
from medusa_engine.runtime.tree_plan import TreePlan

PROMPT = [7, 3, 1]
POLICIES = [
    AcceptancePolicy("rejection", seed=5, temperature=2.0),
    AcceptancePolicy("rejection", seed=6, temperature=1.5, top_k=20, top_p=0.95, min_p=0.01),
    AcceptancePolicy("rejection", seed=7, temperature=2.0, repetition_penalty=1.4),
]

Floats = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class Reference:
    """The whole policy in numpy, over transformers' logits and the heads in torch."""

    def __init__(self, exported: Exported, policy: AcceptancePolicy) -> None:
        self._model = exported.model
        self._heads = MedusaHeads(exported.heads, exported.model.get_output_embeddings())
        self._policy = policy

    def rounds(self, prompt: list[int], count: int) -> list[list[int]]:
        """The tokens that each of `count` rounds publishes."""
        policy, heads = self._policy, len(self._heads.residual_weight)
        tokens = list(prompt)
        target, hidden = self._run(tokens, 1)
        root = draw(target[0], uniforms(policy.seed, np.array([len(tokens) - 1]))[0])
        published = []
        for _ in range(count):
            judged = len(tokens) + np.arange(heads + 1)  # positions of root and drafts
            proposal = self._processed(self._head_logits(hidden))
            drafts = draw(proposal, uniforms(policy.seed, judged[:-1], DRAFT_STREAM))
            target, rows = self._run([*tokens, int(root), *drafts.tolist()], heads + 1)
            accept = uniforms(policy.seed, judged[:-1], ACCEPT_STREAM)
            accepted = accept_rejection(root, drafts, target, proposal, accept, uniforms(policy.seed, judged))
            length = int(accepted.accepted_suffix_length)
            published.append(accepted.published_tokens[: length + 1].tolist())
            tokens += published[-1]
            root, hidden = accepted.next_root, rows[length : length + 1]
        return published

    def _run(self, tokens: list[int], last: int) -> tuple[Floats, torch.Tensor]:
        """Processed probabilities [last, V] behind the last tokens, and their hidden states [last, H]."""
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([tokens])).last_hidden_state[0, -last:]
            logits = self._model.get_output_embeddings()(hidden).numpy()
        ends = range(len(tokens) - last + 1, len(tokens) + 1)
        penalty = self._policy.repetition_penalty
        scores = [penalised_logits(row, np.array(tokens[:end]), penalty) for row, end in zip(logits, ends, strict=True)]
        return self._processed(np.stack(scores)), hidden

    def _head_logits(self, hidden: torch.Tensor) -> Floats:
        with torch.inference_mode():
            return np.asarray(self._heads(hidden[-1:]).numpy())

    def _processed(self, logits: Floats) -> Floats:
        policy = self._policy
        return processed_probabilities(
            logits, temperature=policy.temperature, top_k=policy.top_k, top_p=policy.top_p, min_p=policy.min_p
        )


def answer(exported: Exported, policy: AcceptancePolicy, count: int = 24, **options: Any) -> list[int]:
    options = {"prompt_ids": PROMPT} | options
    return exported.engine.generate(max_new_tokens=count, acceptance=policy, **options).token_ids


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_rounds_publish_what_the_references_do(every_graph: Exported, policy: AcceptancePolicy) -> None:
    limits = every_graph.engine.limits
    state = every_graph.engine.backend.new_state()
    state.use(policy)
    plan = TreePlan(chain(limits.heads), limits)
    decoding = Decoding(state, limits, PROMPT, plan=plan, max_new_tokens=40, stop_ids=frozenset())
    rounds = [round_.token_ids for round_ in decoding]
    expected = Reference(every_graph, policy).rounds(PROMPT, len(rounds))
    assert rounds[:-1] == expected[:-1]
    assert rounds[-1] == expected[-1][: len(rounds[-1])]
    assert {1, 2} <= {len(tokens) for tokens in rounds}
    tokens = [*PROMPT, *itertools.chain(*rounds)]
    check_cache(state, len(tokens), prefill_cache(every_graph.model, tokens))
    assert answer(every_graph, policy, 40) == tokens[len(PROMPT) :]


def test_three_tokens_together_follow_the_target(every_graph: Exported) -> None:
    # Rounds of the engine; tests/runtime/test_rejection.py has many more of the numpy reference.
    settings: dict[str, Any] = {"temperature": 2.0, "top_k": 12}
    classes = 4  # of tokens, so that every cell of three is counted often
    joint = {(): 1.0}
    for _ in range(3):
        with torch.inference_mode():
            logits = every_graph.model(torch.tensor([[*PROMPT, *path] for path in joint])).logits[:, -1].numpy()
        rows = zip(joint.items(), processed_probabilities(logits, **settings), strict=True)
        joint = {(*path, int(token)): p * row[token] for (path, p), row in rows for token in np.flatnonzero(row)}

    def cell(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(token % classes for token in tokens)

    expected, counts = np.zeros((classes,) * 3), np.zeros((classes,) * 3)
    for path, p in joint.items():
        expected[cell(path)] += p
    published = []
    with every_graph.engine.session() as session:
        for seed in range(1000):
            policy = AcceptancePolicy("rejection", seed=seed, **settings)
            generation = session.generate(prompt_ids=PROMPT, max_new_tokens=3, acceptance=policy)
            assert tuple(generation.token_ids) in joint
            counts[cell(generation.token_ids)] += 1
            published.append(generation.published_per_round[0])
    check_counts(counts.ravel(), expected.ravel())
    assert np.mean(np.array(published) > 1) > 0.1, "rounds whose drafts are accepted"


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-5}], ids=str)
def test_without_temperature_answers_are_greedy(every_graph: Exported, parameters: dict[str, Any]) -> None:
    greedy = answer(every_graph, AcceptancePolicy())
    assert answer(every_graph, AcceptancePolicy("rejection", **parameters)) == greedy


def test_without_drafts_answers_are_those_of_sample(every_graph: Exported) -> None:
    for policy in POLICIES:
        settings = {name: getattr(policy, name) for name in ("seed", "temperature", "top_k", "top_p", "min_p")}
        sample = AcceptancePolicy("sample", repetition_penalty=policy.repetition_penalty, **settings)
        expected = answer(every_graph, sample, speculation=False)
        assert answer(every_graph, policy, speculation=False) == expected
        assert answer(every_graph, policy, tree=Tree(())) == expected
        assert answer(every_graph, policy) != expected  # other draws decide


def test_lookup_deeper_than_the_heads_changes_nothing(every_graph: Exported, tmp_path: Any) -> None:
    sizes = ("--max-length", "600", "--top-k", "5", "--max-tree-nodes", "24", "--lookup-depth", "5")
    deeper = export(every_graph.checkpoint, tmp_path / "deeper", *sizes, "--acceptance", "rejection").engine
    assert deeper.limits.depth > deeper.limits.heads
    answers = [
        [engine.generate(prompt_ids=PROMPT, max_new_tokens=60, acceptance=policy) for policy in POLICIES[:2]]
        for engine in (every_graph.engine, deeper)
    ]
    assert [answer.token_ids for answer in answers[0]] == [answer.token_ids for answer in answers[1]]
    assert [answer.published_per_round for answer in answers[0]] == [
        answer.published_per_round for answer in answers[1]
    ]


def test_a_seed_gives_the_same_answer_in_every_session(every_graph: Exported) -> None:
    engine = every_graph.engine
    generator = np.random.default_rng(0)
    policies = [*POLICIES, AcceptancePolicy()]
    with engine.session() as session:
        for turn in range(9):
            held = session.token_ids
            kept = int(generator.integers(max(len(held) - 8, 0), len(held) + 1))
            prompt = [*held[:kept], *generator.integers(0, 40, 2).tolist()]
            policy = policies[turn % len(policies)]
            expected = answer(every_graph, policy, 10, prompt_ids=prompt)
            other = engine.stream(prompt_ids=[9], max_new_tokens=24, acceptance=POLICIES[0])
            next(other)  # another answer is under way
            with session.fork() as fork:
                forked = fork.generate(prompt_ids=prompt, max_new_tokens=10, acceptance=policy)
            same = session.generate(prompt_ids=prompt, max_new_tokens=10, acceptance=policy)
            assert forked.token_ids == same.token_ids == expected
            assert same.cached_tokens == kept
    first, second = (answer(every_graph, AcceptancePolicy("rejection", seed=seed)) for seed in (1, 2))
    assert first != second


def test_budgets_and_stop_tokens_cut_an_answer_inside_a_round(every_graph: Exported) -> None:
    policy = POLICIES[0]
    whole = answer(every_graph, policy, 30)
    for count in range(12):
        assert answer(every_graph, policy, count) == whole[:count]
    limits = every_graph.engine.limits
    for stop in dict.fromkeys(whole):
        state = every_graph.engine.backend.new_state()
        state.use(policy)
        plan = TreePlan(chain(limits.heads), limits)
        decoding = Decoding(state, limits, PROMPT, plan=plan, max_new_tokens=30, stop_ids=frozenset([stop]))
        tokens = [token for round_ in decoding for token in round_.token_ids]
        assert (tokens, decoding.finish_reason) == (whole[: whole.index(stop) + 1], "stop")


def test_at_the_end_of_the_cache_the_chain_shrinks(every_graph: Exported) -> None:
    length = every_graph.engine.limits.max_length
    for left in range(1, 6):
        prompt = np.random.default_rng(left).integers(0, 61, length - left).tolist()
        generation = every_graph.engine.generate(prompt_ids=prompt, acceptance=POLICIES[0], max_new_tokens=99)
        assert (generation.generated_tokens, generation.finish_reason) == (left, "cache_full")


# What there is to choose


def test_a_tree_that_branches_is_refused(every_graph: Exported, commands: Commands, tmp_path: Any) -> None:
    branching = parse_tree([[0], [1]], "branching")
    with pytest.raises(UserError, match="rank 1") as refused:
        answer(every_graph, POLICIES[0], tree=branching)
    assert "chain" in refused.value.problem
    assert len(answer(every_graph, POLICIES[0], tree=chain(1))) == 24
    greedy = AcceptancePolicy("rejection", temperature=0)
    assert answer(every_graph, greedy, tree=branching) == answer(every_graph, AcceptancePolicy())
    (tmp_path / "tree.json").write_text("[[0], [2]]")
    ask = ("--engine", every_graph.bundle, "--prompt-ids", "7,3,1", "--acceptance", "rejection")
    commands.run_refuses(*ask, "--tree", tmp_path / "tree.json", named=["rank 2", "chain"])
    commands.run_refuses(*ask, "--compare", named=["--compare", "rejection"])


def test_the_chain_is_as_deep_as_heads_and_nodes_allow(every_graph: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = every_graph.engine
    assert engine.plans(POLICIES[0]).used == chain(3)
    assert engine.plans(AcceptancePolicy(), adaptive=False).used == engine.tree
    monkeypatch.setattr(engine, "limits", replace(engine.limits, max_tree_nodes=3))
    assert engine.plans(POLICIES[0]).used == chain(2)


def test_a_bundle_without_it_refuses(shared_heads: Exported) -> None:
    with pytest.raises(UserError, match="without --acceptance rejection"):
        answer(shared_heads, POLICIES[0])


def test_the_command_says_what_it_drew_with(every_graph: Exported, commands: Commands) -> None:
    ask = ("--engine", every_graph.bundle, "--prompt-ids", "7,3,1", "--max-new-tokens", "24", "--json")
    chosen = ("--acceptance", "rejection", "--temperature", "2", "--seed", "5")
    report = json.loads(commands.run(*ask, *chosen))
    assert report["token_ids"] == answer(every_graph, POLICIES[0])
    assert report["acceptance"] == {
        "policy": "rejection",
        "temperature": 2.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 5,
        "preserves_distribution": True,
    }
    assert max(report["published_per_round"]) > 1
