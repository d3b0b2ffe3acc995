"""The round loop: prefill, then launch passes and read what they published, until a condition ends the answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from medusa_engine.runtime.backend import DecodeState
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.tree_buffers import rows_among
from medusa_engine.runtime.tree_plan import PLAIN, Plans, Proposal, TreePlan

CHUNK_ROWS = 256  # prompt tokens per prefill pass


class Round(NamedTuple):
    """One pass of the decode loop.

    Attributes:
        token_ids: tokens it published.
        seconds: its wall time.
        tree: name of the tree that it verified, `plain` for a plain step.
    """

    token_ids: list[int]
    seconds: float
    tree: str = PLAIN.name


class Decoding:
    """Iterates over the rounds of one answer.

    Every published token has its key and value in the cache, so an answer has at most
    `max_length - len(prompt_ids)` tokens. A stop token is published; what a round accepted behind it is not.
    The passes themselves see to that; here their results are read.
    Where several conditions end an answer in one round, `stop` comes before `length`, then `cache_full`, `deadline`.

    Args:
        state: holds the first `cached_tokens` tokens of the prompt.
        limits: of its engine.
        prompt_ids: at least one token.
        plan: the tree of every round, or what chooses it from round to round; None for plain steps.
        max_new_tokens: at most this many tokens are published.
        stop_ids: tokens that end the answer.
        cached_tokens: less than the prompt has: its last token is run, for the logits behind it.
        deadline: seconds from the start of the iteration; the pass that crosses it is the last one.

    Attributes:
        finish_reason: `stop`, `length`, `cache_full` or `deadline` once the iteration has ended, None before.
        prefill_seconds: wall time of the prompt.
        rounds: the rounds so far.
        held: tokens that have their key and value in the cache; none while a pass runs, after one that failed, or
            where the logits behind the last token are not finite.

    Raises:
        UserError: the prompt is empty, does not fit the cache, or has a token outside the vocabulary; the budget or
            the deadline is out of range. While iterating: the logits are not finite.
    """

    def __init__(
        self,
        state: DecodeState,
        limits: Limits,
        prompt_ids: Sequence[int],
        *,
        plan: Plans | None,
        max_new_tokens: int,
        stop_ids: Set[int],
        cached_tokens: int = 0,
        deadline: float | None = None,
    ) -> None:
        _check_prompt(prompt_ids, limits)
        if not _is_index(max_new_tokens) or max_new_tokens < 0:
            raise WrongValueError("max_new_tokens", shown(max_new_tokens), "give a whole number, 0 or more")
        if deadline is not None and not (isinstance(deadline, (int, float)) and deadline > 0):  # NaN is not
            raise WrongValueError("deadline", shown(deadline), "give seconds above 0")
        self._state = state
        self._limits = limits
        self._prompt = np.array(prompt_ids, dtype=np.int64)
        self._plan = plan
        room = limits.max_length - len(prompt_ids)
        self._runs = max_new_tokens > 0
        self._budget = min(max_new_tokens, room)  # tokens that may still be published
        self._spent = "length" if max_new_tokens <= room else "cache_full"  # the reason when they are
        self._proposed: Proposal | None = None  # for the next round
        self._launched: deque[_Verified] = deque()  # rounds that were not read, oldest first
        self._stop_ids = stop_ids
        self._deadline = deadline
        self._started = 0.0
        self.held: list[int] = list(prompt_ids[:cached_tokens])
        self.finish_reason: str | None = None
        self.prefill_seconds = 0.0
        self.rounds: list[Round] = []

    def __iter__(self) -> Iterator[Round]:
        self._started = time.perf_counter()
        if self._runs:
            self._state.limit(self._stop_ids, self._budget)
            self._prefill()
        while self.finish_reason is None:
            if not self._budget:
                self.finish_reason = self._spent
            elif self._late():
                self.finish_reason = "deadline"
            else:
                started = time.perf_counter()
                held, self.held = self.held, []
                # Every round publishes at least one token: more than the budget would be launched for nothing.
                while len(self._launched) <= min(self._state.ahead, self._budget - 1):
                    self._launched.append(self._launch(len(held)))
                verified = self._launched.popleft()
                published = self._state.read()
                token_ids: list[int] = published.tokens.tolist()
                held += token_ids
                if published.decided:  # else the pass could tell nothing from its last row: run it again
                    self.held = held
                self._budget = published.token_budget
                if published.finished and token_ids[-1] in self._stop_ids:
                    self.finish_reason = "stop"
                seconds = time.perf_counter() - started
                self.rounds.append(Round(token_ids, seconds, verified.name))
                self._record(verified, token_ids, published.seconds or seconds)
                yield self.rounds[-1]

    @property
    def tree(self) -> str:
        """Name of the tree in use, `plain` for plain steps."""
        return PLAIN.name if self._plan is None else self._plan.used.name

    def stop(self, kept: int) -> None:
        """End the answer behind the first `kept` tokens, at least one, of the round that was read last."""
        last = self.rounds[-1]
        dropped = len(last.token_ids) - kept
        if dropped:
            del self.held[-dropped:]
            self._state.keep_pending(kept)
            self.rounds[-1] = last._replace(token_ids=last.token_ids[:kept])
        self.finish_reason = "stop"

    def _late(self) -> bool:
        return self._deadline is not None and time.perf_counter() - self._started >= self._deadline

    def _prefill(self) -> None:
        if self._plan is not None:
            self._plan.begin(self._prompt.tolist())
            self._proposed = self._plan.choose()
        next_tree = None if self._proposed is None else self._proposed.full
        begin = end = len(self.held)
        self.held = []
        while end < len(self._prompt) and not (end > begin and self._late()):
            chunk = self._prompt[end : end + CHUNK_ROWS]
            self._state.prefill(chunk, end, next_tree)
            end += len(chunk)
        self._state.read()
        self.held = self._prompt[:end].tolist()
        self.prefill_seconds = time.perf_counter() - self._started

    def _launch(self, held: int) -> _Verified:
        """Launch a round; `held` tokens are in the cache before what launched rounds add that were not read."""
        proposed = self._proposed
        if self._plan is None or proposed is None:
            self._state.step()
            return _Verified(None, whole=True)
        plan = proposed.narrowed(None if self._state.ahead else int(self._state.proposed()[0]))
        # Where passes are launched ahead, the cache has room for whole trees behind `max_length`.
        room = plan.tree.nodes if self._state.ahead else self._limits.max_length - held
        if plan is proposed:
            tree = plan.fit(min(room, self._state.rows_ready))
        else:
            tree = plan.fit(room)
            self._state.keep_proposed(rows_among(proposed.full, tree))
        self._proposed = self._plan.choose()
        self._state.round(tree, self._proposed.full)
        return _Verified(plan, whole=len(tree.tree_indices) == plan.tree.nodes)

    def _record(self, verified: _Verified, token_ids: Sequence[int], seconds: float) -> None:
        if self._plan is not None and verified.plan is not None:
            whole = verified.whole and bool(self._budget) and self.finish_reason is None  # the last may have been cut
            self._plan.record(verified.plan, token_ids, seconds, whole=whole)


class _Verified(NamedTuple):
    """The tree of a pass, and whether all of it had room."""

    plan: TreePlan | None
    whole: bool

    @property
    def name(self) -> str:
        return PLAIN.name if self.plan is None else self.plan.tree.name


def _is_index(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_prompt(prompt_ids: Sequence[int], limits: Limits) -> None:
    if not prompt_ids:
        raise UserError("the prompt is empty: it has no tokens", "give at least one token of prompt")
    if len(prompt_ids) > limits.max_length:
        raise UserError(
            f"the prompt has {counted(len(prompt_ids), 'token')}, but the cache holds {limits.max_length}",
            "shorten the prompt, or export with a larger medusa-export --max-length",
        )
    for token in prompt_ids:
        if not _is_index(token):
            raise UserError(f"prompt token {shown(token)} is no token id", "give whole numbers")
        if not 0 <= token < limits.vocab_size:
            raise UserError(
                f"prompt token {shown(token)} is outside the vocabulary of {counted(limits.vocab_size, 'token')}",
                f"give ids from 0 to {limits.vocab_size - 1}",
            )
