"""What an answer is: its pieces while it is written, and the record of it when it is finished."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.stream_decoder import StreamDecoder


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
        text: its text without special tokens; None if the bundle has no tokenizer.
        token_ids: its tokens, a final stop token included.
        finish_reason: `stop`, `length` or `cache_full`.
        prompt_tokens: tokens of the prompt.
        published_per_round: tokens each round published (G = accepted suffix + 1; the last one may be cut).
        round_seconds: wall time of each round.
        timings: of the whole answer.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    published_per_round: list[int]
    round_seconds: list[float]
    timings: Timings

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rounds(self) -> int:
        return len(self.published_per_round)

    def document(self) -> dict[str, Any]:
        """The JSON form that `medusa-run --json` prints; times in seconds."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "published_per_round": self.published_per_round,
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
        text: characters that became final; may be empty while a character is incomplete, and always is
            without a tokenizer.
        token_ids: the tokens the round published.
    """

    text: str
    token_ids: list[int]


class GenerationStream:
    """Iterates over the pieces of an answer; `generation` is the record once the iteration has ended."""

    def __init__(
        self, decoding: Decoding, decoder: StreamDecoder | None, *, prompt_tokens: int, load_seconds: float
    ) -> None:
        self._decoding = decoding
        self._decoder = decoder
        self._prompt_tokens = prompt_tokens
        self._load_seconds = load_seconds
        self._generation: Generation | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """The finished answer; runs what is left of it first."""
        for _ in self._pieces:
            pass
        if self._generation is None:
            raise RuntimeError("the stream was ended by an error before the answer was finished")
        return self._generation

    def _run(self) -> Iterator[Piece]:
        started = time.perf_counter()
        text: list[str] = []
        token_ids: list[int] = []
        for round_ in self._decoding:
            token_ids += round_.token_ids
            text.append(self._decoder.push(round_.token_ids) if self._decoder else "")
            yield Piece(text[-1], round_.token_ids)
        rest = self._decoder.finish() if self._decoder else ""
        if rest:
            text.append(rest)
            yield Piece(rest, [])
        decoding = self._decoding
        self._generation = Generation(
            text="".join(text) if self._decoder else None,
            token_ids=token_ids,
            finish_reason=decoding.finish_reason or "",
            prompt_tokens=self._prompt_tokens,
            published_per_round=[len(round_.token_ids) for round_ in decoding.rounds],
            round_seconds=[round_.seconds for round_ in decoding.rounds],
            timings=Timings(
                load=self._load_seconds,
                prefill=decoding.prefill_seconds,
                decode=time.perf_counter() - started - decoding.prefill_seconds,
            ),
        )
