"""One self-written conversation: what is forced by the chat template, what is sampled, and who owns which token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.training.shards import KEPT_TOP


@dataclass(frozen=True)
class SamplingPolicy:
    """How conversations are written.

    Attributes:
        turns: user turns are 1 ... turns, evenly.
        user_temperature: of the user turns the model writes.
        assistant_temperatures: one is drawn per conversation; 0 is greedy.
        user_tokens, assistant_tokens: a turn is closed at this length.
    """

    turns: int = 2
    user_temperature: float = 1.0
    assistant_temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    user_tokens: int = 96
    assistant_tokens: int = 224


class TemplateSegments:
    """The token runs that a chat template puts before, between and behind the contents of the turns.

    Raises:
        UserError: the template does not show message contents as they are.
    """

    def __init__(self, tokenizer: Tokenizer, turns: int) -> None:
        marks = [f"@@{index}@@" for index in range(2 * turns)]
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": mark} for index, mark in enumerate(marks)]
        # One more turn shows what follows an answer.
        text = tokenizer.render_chat([*messages, {"role": "user", "content": "@@"}])
        self.segments: list[list[int]] = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise UserError("the chat template does not show the contents of every turn", "give --prompts instead")
            self.segments.append(tokenizer.encode(before, add_special_tokens=False))


class Conversation:
    """The state machine of one row of the batch: `next_token` is fed, `advance` takes what the step said.

    Args:
        number: its id; with the seed it fixes every random choice.
        segments, policy: how it is built.
        prompt: token ids of the first user turn; None lets the model write it.
        max_length: tokens at most.
        stop_ids: tokens that end a turn.

    Attributes:
        tokens: all tokens so far. owned: whether the assistant wrote them.
        hidden, top_ids, top_logprobs: per fed token, what the step returned behind it.
        done: nothing more is to be fed.
    """

    def __init__(
        self,
        number: int,
        segments: TemplateSegments,
        policy: SamplingPolicy,
        *,
        seed: int,
        prompt: Sequence[int] | None,
        max_length: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.owned: list[bool] = []
        self.hidden: list[npt.NDArray[np.float16]] = []
        self.top_ids: list[npt.NDArray[np.int32]] = []
        self.top_logprobs: list[npt.NDArray[np.float16]] = []
        self.done = False
        self._segments = segments.segments
        self._policy = policy
        self._random = np.random.default_rng([seed, number])
        self._turns = int(self._random.integers(1, policy.turns + 1))
        self._temperature = float(self._random.choice(policy.assistant_temperatures))
        self._max_length = max_length
        self._stop_ids = stop_ids
        self._part = 0  # index of the content being written: even user, odd assistant
        self._part_tokens = 0
        self._forced: deque[int] = deque(self._segments[0])
        if prompt is not None:
            self._forced += [*prompt, *self._segments[1]]
            self._part = 1
        self._append(self._forced.popleft(), owned=False)

    @property
    def next_token(self) -> int:
        return self.tokens[-1]

    @property
    def position(self) -> int:
        return len(self.tokens) - 1

    def advance(
        self,
        top_ids: npt.NDArray[np.int64],  # [TOP]
        top_logprobs: npt.NDArray[np.float32],  # [TOP]
        hidden: npt.NDArray[np.float32],  # [H]
    ) -> None:
        """Record what the step said behind the last token and append the next one, forced or sampled."""
        self.hidden.append(hidden.astype(np.float16))
        self.top_ids.append(top_ids[:KEPT_TOP].astype(np.int32))
        self.top_logprobs.append(top_logprobs[:KEPT_TOP].astype(np.float16))
        if len(self.tokens) >= self._max_length:
            self.done = True
        elif self._forced:
            self._append(self._forced.popleft(), owned=False)
        else:
            self._write(top_ids, top_logprobs)

    def _write(self, top_ids: npt.NDArray[np.int64], top_logprobs: npt.NDArray[np.float32]) -> None:
        assistant = self._part % 2 == 1
        if not assistant and self._part_tokens == 0:  # an empty question teaches nothing
            top_logprobs = np.where(np.isin(top_ids, list(self._stop_ids)), -np.inf, top_logprobs)
        temperature = self._temperature if assistant else self._policy.user_temperature
        token = self._sample(top_ids, top_logprobs, temperature)
        stop = token in self._stop_ids
        written = assistant or not stop  # a user turn's end is the template's to write
        if written:
            self._append(token, owned=assistant)
        self._part_tokens += 1
        if stop or self._part_tokens >= (self._policy.assistant_tokens if assistant else self._policy.user_tokens):
            self._close_part(stopped=stop and assistant)
        if not written:
            self._append(self._forced.popleft(), owned=False)

    def _close_part(self, *, stopped: bool) -> None:
        self._part += 1
        self._part_tokens = 0
        if self._part == 2 * self._turns:
            self.done = True
            return
        segment = self._segments[self._part]
        repeated = stopped and bool(segment) and segment[0] in self._stop_ids  # the assistant has written it
        self._forced.extend(segment[1:] if repeated else segment)

    def _sample(self, top_ids: npt.NDArray[np.int64], top_logprobs: npt.NDArray[np.float32], temperature: float) -> int:
        if temperature == 0.0:
            return int(top_ids[0])
        noise = self._random.gumbel(size=len(top_ids))
        return int(top_ids[np.argmax(top_logprobs / temperature + noise)])

    def _append(self, token: int, *, owned: bool) -> None:
        self.tokens.append(token)
        self.owned.append(owned)
