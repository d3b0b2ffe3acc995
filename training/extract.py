"""Hidden states of given examples, computed once: the frozen backbone reads each with one forward pass."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_engine.exporter.round import RowProjection
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.example import Example
from medusa_engine.training.shards import KEPT_TOP, ShardWriter, StoredConversation, claim_folder, write_manifest

SHARD_CONVERSATIONS = 64
_LOGITS_PER_PASS = 1 << 27  # float32: half a gigabyte


def extract_features(
    model: Any,
    examples: Sequence[Example],
    folder: Path,
    *,
    provenance: Mapping[str, Any],
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    batch: int = 64,
    report: Callable[[str], None],
) -> None:
    """Write feature shards (shards.py) of the examples; example i is conversation i. An interrupted run goes on.

    Args:
        model: a causal LM as `exporter.checkpoint.load_model` returns it; it is changed and cannot be used on.
        examples: at least one, with at least one token each.
        folder: of the data.
        provenance: JSON values for the manifest: what model and examples come from.
        dtype: of `device.DTYPES`: weights and arithmetic.
        device: where the model runs.
        batch: examples per forward pass at most; fewer where their logits would need much memory.
        report: called with one line of progress per shard.

    Raises:
        UserError: the folder holds data of other examples, another model or dtype, or the hidden states do not fit
            float16.
    """
    made_from = {**provenance, "recipe": {"dtype": dtype, "examples_sha256": _digest(examples)}}
    claim_folder(folder, made_from)
    writer = ShardWriter(folder, SHARD_CONVERSATIONS)
    reader = _Reader(model, dtype, device)
    missing = [number for number in range(len(examples)) if number not in writer.written]
    started, before = time.monotonic(), writer.tokens
    for start in range(0, len(missing), SHARD_CONVERSATIONS):
        numbers = missing[start : start + SHARD_CONVERSATIONS]
        stored: dict[int, StoredConversation] = {}
        for part in _batches(numbers, examples, batch, reader.vocab_size):
            stored |= reader.read({number: examples[number] for number in part})
        for number in numbers:
            writer.add(stored[number])
        writer.flush()
        write_manifest(folder, made_from, writer)
        rate = (writer.tokens - before) / (time.monotonic() - started)
        done = f"{len(writer.written)} of {counted(len(examples), 'conversation')}"
        report(f"{done}, {counted(writer.tokens, 'token')}, {rate:.0f} tokens/s")


def _digest(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.int64(len(example.tokens)).tobytes())
        digest.update(example.tokens.astype(np.int64).tobytes())
        digest.update(example.owned.astype(np.bool_).tobytes())
    return digest.hexdigest()


def _batches(numbers: Sequence[int], examples: Sequence[Example], batch: int, vocab_size: int) -> Iterator[list[int]]:
    """Numbers of similar length, few enough for one pass."""
    part: list[int] = []
    for number in sorted(numbers, key=lambda number: len(examples[number].tokens)):
        logits = (len(part) + 1) * len(examples[number].tokens) * vocab_size  # this one is the longest so far
        if part and (len(part) == batch or logits > _LOGITS_PER_PASS):
            yield part
            part = []
        part.append(number)
    if part:
        yield part


class _Reader:
    """The backbone, and what it says behind every token of a batch of examples."""

    def __init__(self, model: Any, dtype: str, device: str | torch.device) -> None:
        config = model.config.get_text_config()
        # The fused attention of torch has no soft cap.
        model.set_attn_implementation("eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa")
        self.vocab_size: int = config.vocab_size
        self._projection = RowProjection(model.get_output_embeddings())
        model.set_output_embeddings(self._projection)
        self._model = model.to(dtype=getattr(torch, dtype), device=device).eval()
        self._device = device

    def read(self, examples: Mapping[int, Example]) -> dict[int, StoredConversation]:
        """One forward pass; the padding, at the right, is told by length."""
        lengths = torch.tensor([len(example.tokens) for example in examples.values()])
        input_ids = torch.zeros(len(examples), int(lengths.max()), dtype=torch.int64)  # [B, T]
        for row, example in enumerate(examples.values()):
            input_ids[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
        mask = torch.arange(input_ids.shape[1]) < lengths[:, None]  # [B, T]
        with torch.inference_mode():
            logits = self._model(
                input_ids=input_ids.to(self._device),
                attention_mask=mask.to(self._device, torch.int64),
                use_cache=False,
            ).logits  # [B, T, V]
            top = logits.topk(KEPT_TOP, dim=-1)
            top_logprobs = top.values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
            hidden = self._projection.rows.half().reshape(*input_ids.shape, -1)  # [B, T, H]
        states, ids, logprobs = (part.cpu().numpy() for part in (hidden, top.indices, top_logprobs.half()))
        found: dict[int, StoredConversation] = {}
        for row, (number, example) in enumerate(examples.items()):
            end = len(example.tokens)
            if not np.isfinite(states[row, :end]).all():
                raise UserError(
                    f"hidden states of conversation {number} are not finite in float16",
                    "give --dtype float32; if that does not help, the model cannot be used",
                )
            found[number] = StoredConversation(
                number,
                example.tokens.astype(np.int32),
                example.owned,
                states[row, :end],
                ids[row, :end].astype(np.int32),
                logprobs[row, :end],
            )
        return found
