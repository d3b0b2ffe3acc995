"""Answers to prompts in several ways, one after the other: plain steps, trees, changing trees, other runtimes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """A way to decode, and its answers in the order of the prompts.

    Attributes:
        name: what reports call it.
        kind: PLAIN, TREE, ADAPTIVE or OTHER.
        tree: of a TREE.
    """

    name: str
    kind: str
    tree: Tree | None = None
    other: Other | None = None
    answers: list[Answered] = field(default_factory=list)

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

    def tally(self, chosen: Sequence[int]) -> Tally:
        """What these answers come to together."""
        answers = [self.answers[index] for index in chosen]
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

    def speed_up(self, way: Way, chosen: Sequence[int]) -> float:
        """Tokens per second over plain steps."""
        plain = self.plain.tally(chosen).tokens_per_second
        return way.tally(chosen).tokens_per_second / plain if plain else 0.0

    def differing(self, way: Way) -> list[tuple[int, int]]:
        """Prompts whose answer is not that of plain decoding, and the first token that is another one."""
        found = []
        for index, (one, other) in enumerate(zip(way.answers, self.plain.answers, strict=True)):
            if one.token_ids != other.token_ids:
                pairs = zip(one.token_ids, other.token_ids, strict=False)
                same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
                found.append((index, min(len(one.token_ids), len(other.token_ids)) if same is None else same))
        return found


def answer_all(
    engine: Engine,
    prompts: list[BenchPrompt],
    trees: Sequence[Tree],
    others: Sequence[Other],
    *,
    max_new_tokens: int,
    progress: Callable[[], None],
) -> Answers:
    """Answer every prompt in every way, in an order that changes from prompt to prompt; a warm-up comes before.

    Other runtimes decode as many tokens as plain steps did, and at least 2.

    Args:
        progress: called behind each answer.
    """
    ways = [Way("plain steps", PLAIN), *(Way(tree.name, TREE, tree) for tree in trees), Way(ADAPTIVE_NAME, ADAPTIVE)]
    answers = Answers(prompts, [*ways, *(Way(other.name, OTHER, other=other) for other in others)])
    for way in answers.ways:
        way.decode(engine, prompts[0], min(_WARM_UP_TOKENS, max(2, max_new_tokens)))
    own = [way for way in answers.ways if way.kind != OTHER]
    for index, prompt in enumerate(prompts):
        turn = index % len(own)
        for way in [*own[turn:], *own[:turn], *answers.ways[len(own) :]]:
            tokens = max(2, len(answers.plain.answers[index].token_ids)) if way.kind == OTHER else max_new_tokens
            time.sleep(PAUSE_SECONDS)
            way.answers.append(way.decode(engine, prompt, tokens))
            progress()
    return answers
