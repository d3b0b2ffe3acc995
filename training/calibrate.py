"""Run an exported engine on prompts and note at which rank each head lists what the target goes on to publish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.runtime.rounds import Decoding, TreePlan
from medusa_engine.runtime.strict_json import read_json
from medusa_engine.runtime.tree import Tree
from medusa_engine.training.json_file import write_json
from medusa_engine.training.tree_search import MISS, Ranks

FORMAT = "medusa-calibration"
FORMAT_VERSION = 1
_HINT = "write it with medusa-tree calibrate"


@dataclass(frozen=True)
class Calibration:
    """What the heads of an engine were seen to do.

    Attributes:
        provenance: hashes of model, heads, template and prompts, and the decoding policy.
        topk: ranks each head offers.
        sequences: per answer the rank vectors [T, K]; MISS where a head lists the token at no rank.
    """

    provenance: dict[str, Any]
    topk: int
    sequences: list[Ranks]

    @property
    def ranks(self) -> Ranks:
        """All rank vectors [positions, K] whose every label is known."""
        return np.concatenate(self.sequences)

    def save(self, path: Path) -> None:
        counts = [[int((self.ranks[:, head] == rank).sum()) for rank in range(self.topk)] for head in range(self.heads)]
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "provenance": self.provenance,
            "topk": self.topk,
            "positions": len(self.ranks),
            "counts": counts,
            "sequences": [ranks.tolist() for ranks in self.sequences],
        }
        write_json(path, document)

    @property
    def heads(self) -> int:
        return self.sequences[0].shape[1]


def load_calibration(path: Path) -> Calibration:
    """Read what `Calibration.save` wrote.

    Raises:
        UserError: not such a file.
    """
    document = read_json(path, max_bytes=1 << 28, hint=_HINT)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: not a calibration", _HINT)
    if document.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: format version {document.get('format_version')} is not {FORMAT_VERSION}", _HINT)
    try:
        topk = int(document["topk"])
        sequences = [np.array(ranks, dtype=np.int64) for ranks in document["sequences"]]
        whole = all(
            ranks.ndim == 2 and len(ranks) and ranks.min() >= MISS and ranks.max() < topk for ranks in sequences
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: damaged: {error}", _HINT) from error
    if not sequences or not whole or len({ranks.shape[1] for ranks in sequences}) != 1:
        raise UserError(f"{path}: damaged: the rank vectors do not fit together", _HINT)
    return Calibration(document.get("provenance", {}), topk, sequences)


def calibrate(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    provenance: dict[str, Any],
    progress: Callable[[int], None],
) -> Calibration:
    """Answer every prompt greedily, one token per pass, and compare every head's ranks with what came.

    Args:
        prompts: token ids.
        provenance: kept in the calibration.
        progress: called with the number of answers done.
    """
    sequences = []
    for index, prompt in enumerate(prompts):
        sequences.append(_ranks_of_answer(engine, prompt, max_new_tokens))
        progress(index + 1)
    return Calibration(provenance, engine.limits.topk, [ranks for ranks in sequences if len(ranks)])


def engine_provenance(folder: Path, engine: Engine) -> dict[str, Any]:
    """Hashes that say which engine was calibrated."""
    files = engine.manifest.files
    template = folder / "chat_template.jinja"
    return {
        "model": dict(engine.manifest.model),
        "heads": dict(engine.manifest.heads),
        "tokenizer_sha256": files["tokenizer.json"]["sha256"] if "tokenizer.json" in files else None,
        "template_sha256": file_sha256(template) if template.is_file() else None,
        "policy": "greedy",
    }


def _ranks_of_answer(engine: Engine, prompt: list[int], max_new_tokens: int) -> Ranks:
    """Rank vectors [T, K]: entry t for the state behind token t-1, whose root is token t.

    The last K tokens of the answer have no vector of their own, since not all of its labels are known.
    """
    limits = engine.limits
    engine.backend.load(speculation=True)
    state = engine.backend.new_state()
    slots = [(0,) * depth + (rank,) for depth in range(limits.heads) for rank in range(limits.topk)]
    plan = TreePlan(Tree(tuple(slots), "every candidate"), limits, verified_rows=1)  # rows in slot order
    decoding = Decoding(
        state,
        limits,
        prompt,
        plan=plan,
        max_new_tokens=max_new_tokens + limits.heads,
        stop_ids=engine.stop_token_ids,
    )
    tokens: list[int] = []
    candidates: list[Any] = []  # [t]: what the pass that published token t proposed behind it
    for round_ in decoding:
        tokens += round_.token_ids
        candidates.append(state.proposed()[1:].reshape(limits.heads, limits.topk))
    vectors = []
    for index in range(1, len(tokens) - limits.heads):
        wanted = np.array(tokens[index + 1 : index + 1 + limits.heads])
        hits = candidates[index - 1] == wanted[:, None]  # [K, TOPK]
        vectors.append(np.where(hits.any(axis=1), hits.argmax(axis=1), MISS))
    return np.array(vectors, dtype=np.int64).reshape(-1, limits.heads)
