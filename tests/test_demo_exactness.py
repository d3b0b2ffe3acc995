"""The demo model's greedy answers equal transformers' for every shipped tree size, on prompts of many kinds."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cache_invariants import check_cache, prefill_cache
from demo_model import ANSWER_TOKENS, GGUF, GREEDY_FILE, ROOT, Prompt, prompts
from double_precision import double_precision
from drafts import ObservedState, PlantedDrafts
from greedy_check import check_greedy
from tiny_models import greedy_ids

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, load_tree
from medusa_engine.runtime.tree_plan import TreePlan

pytestmark = pytest.mark.demo

GREEDY: dict[str, Any] = json.loads(GREEDY_FILE.read_text(encoding="utf-8"))
PROMPTS = {prompt.name: prompt for prompt in prompts()}
TREES = (1, 4, 8, 16, 64)  # nodes; 64.json is deeper than the demo's heads
LIVE_PROMPT = "chat code"


class Answer(NamedTuple):
    """An answer of the engine: whose drafts its rounds verify."""

    prompt: str
    tree: int
    planted: bool

    def __str__(self) -> str:
        return f"{self.prompt}, {self.tree} nodes, {'planted' if self.planted else 'own'} drafts"


def assigned_answers() -> list[Answer]:
    """Two trees for each prompt, eight prompts for each tree.

    Most of the larger trees get planted drafts: far fewer rounds, and rounds of every length whatever the heads know.
    """
    answers = []
    for index, name in enumerate(PROMPTS):
        block, place = divmod(index, len(TREES))
        first, second = TREES[place], TREES[(place + block + 1) % len(TREES)]
        answers.append(Answer(name, first, planted=first > 1 and index >= 8))
        answers.append(Answer(name, second, planted=second > 1))
    return answers


def shipped(nodes: int) -> Tree:
    return load_tree(ROOT / "trees" / ("smollm2_64.json" if nodes == 64 else f"{nodes}.json"))


def stored(name: str) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of transformers' greedy answer to it."""
    entry = GREEDY["answers"][name]
    return entry["prompt_ids"], entry["token_ids"]


# The stored answers


def test_there_are_twenty_prompts_with_full_answers_of_this_model() -> None:
    assert len(PROMPTS) >= 20
    assert list(GREEDY["answers"]) == list(PROMPTS)
    assert all(len(stored(name)[1]) == ANSWER_TOKENS for name in PROMPTS)
    assert GREEDY["model"] == {GGUF.name: file_sha256(GGUF)}


def test_the_engine_runs_the_weights_that_gave_the_stored_answers(demo_engine: Engine) -> None:
    assert demo_engine.manifest.model["weights_sha256"] == GREEDY["model"]


@pytest.mark.parametrize("name", PROMPTS)
def test_the_engine_encodes_a_prompt_as_transformers_does(demo_engine: Engine, name: str) -> None:
    prompt: Prompt = PROMPTS[name]
    assert demo_engine.encode(prompt.conversation if prompt.chat else prompt.text) == stored(name)[0]


@pytest.mark.parametrize("name", PROMPTS)
def test_each_token_of_a_stored_answer_is_the_argmax_of_transformers_behind_the_ones_before(
    demo_transformers: Any, name: str
) -> None:
    prompt, answer = stored(name)
    with torch.inference_mode():
        logits = demo_transformers(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    check_greedy(logits.argmax(dim=-1).tolist(), answer, prompt, demo_transformers)


def test_a_stored_answer_is_what_transformers_generates(demo_transformers: Any) -> None:
    prompt, answer = stored(LIVE_PROMPT)
    assert greedy_ids(demo_transformers, prompt, ANSWER_TOKENS) == answer


# The engine


def test_the_answers_below_cover_every_tree_with_at_least_eight_prompts() -> None:
    assigned = assigned_answers()
    assert all(len({answer.prompt for answer in assigned if answer.tree == tree}) >= 8 for tree in TREES)
    assert {answer.tree for answer in assigned if not answer.planted} == set(TREES)


@pytest.mark.slow
@pytest.mark.parametrize("answer", assigned_answers(), ids=str)
def test_an_answer_equals_that_of_transformers(demo_engine: Engine, demo_transformers: Any, answer: Answer) -> None:
    prompt, expected = stored(answer.prompt)
    limits = demo_engine.limits
    demo_engine.backend.load(speculation=True)
    drafts = PlantedDrafts(len(prompt), expected, limits.vocab_size, np.random.default_rng(0), prefer_long=True)
    state = demo_engine.backend.new_state()
    decoding = Decoding(
        ObservedState(state, drafts) if answer.planted else state,
        limits,
        prompt,
        plan=TreePlan(shipped(answer.tree), limits),
        max_new_tokens=ANSWER_TOKENS,
        stop_ids=frozenset(),
    )
    token_ids = [token for round_ in decoding for token in round_.token_ids]
    check_greedy(token_ids, expected, prompt, demo_transformers)
    if answer.planted:
        assert [len(round_.token_ids) for round_ in decoding.rounds] == drafts.published


def test_a_plain_answer_equals_that_of_transformers(demo_engine: Engine, demo_transformers: Any) -> None:
    prompt, expected = stored("Chinese")
    generation = demo_engine.generate(
        prompt_ids=prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True, speculation=False
    )
    check_greedy(generation.token_ids, expected, prompt, demo_transformers)


def test_an_answer_ends_at_the_stop_token_of_the_chat(demo_engine: Engine) -> None:
    stop = set(demo_engine.stop_token_ids)
    lengths = {}  # up to and with the stop token
    for name in (name for name in PROMPTS if PROMPTS[name].chat):
        answer = stored(name)[1]
        lengths[name] = next((index + 1 for index, token in enumerate(answer) if token in stop), ANSWER_TOKENS)
    name = min(lengths, key=lengths.__getitem__)
    length = lengths[name]
    assert length < ANSWER_TOKENS
    prompt, expected = stored(name)
    generation = demo_engine.generate(PROMPTS[name].conversation, max_new_tokens=ANSWER_TOKENS, tree=shipped(8))
    assert (generation.token_ids, generation.finish_reason) == (expected[:length], "stop")
    assert generation.prompt_tokens == len(prompt)


def test_the_cache_of_the_demo_model_equals_a_prefill_after_every_round(
    demo_engine: Engine, demo_transformers: Any
) -> None:
    prompt, expected = stored("story opening")
    limits = demo_engine.limits
    demo_engine.backend.load(speculation=True)
    state = demo_engine.backend.new_state()
    drafts = PlantedDrafts(len(prompt), expected, limits.vocab_size, np.random.default_rng(1))
    plan = TreePlan(shipped(16), limits)
    decoding = Decoding(
        ObservedState(state, drafts), limits, prompt, plan=plan, max_new_tokens=48, stop_ids=frozenset()
    )
    with double_precision(demo_transformers) as model:
        prefill = prefill_cache(model, [*prompt, *expected])
    tokens = len(prompt)
    for round_ in decoding:
        tokens += len(round_.token_ids)
        check_cache(state, tokens, prefill)
    assert max(drafts.published) > 1


@pytest.mark.soak
@pytest.mark.parametrize("tree", [0, *TREES])
@pytest.mark.parametrize("name", PROMPTS)
def test_every_prompt_on_every_tree_equals_transformers(
    demo_engine: Engine, demo_transformers: Any, name: str, tree: int
) -> None:
    prompt, expected = stored(name)
    generation = demo_engine.generate(
        prompt_ids=prompt,
        max_new_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        speculation=tree > 0,
        tree=shipped(tree) if tree else None,
    )
    check_greedy(generation.token_ids, expected, prompt, demo_transformers)
