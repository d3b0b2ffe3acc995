"""What an answer is: its pieces while it is written, and the record of it when it is finished."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from medusa_engine.runtime.answer_text import AnswerText
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree_plan import PLAIN

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timings:
    """Wall times in seconds: what was loaded for this answer, running the prompt, running the rounds."""

    load: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: its text without special tokens, up to a stop string; None if the bundle has no tokenizer.
        token_ids: its tokens, a final stop token or those of a stop string included.
        finish_reason: `stop`, `length`, `cache_full` or `deadline`; `closed` if the stream was closed before.
        prompt_tokens: tokens of the prompt.
        published_per_round: tokens each round published (G = accepted suffix + 1; the last one may be cut).
        round_seconds: wall time of each round.
        timings: of the whole answer.
        cached_tokens: of the prompt's tokens, those whose keys and values the session had kept.
        round_trees: name of the tree that each round verified, `plain` for a plain step.
        tree: the tree in use at the end: of several, the one found to be fastest so far.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    published_per_round: list[int]
    round_seconds: list[float]
    timings: Timings
    cached_tokens: int = 0
    round_trees: list[str] = field(default_factory=list)
    tree: str = PLAIN.name

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rounds(self) -> int:
        return len(self.published_per_round)

    @property
    def rounds_per_tree(self) -> dict[str, int]:
        """Rounds of each tree that verified one, in the order of their first."""
        return dict(Counter(self.round_trees))

    def document(self) -> dict[str, Any]:
        """The JSON form that `medusa-run --json` prints; times in seconds."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "published_per_round": self.published_per_round,
            "rounds_per_tree": self.rounds_per_tree,
            "tree": self.tree,
            "timings": {
                "load": self.timings.load,
                "prefill": self.timings.prefill,
                "decode": self.timings.decode,
            },
        }


@dataclass(frozen=True)
class Piece:
    """What one round added.

    Attributes:
        text: characters that became final; may be empty while a character is incomplete or a stop string may have
            begun, and always is without a tokenizer.
        token_ids: the tokens the round published; none in a last piece of text that was held back.
        seconds: wall time of the round.
        tree: name of the tree that the round verified, `plain` for a plain step; None without a round.
    """

    text: str
    token_ids: list[int]
    seconds: float = 0.0
    tree: str | None = None


class GenerationStream:
    """Iterates over the pieces of an answer; `generation` is the record once the iteration has ended.

    As a context manager it closes the answer when it is left.

    Args:
        decoding: its rounds.
        text: of its tokens; None without a tokenizer.
        prompt_tokens, cached_tokens: for the record.
        load: what has to be done before the first pass; returns the seconds that loading took, for the record too.
    """

    def __init__(
        self,
        decoding: Decoding,
        text: AnswerText | None,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        load: Callable[[], float],
    ) -> None:
        self._decoding: Decoding | None = decoding  # None once the answer has ended: it holds the cache
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._load = load
        self._load_seconds = 0.0
        self._started = time.perf_counter()
        self._sent: list[str] = []
        self._generation: Generation | None = None
        self._pieces = self._run(decoding)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The finished answer; runs what is left of it first."""
        for _ in self._pieces:
            pass
        if self._generation is None:
            raise RuntimeError("the stream was ended by an error before the answer was finished")
        return self._generation

    def close(self) -> None:
        """End the answer here; `generation` then has what was published, with the finish reason `closed`.

        Raises:
            UserError: a pass of it runs in another thread.
        """
        if self._decoding is not None:
            try:
                self._pieces.close()
            except ValueError as error:  # a pass runs in another thread
                raise UserError(
                    "the answer is being written by another thread", "close it there, or behind the pass that runs"
                ) from error
            self._finish(self._decoding, "closed")

    def _run(self, decoding: Decoding) -> Generator[Piece]:
        try:
            self._load_seconds = self._load()
            self._started = time.perf_counter()
            for round_ in decoding:
                text, kept = self._text.push(round_.token_ids) if self._text else ("", len(round_.token_ids))
                if self._text and self._text.stopped:
                    decoding.stop(kept)
                self._sent.append(text)
                yield Piece(text, round_.token_ids[:kept], round_.seconds, round_.tree)
            rest = self._text.finish() if self._text else ""
            if rest:
                self._sent.append(rest)
                yield Piece(rest, [])
        except GeneratorExit:
            raise
        except BaseException:
            self._decoding = None
            raise
        stopped = self._text is not None and self._text.stopped
        self._finish(decoding, "stop" if stopped else decoding.finish_reason or "")

    def _finish(self, decoding: Decoding, finish_reason: str) -> None:
        self._decoding = None
        self._generation = Generation(
            text="".join(self._sent) if self._text else None,
            token_ids=[token for round_ in decoding.rounds for token in round_.token_ids],
            finish_reason=finish_reason,
            prompt_tokens=self._prompt_tokens,
            published_per_round=[len(round_.token_ids) for round_ in decoding.rounds],
            round_seconds=[round_.seconds for round_ in decoding.rounds],
            timings=Timings(
                load=self._load_seconds,
                prefill=decoding.prefill_seconds,
                decode=time.perf_counter() - self._started - decoding.prefill_seconds,
            ),
            cached_tokens=self._cached_tokens,
            round_trees=[round_.tree for round_ in decoding.rounds],
            tree=decoding.tree,
        )
        _log.debug(
            "answer of %d tokens in %d rounds behind %d (%d kept): %s",
            self._generation.generated_tokens,
            self._generation.rounds,
            self._prompt_tokens,
            self._cached_tokens,
            finish_reason,
        )
