"""Answers written side by side with random trees, and compared token for token with plain greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from drafts import ObservedState, PlantedDrafts
from tree_invariants import prefix_closure

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan

ANSWER_TOKENS = 256
CACHE_EVERY = 50  # rounds of a batch
CACHE_TOLERANCE = 1e-3  # of the largest number in a layer: both sides are computed in fp32, in other orders


@dataclass
class Tally:
    """What a soak has seen.

    Attributes:
        near_ties: a line for each token that differs from plain decoding's where the logits are nearly equal.
        cache_difference: the largest seen, as a share of the largest number in its layer.
    """

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    caches: int = 0
    cache_difference: float = 0.0
    near_ties: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.prompts} prompts, {self.tokens} tokens in {self.rounds} rounds"
        caches = f"{self.caches} caches within {self.cache_difference:.1e}"
        return f"{counts}, {caches}, {len(self.near_ties)} near-ties"


class RandomPlans:
    """`Plans` that take another tree in every round: of one to all rows, of any shape, now and then the root alone."""

    def __init__(self, limits: Limits, generator: np.random.Generator) -> None:
        self._limits, self._generator = limits, generator
        self.used = Tree((), "random")

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Nothing depends on it."""

    def choose(self) -> TreePlan:
        limits, generator = self._limits, self._generator
        ranks = int(generator.integers(1, limits.topk + 1))
        count = int(generator.integers(0, 20))
        paths = [generator.integers(0, ranks, generator.integers(1, limits.heads + 1)).tolist() for _ in range(count)]
        chain = ["L"] * int(generator.integers(0, limits.lookup + 1))
        lookup = [chain[: 1 + depth] for depth in range(len(chain))]
        tree = parse_tree([*map(list, prefix_closure(paths)), *lookup], "random")
        return TreePlan(tree.shrunk(int(generator.integers(1, limits.max_tree_nodes + 1))), limits)

    def record(self, plan: TreePlan, token_ids: Sequence[int], seconds: float, *, whole: bool) -> None:
        """Nothing depends on it."""


class MaybePlanted:
    """Plants drafts as long as the answer is the expected one: behind a near-tie it may be another."""

    def __init__(self, prompt_tokens: int, expected: Sequence[int], vocab_size: int, seed: int) -> None:
        self._planted = PlantedDrafts(prompt_tokens, expected, vocab_size, np.random.default_rng(seed))
        self._prompt_tokens, self._expected = prompt_tokens, expected

    def __call__(self, state: OnnxRuntimeState, tree: TreeBuffers) -> None:
        at = int(state.slot.position_ids[0, 0]) - self._prompt_tokens
        if at < len(self._expected) and state.slot.input_ids[0, 0] == self._expected[at]:
            self._planted(state, tree)


@dataclass
class Answer:
    """One of the answers that are written side by side."""

    prompt: list[int]
    expected: list[int]
    state: OnnxRuntimeState
    decoding: Decoding
    rounds: Iterator[object]


def plain(engine: Engine, prompt: list[int], count: int) -> list[int]:
    answer = engine.generate(prompt_ids=prompt, max_new_tokens=count, ignore_eos=True, speculation=False)
    return answer.token_ids


def write_answers(
    engine: Engine, prompts: Sequence[list[int]], seed: int, tally: Tally, *, tokens: int = ANSWER_TOKENS
) -> list[tuple[list[int], list[int], list[int]]]:
    """Write the answers to some prompts, a round of a random one at a time.

    Half of them get drafts that are right to a random depth, half those of the heads.

    Returns:
        Prompt, answer, and plain decoding's answer of each.

    Raises:
        AssertionError: a cache is not that of a fresh prefill.
    """
    engine.backend.load(speculation=True)
    generator = np.random.default_rng(seed)
    running: list[Answer] = []
    for index, prompt in enumerate(prompts):
        expected = plain(engine, prompt, tokens)
        state = engine.backend.new_state()
        assert isinstance(state, OnnxRuntimeState)
        drafts = MaybePlanted(len(prompt), expected, engine.limits.vocab_size, seed + index)
        decoding = Decoding(
            ObservedState(state, drafts) if index % 2 else state,
            engine.limits,
            prompt,
            plan=RandomPlans(engine.limits, generator),
            max_new_tokens=tokens,
            stop_ids=frozenset(),
        )
        running.append(Answer(prompt, expected, state, decoding, iter(decoding)))
    finished = []
    rounds = 0
    while running:
        answer = running[int(generator.integers(len(running)))]
        if next(answer.rounds, None) is None:
            finished.append((answer.prompt, answer.decoding.held[len(answer.prompt) :], answer.expected))
            running.remove(answer)
            continue
        rounds += 1
        if rounds % CACHE_EVERY == 0:
            tally.cache_difference = max(tally.cache_difference, cache_difference(engine, answer))
            tally.caches += 1
    tally.prompts += len(prompts)
    tally.tokens += tokens * len(prompts)
    tally.rounds += rounds
    return finished


def cache_difference(engine: Engine, answer: Answer) -> float:
    """Compare the cache with a fresh prefill of the same tokens; the largest difference, as a share.

    Raises:
        AssertionError: it is above CACHE_TOLERANCE, or the cache has another number of rows.
    """
    from cache_invariants import cache_rows

    held = answer.decoding.held
    fresh = engine.backend.new_state()
    prefill = Decoding(fresh, engine.limits, held, plan=None, max_new_tokens=0, stop_ids=frozenset())
    prefill._runs = True  # the prompt alone
    list(prefill)
    rows = cache_rows(answer.state)
    assert len(rows) == len(held)
    worst = 0.0
    for name, buffer in answer.state.cache.items():
        found: npt.NDArray[np.float32] = buffer.numpy()[:, :, rows]
        expected = fresh.cache[name].numpy()[:, :, : len(held)]
        difference = float(np.abs(found - expected).max() / np.abs(expected).max())
        assert difference <= CACHE_TOLERANCE, f"{name} differs by {difference:.1e} of its largest number"
        worst = max(worst, difference)
    return worst
