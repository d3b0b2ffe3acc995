"""Answers to prompts in several ways, one after the other: plain steps, trees, changing trees, other runtimes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple, Protocol

import numpy as np

from medusa_engine.benchmarks.measure import PAUSE_SECONDS
from medusa_engine.benchmarks.prompt_file import BenchPrompt
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.roofline import Published
from medusa_engine.runtime.tree import ADAPTIVE_NAME, PLAIN_NAME, Tree

PLAIN, TREE, ADAPTIVE, OTHER = PLAIN_NAME, "tree", ADAPTIVE_NAME, "other"  # kinds of ways
PERCENTILES = (50, 95, 99)

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Answered:
    """One greedy answer.

    Attributes:
        token_ids: all of it.
        timed_tokens, seconds: those whose time was taken, and that time; the prompt is in neither.
        round_seconds: wall time of each round, or of each token of another runtime.
        published: tokens of each round.
        trees: name of the tree that each round verified.
    """

    token_ids: list[int]
    timed_tokens: int
    seconds: float
    round_seconds: list[float]
    published: list[int]
    trees: list[str] = field(default_factory=list)


class Difference(NamedTuple):
    """An answer that is not the first one of plain steps.

    Attributes:
        prompt: its index.
        token: index of the first that is another one, or missing.
        repeat: index of the first in which the answer differs.
    """

    prompt: int
    token: int
    repeat: int


class Other(Protocol):
    """Another runtime that decodes the same model."""

    name: str
    version: str

    def answer(self, prompt_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Decode so many tokens greedily, at least 2, with no stop token.

        Returns:
            The tokens, and the seconds that each but the first took: that one's belong to the prompt.
        """


@dataclass
class Way:
    """A way to decode, and its answers.

    Attributes:
        name: what reports call it.
        kind: PLAIN, TREE, ADAPTIVE or OTHER.
        tree: of a TREE.
        repeats: [repeat][prompt], the prompts in their order.
    """

    name: str
    kind: str
    tree: Tree | None = None
    other: Other | None = None
    repeats: list[list[Answered]] = field(default_factory=list)

    @property
    def answers(self) -> list[Answered]:
        """Those that count, by prompt: of the repeat whose seconds are the median, of two in the middle the lower."""
        return [_median(repeats) for repeats in zip(*self.repeats, strict=True)]

    def decode(self, engine: Engine, prompt: BenchPrompt, tokens: int) -> Answered:
        if self.other is not None:
            token_ids, seconds = self.other.answer(prompt.ids, tokens)
            return Answered(token_ids, len(seconds), sum(seconds), seconds, [1] * len(seconds))
        done = engine.generate(
            prompt_ids=prompt.ids,
            max_new_tokens=tokens,
            speculation=self.kind != PLAIN,
            tree=self.tree,
            adaptive=self.kind == ADAPTIVE,
        )
        return Answered(
            done.token_ids,
            done.generated_tokens,
            done.timings.decode,
            done.round_seconds,
            done.published_per_round,
            done.round_trees,
        )

    def tally(self, chosen: Sequence[int], repeat: int | None = None) -> Tally:
        """What the answers to these prompts come to together: those that count, or those of one repeat."""
        every = self.answers if repeat is None else self.repeats[repeat]
        answers = [every[index] for index in chosen]
        return Tally(
            tokens=sum(answer.timed_tokens for answer in answers),
            seconds=sum(answer.seconds for answer in answers),
            published=[count for answer in answers for count in answer.published],
            round_seconds=[seconds for answer in answers for seconds in answer.round_seconds],
            rounds_per_tree=dict(Counter(name for answer in answers for name in answer.trees)),
        )


@dataclass(frozen=True)
class Tally:
    """Several answers of one way together.

    Attributes:
        tokens, seconds: that were timed.
        published: tokens of each round.
        round_seconds: of each round.
        rounds_per_tree: number of rounds by tree.
    """

    tokens: int
    seconds: float
    published: list[int]
    round_seconds: list[float]
    rounds_per_tree: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def milliseconds_per_token(self) -> float:
        return 1000 * self.seconds / self.tokens if self.tokens else 0.0

    @property
    def per_round(self) -> float:
        """E[G]."""
        return Published.of(self.published).mean if self.published else 0.0

    def distribution(self) -> dict[int, float]:
        """Share of the rounds by the tokens they published; 1 together."""
        return {count: many / len(self.published) for count, many in sorted(Counter(self.published).items())}

    def percentiles(self) -> dict[int, float]:
        """Milliseconds of a round by percentile."""
        if not self.round_seconds:
            return dict.fromkeys(PERCENTILES, 0.0)
        values = np.percentile(self.round_seconds, PERCENTILES)
        return {rank: 1000 * float(value) for rank, value in zip(PERCENTILES, values, strict=True)}


@dataclass(frozen=True)
class Answers:
    """All answers; the first way is plain decoding.

    Attributes:
        prompts: in the order of the answers of each way.
        ways: PLAIN first.
    """

    prompts: list[BenchPrompt]
    ways: list[Way]

    @property
    def plain(self) -> Way:
        return self.ways[0]

    @property
    def repeats(self) -> int:
        """Answers to each prompt in each way."""
        return len(self.plain.repeats)

    @property
    def everything(self) -> range:
        return range(len(self.prompts))

    @property
    def categories(self) -> dict[str, list[int]]:
        """Category -> its prompts, in the order of their first."""
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            found.setdefault(prompt.category, []).append(index)
        return found

    @property
    def groups(self) -> dict[str, list[int]]:
        """Group of categories -> its prompts; nothing where there is one alone."""
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            found.setdefault(prompt.group, []).append(index)
        return found if len(found) > 1 else {}

    def speed_up(self, way: Way, chosen: Sequence[int], repeat: int | None = None) -> float:
        """Tokens per second over plain steps: of the answers that count, or of those of one repeat."""
        plain = self.plain.tally(chosen, repeat).tokens_per_second
        return way.tally(chosen, repeat).tokens_per_second / plain if plain else 0.0

    def speed_ups(self, way: Way, chosen: Sequence[int]) -> list[float]:
        """By repeat."""
        return [self.speed_up(way, chosen, repeat) for repeat in range(len(way.repeats))]

    def differing(self, way: Way) -> list[Difference]:
        """Prompts with an answer, of any repeat, that is not the first one of plain decoding; each once."""
        found = []
        for prompt, (first, *repeats) in enumerate(zip(self.plain.repeats[0], *way.repeats, strict=True)):
            for repeat, answer in enumerate(repeats):
                if answer.token_ids != first.token_ids:
                    found.append(Difference(prompt, _first_other(answer.token_ids, first.token_ids), repeat))
                    break
        return found


def _median(repeats: Sequence[Answered]) -> Answered:
    seconds = [answer.seconds for answer in repeats]
    return repeats[seconds.index(median_low(seconds))]


def _first_other(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def answer_all(
    engine: Engine,
    prompts: list[BenchPrompt],
    trees: Sequence[Tree],
    others: Sequence[Other],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    progress: Callable[[], None],
) -> Answers:
    """Answer every prompt in every way, in an order that changes from prompt to prompt; a warm-up comes before.

    All prompts are answered once before any is answered again, in an order that changes from repeat to repeat too.
    Other runtimes decode as many tokens as plain steps did at first, and at least 2.

    Args:
        repeats: answers to each prompt in each way, at least 1.
        progress: called behind each answer.
    """
    ways = [Way("plain steps", PLAIN), *(Way(tree.name, TREE, tree) for tree in trees), Way(ADAPTIVE_NAME, ADAPTIVE)]
    answers = Answers(prompts, [*ways, *(Way(other.name, OTHER, other=other) for other in others)])
    for way in answers.ways:
        way.decode(engine, prompts[0], min(_WARM_UP_TOKENS, max(2, max_new_tokens)))
    own = [way for way in answers.ways if way.kind != OTHER]
    for repeat in range(repeats):
        for way in answers.ways:
            way.repeats.append([])
        for index, prompt in enumerate(prompts):
            turn = (index + repeat) % len(own)
            for way in [*own[turn:], *own[:turn], *answers.ways[len(own) :]]:
                tokens = max(2, len(answers.plain.repeats[0][index].token_ids)) if way.kind == OTHER else max_new_tokens
                time.sleep(PAUSE_SECONDS)
                way.repeats[repeat].append(way.decode(engine, prompt, tokens))
                progress()
    return answers
