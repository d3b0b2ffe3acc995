"""Self-distillation data: conversations written by the target itself, with what heads are trained on.

A shard is one `.npz`; T tokens of C conversations lie one behind the other:

    numbers [C] int64, lengths [C] int64        conversation ids and token counts
    tokens [T] int32, owned [T] bool            owned: written by the assistant
    hidden [T, H] float16                       final hidden state behind each token (zero behind the last)
    top_ids [T, 8] int32, top_logprobs [T, 8] float16   the target's distribution for the next token
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json
from medusa_engine.runtime.text import Tokenizer
from medusa_engine.training.batch_engine import BatchEngine
from medusa_engine.training.conversation import KEPT_TOP, Conversation, SamplingPolicy, TemplateSegments
from medusa_engine.training.json_file import write_json

MANIFEST_NAME = "data.json"
_SHARD = "shard-{:05d}.npz"


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
        policy = json.loads(json.dumps(asdict(self.policy)))
        return {"max_length": self.max_length, "dtype": self.dtype, "seed": self.seed, "policy": policy}


class ShardWriter:
    """Collects finished conversations and writes them in files that appear complete or not at all."""

    def __init__(self, folder: Path, conversations_per_shard: int) -> None:
        self._folder = folder
        self._size = conversations_per_shard
        self._waiting: list[Conversation] = []
        self.written: set[int] = set()
        self.tokens = self.owned_tokens = 0
        self.shards = 0
        while (path := folder / _SHARD.format(self.shards)).is_file():
            with np.load(path) as shard:
                self._count(shard["numbers"].tolist(), shard["owned"])
            self.shards += 1

    def add(self, conversation: Conversation) -> bool:
        """Keep a finished conversation; True when that completed a shard."""
        self._waiting.append(conversation)
        if len(self._waiting) < self._size:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Write what is waiting; nothing where nothing is."""
        if not self._waiting:
            return
        path = self._folder / _SHARD.format(self.shards)
        partial = path.with_suffix(".partial")
        arrays = _arrays(self._waiting)
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(partial, path)
        self._count(arrays["numbers"].tolist(), arrays["owned"])
        self._waiting.clear()
        self.shards += 1

    def _count(self, numbers: Sequence[int], owned: Any) -> None:
        self.written.update(numbers)
        self.tokens += len(owned)
        self.owned_tokens += int(owned.sum())


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
    settings.output.mkdir(parents=True, exist_ok=True)
    _check_resume(settings, provenance)
    writer = ShardWriter(settings.output, settings.shard_conversations)
    numbers = _numbers(writer.written, None if prompts is None else len(prompts))
    segments = TemplateSegments(tokenizer, settings.policy.turns)

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

    rows: list[Conversation | None] = [start() for _ in range(engine.batch)]
    started, before = time.monotonic(), writer.tokens
    while any(rows) and writer.owned_tokens < settings.owned_tokens:
        tokens = np.array([row.next_token if row else 0 for row in rows])
        positions = np.array([row.position if row else 0 for row in rows])
        result = engine.step(tokens, positions)
        for index, row in enumerate(rows):
            if row is None:
                continue
            row.advance(result.top_ids[index], result.top_logprobs[index], result.hidden[index])
            if row.done:
                if writer.add(row):
                    _write_manifest(settings, provenance, writer)
                    rate = (writer.tokens - before) / (time.monotonic() - started)
                    counts = f"{writer.shards} shards, {writer.tokens} tokens, {writer.owned_tokens} owned"
                    print(f"{counts}, {rate:.0f} tokens/s", file=sys.stderr, flush=True)
                rows[index] = start()
    if not any(rows):  # the prompts have run out: their last answers fill no whole shard
        writer.flush()
        _write_manifest(settings, provenance, writer)


def _numbers(written: set[int], count: int | None) -> Iterator[int]:
    number = 0
    while count is None or number < count:
        if number not in written:
            yield number
        number += 1


def _arrays(conversations: Sequence[Conversation]) -> dict[str, Any]:
    hidden, top_ids, top_logprobs = [], [], []
    for conversation in conversations:
        behind = len(conversation.tokens) - len(conversation.hidden)  # tokens that were not fed
        width = len(conversation.hidden[0])
        hidden += [*conversation.hidden, *np.zeros((behind, width), dtype=np.float16)]
        top_ids += [*conversation.top_ids, *np.zeros((behind, KEPT_TOP), dtype=np.int32)]
        top_logprobs += [*conversation.top_logprobs, *np.full((behind, KEPT_TOP), -np.inf, dtype=np.float16)]
    return {
        "numbers": np.array([conversation.number for conversation in conversations]),
        "lengths": np.array([len(conversation.tokens) for conversation in conversations]),
        "tokens": np.concatenate([np.array(c.tokens, dtype=np.int32) for c in conversations]),
        "owned": np.concatenate([np.array(c.owned, dtype=np.bool_) for c in conversations]),
        "hidden": np.stack(hidden),
        "top_ids": np.stack(top_ids),
        "top_logprobs": np.stack(top_logprobs),
    }


def _check_resume(settings: DistillSettings, provenance: dict[str, Any]) -> None:
    path = settings.output / MANIFEST_NAME
    if not path.exists():
        if any(settings.output.iterdir()):
            raise UserError(f"{settings.output}: holds files, but no {MANIFEST_NAME}", "give an empty output folder")
        return
    document = read_json(path, max_bytes=1 << 20, hint="give another output folder")
    same = isinstance(document, dict) and all(
        document.get(key) == value for key, value in {**provenance, "recipe": settings.recipe()}.items()
    )
    if not same:
        raise UserError(f"{path}: was written with another target or other settings", "give another output folder")


def _write_manifest(settings: DistillSettings, provenance: dict[str, Any], writer: ShardWriter) -> None:
    document = {
        **provenance,
        "recipe": settings.recipe(),
        "shards": writer.shards,
        "conversations": len(writer.written),
        "tokens": writer.tokens,
        "owned_tokens": writer.owned_tokens,
    }
    write_json(settings.output / MANIFEST_NAME, document, indent=2)
