"""What a tree really does: answers decoded with it and plainly, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.tree import Tree
from medusa_engine.training.calibration import Answer
from medusa_engine.training.engine_search import BOOTSTRAP, Interval, middle

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measured:
    """Pairs of answers to the same prompts, speculative and plain."""

    speculative: list[Generation]
    plain: list[Generation]

    @property
    def published(self) -> float:
        """E[G], tokens a round published, the root included."""
        return _published(self.speculative)

    @property
    def speed_up(self) -> float:
        """Tokens per second of decoding over those of plain steps; the prompt's time is in neither."""
        return _tokens_per_second(self.speculative) / _tokens_per_second(self.plain)

    @property
    def differing(self) -> int:
        """Answers that are not those of plain decoding, which nearly equal logits can cause."""
        pairs = zip(self.speculative, self.plain, strict=True)
        return sum(one.token_ids != other.token_ids for one, other in pairs)

    def intervals(self) -> tuple[Interval, Interval]:
        """The middle 90% of E[G] and of the speed-up, had the prompts been others."""
        random = np.random.default_rng(0)
        published, speed_ups = [], []
        for _ in range(BOOTSTRAP):
            drawn = random.integers(0, len(self.plain), size=len(self.plain))
            again = Measured([self.speculative[index] for index in drawn], [self.plain[index] for index in drawn])
            published.append(again.published)
            speed_ups.append(again.speed_up)
        return middle(published), middle(speed_ups)


def measure(engine: Engine, tree: Tree, answers: Sequence[Answer], *, progress: Callable[[int], None]) -> Measured:
    """Decode calibrated answers again with a tree and with plain steps, in turn.

    Args:
        answers: at least one; as long as they were.
        progress: called with the number of prompts done.
    """

    def decode(answer: Answer, tokens: int, *, speculation: bool) -> Generation:
        return engine.generate(
            prompt_ids=answer.prompt_ids,
            max_new_tokens=tokens,
            speculation=speculation,
            tree=tree if speculation else None,
        )

    done: dict[bool, list[Generation]] = {True: [], False: []}
    for speculation in done:
        decode(answers[0], WARM_UP_TOKENS, speculation=speculation)
    for index, answer in enumerate(answers):
        for speculation in (True, False) if index % 2 else (False, True):
            done[speculation].append(decode(answer, len(answer.ranks), speculation=speculation))
        progress(index + 1)
    return Measured(done[True], done[False])


def _published(answers: Sequence[Generation]) -> float:
    return sum(answer.generated_tokens for answer in answers) / sum(answer.rounds for answer in answers)


def _tokens_per_second(answers: Sequence[Generation]) -> float:
    return sum(answer.generated_tokens for answer in answers) / sum(answer.timings.decode for answer in answers)
