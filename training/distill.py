"""Self-distillation data: conversations written by the target itself, with what heads are trained on (shards.py)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.training.batch_engine import BatchEngine
from medusa_engine.training.conversation import Conversation, SamplingPolicy, TemplateSegments
from medusa_engine.training.shards import KEPT_TOP, ShardWriter, StoredConversation, claim_folder, write_manifest

PROGRESS_SECONDS = 10.0  # between lines that tell of the shard being written


@dataclass(frozen=True)
class DistillSettings:
    """What the user chose.

    Attributes:
        output: data folder; an interrupted run goes on there.
        owned_tokens: stop after this many assistant tokens.
        batch: conversations written at once.
        max_length: tokens of a conversation.
        dtype: the target runs in this precision, one of `device.DTYPES`.
        shard_conversations: conversations per file.
        seed: of every random choice, with the conversation's number.
        policy: how turns are sampled.
    """

    output: Path
    owned_tokens: int = 100_000
    batch: int = 64
    max_length: int = 448
    dtype: str = "float32"
    shard_conversations: int = 64
    seed: int = 0
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)

    def recipe(self) -> dict[str, Any]:
        """What has to be the same when a run is resumed."""
        policy = asdict(self.policy)
        return {"max_length": self.max_length, "dtype": self.dtype, "seed": self.seed, "policy": policy}


def distill(
    engine: BatchEngine,
    tokenizer: Tokenizer,
    settings: DistillSettings,
    *,
    stop_ids: frozenset[int],
    prompts: Sequence[str] | None,
    provenance: dict[str, Any],
) -> None:
    """Write conversations until `owned_tokens` are on disk.

    Args:
        prompts: first user turns, one conversation each; None lets the model write them.
        provenance: hashes of target and template, for the data manifest.

    Raises:
        UserError: the folder holds data of another recipe.
    """
    made_from = {**provenance, "recipe": settings.recipe()}
    claim_folder(settings.output, made_from)
    writer = ShardWriter(settings.output, settings.shard_conversations)
    numbers = _numbers(writer.written, None if prompts is None else len(prompts))
    segments = TemplateSegments(tokenizer, settings.policy.turns)
    least = len(segments.segments[0]) + len(segments.segments[1]) + 2  # a token of each, and nothing is cut
    if settings.max_length <= least:
        raise UserError(
            f"--max-length {settings.max_length}: the chat template alone takes {counted(least - 2, 'token')}",
            f"give more than {least}, better some hundreds",
        )

    def start() -> Conversation | None:
        number = next(numbers, None)
        if number is None:
            return None
        prompt = None if prompts is None else tokenizer.encode(prompts[number], add_special_tokens=False)
        return Conversation(
            number,
            segments,
            settings.policy,
            seed=settings.seed,
            prompt=prompt,
            max_length=settings.max_length,
            stop_ids=stop_ids,
        )

    size = settings.shard_conversations
    _report(f"writing {counted(engine.batch, 'conversation')} at a time, stored {size} by {size}")
    rows: list[Conversation | None] = [start() for _ in range(engine.batch)]
    started, before = time.monotonic(), writer.tokens
    told, passed = started, 0  # when a line was last printed; tokens behind which the target has run
    while any(rows) and writer.owned_tokens < settings.owned_tokens:
        tokens = np.array([row.next_token if row else 0 for row in rows])
        positions = np.array([row.position if row else 0 for row in rows])
        result = engine.step(tokens, positions)
        for index, row in enumerate(rows):
            if row is None:
                continue
            row.advance(result.top_ids[index], result.top_logprobs[index], result.hidden[index])
            passed += 1
            if row.done:
                if writer.add(_stored(row)):
                    write_manifest(settings.output, made_from, writer)
                    rate = (writer.tokens - before) / (time.monotonic() - started)
                    counts = f"{counted(writer.shards, 'shard')}, {counted(writer.tokens, 'token')}"
                    _report(f"{counts}, {writer.owned_tokens} owned, {rate:.0f} tokens/s")
                    told = time.monotonic()
                rows[index] = start()
        now = time.monotonic()
        if now - told >= PROGRESS_SECONDS:
            rate = passed / (now - started)
            _report(f"{writer.waiting} of {counted(size, 'conversation')} of a shard, {rate:.0f} tokens/s")
            told = now
    if not any(rows):  # the prompts have run out: their last answers fill no whole shard
        writer.flush()
        write_manifest(settings.output, made_from, writer)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numbers(written: set[int], count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        if number not in written:
            yield number
        number += 1


def _stored(conversation: Conversation) -> StoredConversation:
    count, width = len(conversation.tokens), len(conversation.hidden[0])
    fed = len(conversation.hidden)
    hidden = np.zeros((count, width), dtype=np.float16)
    top_ids = np.zeros((count, KEPT_TOP), dtype=np.int32)
    top_logprobs = np.full((count, KEPT_TOP), -np.inf, dtype=np.float16)
    hidden[:fed] = conversation.hidden
    top_ids[:fed] = conversation.top_ids
    top_logprobs[:fed] = conversation.top_logprobs
    return StoredConversation(
        conversation.number,
        np.array(conversation.tokens, dtype=np.int32),
        np.array(conversation.owned, dtype=np.bool_),
        hidden,
        top_ids,
        top_logprobs,
    )
