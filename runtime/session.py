"""A conversation with an engine: a cache that is kept from answer to answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from medusa_engine.runtime.adaptive_plans import AdaptivePlans
from medusa_engine.runtime.answer_options import DEFAULT_MAX_NEW_TOKENS, AnswerOptions, Message
from medusa_engine.runtime.answer_text import AnswerText
from medusa_engine.runtime.async_stream import AsyncGenerationStream
from medusa_engine.runtime.backend import SessionState
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import Generation, GenerationStream
from medusa_engine.runtime.kept_cache import shared_length
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.stop_strings import StopStrings
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.tree import Tree

if TYPE_CHECKING:
    from medusa_engine.runtime.engine import Engine

_MAKERS = {"acceptance": "AcceptancePolicy(name, ...)", "tree": "load_tree(path) or parse_tree(paths, name)"}
_log = logging.getLogger(__name__)


class Session:
    """Owns a cache of `manifest.cache_bytes` bytes; `Engine.session` makes one, `close` or `with` releases it.

    A prompt that begins as the tokens in the cache do, those of the last prompt and answer, runs only what is new;
    the answer is that of a new session. The system gives memory as rows are written.

    One thread at a time may use a session; sessions of one engine are independent. A new answer closes the stream
    of the one before if it has not ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open_state: SessionState | None = engine.backend.new_state()
        self._forked: list[int] = []  # tokens in the cache before the first answer
        self._decoding: Decoding | None = None  # the last answer, which knows what is in the cache
        self._stream: GenerationStream | None = None
        self._plans: dict[str, AdaptivePlans] = {}  # adaptive ones, by the policy's graph

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the cache holds: a prompt that begins with them does not run them again."""
        return list(self._held)

    def stream(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        deadline: float | None = None,
        speculation: bool = True,
        tree: Tree | None = None,
        adaptive: bool = True,
        acceptance: AcceptancePolicy | None = None,
    ) -> GenerationStream:
        """Start an answer; iterate over the result for its pieces.

        The first answer of an engine loads its graph, with the first pass.

        Args:
            prompt: text, or the whole conversation as `{"role": ..., "content": ...}` messages.
            prompt_ids: token ids instead of `prompt`.
            max_new_tokens: at most this many tokens.
            ignore_eos: do not stop at stop tokens.
            stop: texts that end the answer, whose text ends before them. Text that may be the beginning of one is
                held back until it is decided.
            deadline: seconds from the first pass; the answer ends after the pass that crosses it.
            speculation: False decodes plainly, one token per pass, without the heads.
            tree: the tree of every round of this answer, another than the bundle's too; a chain under `rejection`,
                whose default is the longest one.
            adaptive: change between the bundle's trees and plain steps from round to round, by what they were measured
                to publish per second; False takes the bundle's first tree in every round. Tokens are the same. A
                given `tree` is kept in any case, and `rejection` and `typical`, whose tokens depend on the tree, keep
                theirs.
            acceptance: another policy than greedy, one of those the bundle was exported with. `typical` does not
                preserve the model's distribution.

        Raises:
            UserError: the session is closed, the prompt is empty or too long, an option is out of range, or the
                engine cannot run the tree or the policy. The session is then as it was before. While iterating: the
                graph does not load, or the model's logits are not finite.
        """
        state, engine = self._state, self._engine
        if (prompt is None) == (prompt_ids is None):
            raise UserError("give one of prompt and prompt_ids", "pass the other one as None")
        policy = AcceptancePolicy() if acceptance is None else acceptance
        for name, value, kind in (("acceptance", policy, AcceptancePolicy), ("tree", tree, Tree | None)):
            if not isinstance(value, kind):
                raise UserError(f"{name} is {shown(value)}", f"make one with {_MAKERS[name]}")
        engine.check_policy(policy, speculation=speculation)
        ids = list(() if prompt_ids is None else prompt_ids) if prompt is None else engine.encode(prompt)
        text = self._answer_text(ids, StopStrings(stop))
        cached_tokens = shared_length(self._held, ids)
        decoding = Decoding(
            state,
            engine.limits,
            ids,
            plan=engine.plans(policy, tree=tree, adaptive=adaptive, known=self._plans) if speculation else None,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset() if ignore_eos else engine.stop_token_ids,
            cached_tokens=cached_tokens,
            deadline=deadline,
        )
        if self._stream is not None:
            self._stream.close()
        state.wind_back(cached_tokens)
        state.use(policy)
        self._decoding = decoding
        load = partial(engine.load, speculation=speculation, policy=policy.graph)
        self._stream = GenerationStream(decoding, text, prompt_tokens=len(ids), cached_tokens=cached_tokens, load=load)
        return self._stream

    def generate(self, prompt: str | Sequence[Message] | None = None, **options: Unpack[AnswerOptions]) -> Generation:
        """Write a whole answer; arguments and errors as in `stream`."""
        return self.stream(prompt, **options).generation

    def astream(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[AnswerOptions]
    ) -> AsyncGenerationStream:
        """Start an answer for `async for`: loading and passes run on a thread; arguments and errors as in `stream`."""
        return AsyncGenerationStream(self.stream(prompt, **options))

    def fork(self) -> Session:
        """Another session whose cache holds the same tokens, as after a system prompt that several chats share.

        Raises:
            UserError: the session is closed.
        """
        state, held = self._state, self.token_ids
        fork = Session(self._engine)
        if held:
            fork._state.copy_from(state)
            fork._forked = held
        return fork

    def close(self) -> None:
        """Release the cache, and close the answer that is being written; a second time does nothing."""
        if self._open_state is None:
            return
        if self._stream is not None:
            self._stream.close()
        self._open_state = self._decoding = self._stream = None
        _log.debug("session closed")

    @property
    def _state(self) -> SessionState:
        if self._open_state is None:
            raise UserError("the session is closed", "open another one with engine.session()")
        return self._open_state

    @property
    def _held(self) -> list[int]:
        return self._forked if self._decoding is None else self._decoding.held

    def _answer_text(self, prompt_ids: list[int], stops: StopStrings) -> AnswerText | None:
        if self._engine.tokenizer is not None:
            return AnswerText(self._engine.tokenizer.stream_decoder(prompt_ids=prompt_ids), stops)
        if stops.any:
            raise UserError(
                f"{self._engine.manifest.name}: this bundle has no tokenizer, so an answer has no text to stop in",
                "leave out the stop strings (--stop, stop=...)",
            )
        return None
