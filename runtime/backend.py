"""What the round loop asks of an engine; one implementation per library."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.policy import GREEDY, AcceptancePolicy
from medusa_engine.runtime.tree_buffers import TreeBuffers


class Published(NamedTuple):
    """What a pass published.

    Attributes:
        tokens: [G] int64, the root and the accepted suffix, up to a stop token or the budget; none once finished.
        past_length: P, cache rows committed before these G, which are still pending.
        token_budget: tokens that may still be published.
        finished: no later pass publishes anything: the last token is a stop token, the budget is used up, or the logits
            behind the last token are not finite, which the next pass raises.
        decided: whether the logits behind the last token decided the next one.
        seconds: time of the pass as the device measured it; None where the host's clock is as good.
    """

    tokens: npt.NDArray[np.int64]
    past_length: int
    token_budget: int
    finished: bool
    decided: bool
    seconds: float | None = None


class DecodeState(Protocol):
    """Cache and round buffers of one session, whose addresses never change, and the passes that work on them."""

    @property
    def ahead(self) -> int:
        """How many more passes than were read may be launched before the oldest is read; 0 where a pass is a call.

        Where it is more, the cache has room for a whole tree behind `max_length`.
        """

    def use(self, policy: AcceptancePolicy) -> None:
        """Let the next passes, of prompts too, choose tokens by `policy`; greedy until then."""

    def limit(self, stop_ids: Set[int], token_budget: int) -> None:
        """Let the passes behind the next prompt publish no token behind one of `stop_ids`, and no more than the budget.

        Without, nothing ends an answer.
        """

    @property
    def rows_ready(self) -> int:
        """Packed rows the next pass may verify: those of the proposed tree after a round, 1 after a step."""

    def prefill(self, token_ids: npt.NDArray[np.int64], start: int, next_tree: TreeBuffers | None) -> None:
        """Append a prompt chunk [N] at position `start`; propose `next_tree`, or the root alone if None."""

    def round(self, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        """Verify `tree`, whose tokens the last pass proposed (or more rows), and propose `next_tree`.

        Raises:
            UserError: the logits behind the last token were not finite, here or when the pass is read. The cache is
                not to be relied on any more.
        """

    def step(self) -> None:
        """One plain decoding step: no tree, no heads; raises as `round` does."""

    def read(self) -> Published:
        """Wait for the oldest pass that was not read and return what it published; of prompt chunks, for the last."""

    def proposed(self) -> npt.NDArray[np.int64]:
        """Tokens of the tree that the last pass proposed, [rows_ready]; the root is first."""

    def keep_proposed(self, rows: npt.NDArray[np.int64]) -> None:
        """Let the next pass verify only these rows [N] of what was proposed, in this order; where `ahead` is 0."""

    def keep_pending(self, count: int) -> None:
        """Commit only the first `count` of what was read last: the answer ends inside it, whatever was launched."""


class SessionState(DecodeState, Protocol):
    """A `DecodeState` whose cache is kept between answers, wound back and copied."""

    def wind_back(self, tokens: int) -> None:
        """Let the cache hold the first `tokens` tokens of prompt and answer only, and forget passes never read."""

    def copy_from(self, source: SessionState) -> None:
        """Copy every row that counts of a state of the same backend into this empty one."""


class Backend(Protocol):
    """The graphs of one engine, shared by its states; safe to use from several threads."""

    def load(self, *, speculation: bool, policy: str = GREEDY) -> None:
        """Load what rounds (or plain steps) of an acceptance policy need, if it is not loaded yet."""

    def new_state(self) -> SessionState:
        """An empty cache and its buffers; one thread at a time may use it."""
