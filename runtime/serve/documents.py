"""What is sent: whole answers and the chunks of streams, in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from typing import Any

from medusa_engine.runtime.generation import Generation, Piece
from medusa_engine.runtime.serve.asked import Asked

_FINISH_REASONS = {"stop": "stop", "length": "length", "cache_full": "length", "deadline": "length"}


class Documents:
    """Writes the documents of one answer.

    An object `medusa` beside OpenAI's fields has the rounds, their timings in seconds, the exact reason why the
    answer ended and the acceptance policy. Token ids lie where vLLM puts them.

    Args:
        asked: the request.
        model_name: to be shown.
    """

    def __init__(self, asked: Asked, model_name: str) -> None:
        self._asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model_name,
        }
        chunks = {"object": "chat.completion.chunk"} if asked.chat else {}
        self._chunk_head = self._head | chunks | ({"usage": None} if asked.include_usage else {})

    def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        text = generation.text or ""
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._asked.chat else {"text": text}
        )
        choice = self._choice(said, generation.token_ids, _FINISH_REASONS[generation.finish_reason])
        return {
            **self._head,
            "choices": [choice],
            "usage": _usage(generation),
            "medusa": self._facts(generation),
            **self._prompt_ids(choice),
        }

    def first(self) -> dict[str, Any] | None:
        """The chunk before the first token; None if there is none."""
        if not self._asked.chat and not self._asked.return_token_ids:
            return None
        choice = self._choice(self._said("", first=True), [])
        return {**self._chunk_head, "choices": [choice], **self._prompt_ids(choice)}

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None if it has nothing to show."""
        if not piece.text and not (self._asked.return_token_ids and piece.token_ids):
            return None
        return {**self._chunk_head, "choices": [self._choice(self._said(piece.text), piece.token_ids)]}

    def last(self, generation: Generation) -> list[dict[str, Any]]:
        """The chunks behind the last piece: how the answer ended and, if asked for, its usage."""
        choice = self._choice(self._said(""), [], _FINISH_REASONS[generation.finish_reason])
        chunks = [{**self._chunk_head, "choices": [choice], "medusa": self._facts(generation)}]
        if self._asked.include_usage:
            chunks.append({**self._chunk_head, "choices": [], "usage": _usage(generation)})
        return chunks

    def _said(self, text: str, *, first: bool = False) -> dict[str, Any]:
        if not self._asked.chat:
            return {"text": text}
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text} if text or first else {}}

    def _choice(self, said: dict[str, Any], token_ids: list[int], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        if self._asked.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def _prompt_ids(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Where the prompt's ids belong: beside the choices of a chat, in the choice of a completion."""
        if not self._asked.return_token_ids:
            return {}
        if self._asked.chat:
            return {"prompt_token_ids": self._asked.prompt_ids}
        choice["prompt_token_ids"] = self._asked.prompt_ids
        return {}

    def _facts(self, generation: Generation) -> dict[str, Any]:
        return {
            "finish_reason": generation.finish_reason,
            "rounds": generation.rounds,
            "published_per_round": generation.published_per_round,
            "timings": {"prefill": generation.timings.prefill, "decode": generation.timings.decode},
            "acceptance": self._asked.policy.document(),
        }


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.generated_tokens,
        "total_tokens": generation.prompt_tokens + generation.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
