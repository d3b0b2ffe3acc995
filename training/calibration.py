"""The calibration file: what the heads of an engine, and lookup, were seen to get right, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from medusa_engine.runtime.chat_template import TEMPLATE_FILE
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Limits, document_sha256
from medusa_engine.runtime.strict_json import read_json, shown
from medusa_engine.runtime.text import CONFIG_FILE, TOKENIZER_FILE
from medusa_engine.runtime.tree import MOST_LOOKUP
from medusa_engine.training.json_file import write_json
from medusa_engine.training.lookup_hits import LookupCounts, Lookups, look_ups, lookup_counts
from medusa_engine.training.tree_search import END, Hits, Ranks, labelled, rank_counts

FORMAT = "medusa-calibration"
FORMAT_VERSION = 1
MAX_BYTES = 1 << 28
_HINT = "write it with medusa-tree calibrate"


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        prompt_ids: what was asked.
        ranks: [T, K], a rank vector for each of its T tokens; see `tree_search`.
        token_ids: the T tokens and up to K more, which its last vectors have as labels; None in files that were written
            before there was lookup.
    """

    prompt_ids: list[int]
    ranks: Ranks
    token_ids: list[int] | None = None

    @cached_property
    def lookups(self) -> Lookups | None:
        """What lookup gets right; None without the tokens."""
        return None if self.token_ids is None else look_ups(self.prompt_ids, self.token_ids, len(self.ranks))

    @property
    def hits(self) -> Hits:
        """What is right behind each token."""
        return Hits.of_heads(self.ranks) if self.lookups is None else Hits(self.ranks, self.lookups.runs)


@dataclass(frozen=True)
class Calibration:
    """What the heads of an engine, and lookup, were seen to do.

    Attributes:
        provenance: hashes of model, heads, tokenizer, template, prompts and policy, and the policy itself.
        topk: ranks each head offers.
        max_tree_nodes: nodes of the largest tree that the calibrated engine runs, root included.
        answers: at least one, none empty.
        lookup: lookup nodes that the engine offers; None where the answers have no tokens to look up.
    """

    provenance: dict[str, Any]
    topk: int
    max_tree_nodes: int
    answers: list[Answer]
    lookup: int | None = None

    @property
    def heads(self) -> int:
        """K, the heads that were looked at: those that a tree of the engine can use."""
        return self.answers[0].ranks.shape[1]

    @property
    def sequences(self) -> list[Hits]:
        """What is right in each answer."""
        return [answer.hits for answer in self.answers]

    @cached_property
    def ranks(self) -> Ranks:
        """All rank vectors [positions, K]."""
        return np.concatenate([answer.ranks for answer in self.answers])

    def lookup_counts(self) -> LookupCounts | None:
        """How often lookup is right; None where the answers have no tokens."""
        lookups = [answer.lookups for answer in self.answers if answer.lookups is not None]
        return lookup_counts(lookups) if lookups else None

    def save(self, path: Path) -> None:
        """Write the file, in the form that `load_calibration` reads.

        Raises:
            UserError: the system refuses.
        """
        document: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "provenance": self.provenance,
            "heads": self.heads,
            "topk": self.topk,
            "max_tree_nodes": self.max_tree_nodes,
            "positions": labelled(self.ranks).tolist(),
            "counts": rank_counts(self.ranks, self.topk).tolist(),
            "answers": [{"prompt_ids": answer.prompt_ids, "ranks": answer.ranks.tolist()} for answer in self.answers],
        }
        counts = self.lookup_counts()
        if counts is not None:
            document["lookup"] = {"offered": self.lookup, **counts._asdict()}
            for entry, answer in zip(document["answers"], self.answers, strict=True):
                entry["token_ids"] = answer.token_ids
        write_json(path, document)


MOST = 1 << 16  # heads, ranks or nodes of an engine
MOST_TOKEN = 1 << 31


def load_calibration(path: Path) -> Calibration:
    """Read what `Calibration.save` wrote.

    Raises:
        UserError: not such a file, or damaged: a value of the wrong kind, or counts that are not those of its answers.
    """
    document = read_json(path, max_bytes=MAX_BYTES, hint=_HINT)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: not a calibration", _HINT)
    if document.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: format version {document.get('format_version')} is not {FORMAT_VERSION}", _HINT)
    sizes = [document.get(name) for name in ("heads", "topk", "max_tree_nodes")]
    offered, answers = _offered(document.get("lookup"), path), document.get("answers")
    if not isinstance(document.get("provenance"), dict) or not all(type(size) is int and size >= 0 for size in sizes):
        raise UserError(f"{path}: damaged: provenance or sizes are missing", _HINT)
    heads, topk, max_tree_nodes = sizes
    if (not heads and offered is None) or not topk or not max_tree_nodes or max(sizes) > MOST:
        raise UserError(
            f"{path}: damaged: {counted(heads, 'head')}, {counted(topk, 'rank')}, {counted(max_tree_nodes, 'node')}",
            _HINT,
        )
    if not isinstance(answers, list) or not answers:
        raise UserError(f"{path}: damaged: there are no answers", _HINT)
    loaded = Calibration(
        document["provenance"],
        topk,
        max_tree_nodes,
        [
            _answer(answer, heads, topk, offered is not None, f"{path}: damaged: answer {index}")
            for index, answer in enumerate(answers)
        ],
        offered,
    )
    counts, positions = rank_counts(loaded.ranks, topk).tolist(), labelled(loaded.ranks).tolist()
    if document.get("counts") != counts or document.get("positions") != positions:
        raise UserError(f"{path}: damaged: the counts are not those of the answers", _HINT)
    looked_up = loaded.lookup_counts()
    if looked_up is not None and document["lookup"] != {"offered": offered, **looked_up._asdict()}:
        raise UserError(f"{path}: damaged: the counts of lookup are not those of the answers", _HINT)
    return loaded


def _offered(lookup: object, path: Path) -> int | None:
    """Lookup nodes of the engine; None in files without lookup."""
    if lookup is None:
        return None
    offered = lookup.get("offered") if isinstance(lookup, dict) else None
    if type(offered) is not int or not 0 <= offered <= MOST_LOOKUP:
        raise UserError(f"{path}: damaged: of lookup, offered is {shown(offered)}", _HINT)
    return offered


def _answer(answer: object, heads: int, topk: int, has_tokens: bool, where: str) -> Answer:
    entry = answer if isinstance(answer, dict) else {}
    prompt, ranks, tokens = entry.get("prompt_ids"), entry.get("ranks"), entry.get("token_ids")
    if not _is_tokens(prompt) or not prompt:
        raise UserError(f"{where} has no prompt_ids", _HINT)
    if not isinstance(ranks, list) or not ranks:
        raise UserError(f"{where} has no ranks", _HINT)
    for vector in ranks:
        whole = isinstance(vector, list) and len(vector) == heads
        if not whole or not all(type(rank) is int and END <= rank < topk for rank in vector):
            raise UserError(f"{where} has a rank vector that is not {counted(heads, 'rank')} below {topk}", _HINT)
    if has_tokens and (not _is_tokens(tokens) or not len(ranks) <= len(tokens) <= len(ranks) + heads):
        raise UserError(f"{where} has no token_ids that go with its ranks", _HINT)
    return Answer(prompt, np.array(ranks, dtype=np.int64), tokens if has_tokens else None)


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < MOST_TOKEN for token in value)


def usable_heads(limits: Limits) -> int:
    """Heads that a tree of the engine can use: a path of d edges takes d nodes besides the root."""
    return min(limits.heads, limits.max_tree_nodes - 1)


def engine_provenance(engine: Engine, *, chat: bool, max_new_tokens: int, prompts_sha256: str) -> dict[str, Any]:
    """Hashes that say which engine was calibrated, and on what."""
    files = {name: facts["sha256"] for name, facts in engine.manifest.files.items()}
    has_template = engine.tokenizer is not None and engine.tokenizer.has_chat_template
    policy = {"acceptance": "greedy", "chat": chat, "max_new_tokens": max_new_tokens}
    return {
        "model": dict(engine.manifest.model),
        "heads": dict(engine.manifest.heads),
        "tokenizer_sha256": files.get(TOKENIZER_FILE),
        "template_sha256": files.get(TEMPLATE_FILE, files.get(CONFIG_FILE)) if has_template else None,
        "prompts_sha256": prompts_sha256,
        "policy": policy,
        "policy_sha256": document_sha256(policy),
    }


def check_calibrated(calibration: Calibration, engine: Engine, path: Path) -> None:
    """Refuse a calibration that was not made with this engine's model and heads.

    Raises:
        UserError: names what differs.
    """
    provenance, manifest, limits = calibration.provenance, engine.manifest, engine.limits
    hint = f"calibrate this engine: medusa-tree calibrate --engine {manifest.name} ..."
    if not _same_weights(provenance.get("model"), manifest.model):
        raise UserError(f"{path}: was calibrated with another model than {manifest.name} has", hint)
    if not _same_weights(provenance.get("heads"), manifest.heads):
        raise UserError(f"{path}: was calibrated with other heads than {manifest.name} has", hint)
    if calibration.topk != limits.topk:
        raise UserError(
            f"{path}: has {counted(calibration.topk, 'rank')} per head, but the engine keeps {limits.topk}", hint
        )
    if calibration.heads != usable_heads(limits):
        raise UserError(
            f"{path}: has {counted(calibration.heads, 'head')}, but the engine has {usable_heads(limits)}", hint
        )


def _same_weights(calibrated: object, exported: Mapping[str, Any]) -> bool:
    """Whether facts about weights are of the same ones: files may have other names, and later exports tell more."""
    if not isinstance(calibrated, Mapping):
        return False
    hashes = [
        {name: sorted(value.values()) for name, value in facts.items() if isinstance(value, Mapping)}
        for facts in (calibrated, exported)
    ]
    known = (calibrated.keys() & exported.keys()) - hashes[0].keys() - {"name", "source"}
    return hashes[0] == hashes[1] and all(calibrated[name] == exported[name] for name in known)
