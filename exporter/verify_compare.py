"""One pass of an engine against the checkpoint: what differs first, and whether that is a near-tie or a fault.

In the order in which a pass computes: logits of every row, the tokens it chose, the rows it accepted, the cache it
left, the drafts it proposed. There is one tolerance: logits and cache values may differ by that share of the largest
magnitude in their row (cache: their layer), and a token may be another one only where the checkpoint's own logits of
the two are no further apart than that: a near-tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.exporter.verify_difference import Compared, Difference
from medusa_engine.exporter.verify_passes import Pass, path_of
from medusa_engine.exporter.verify_reference import Reference, Rows
from medusa_engine.runtime.accept import accept_greedy
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.manifest import Limits

Floats = npt.NDArray[np.float32]


def compare_pass(
    seen: Pass, reference: Reference, limits: Limits, *, before: Sequence[int], tolerance: float
) -> Compared:
    """Compare a pass, and let the reference follow: its cache holds what the engine published.

    Args:
        reference: its cache holds the tokens before this pass; of the prompt, all tokens.
        before: these tokens, of the prompt without its last.
    """
    rows = _reference_rows(seen, reference)
    judged = _Judged(seen, rows, limits, before, tolerance)
    errors = judged.errors()
    compared = (
        (0, None, None) if errors is None else (len(errors), float(errors.max()), float((errors / judged.scale).max()))
    )
    wrong = judged.wrong_logits(errors)
    impossible = judged.impossible_path()
    if impossible:  # nothing tells what its cache should hold
        return Compared([wrong or impossible], *compared)
    if seen.number > 0:
        reference.extend(seen.published.tokens.tolist())
    cache_error, wrong_cache = judged.wrong_cache(reference.cache())
    if wrong:
        where = f"first in the cache: {wrong_cache.reason}" if wrong_cache else "the cache is right"
        return Compared([replace(wrong, reason=f"{wrong.reason}; {where}")], *compared, cache_error)
    differences = judged.wrong_choice()
    near_ties = 0
    if wrong_cache and not any(difference.fault for difference in differences):
        differences.append(wrong_cache)
    elif not differences:
        near_ties, wrong_draft = judged.wrong_draft(reference) if reference.has_heads else (0, None)
        wrong_draft = judged.wrong_lookup() or wrong_draft
        differences += [wrong_draft] if wrong_draft else []
    return Compared(differences, *compared, cache_error, near_ties)


def _reference_rows(seen: Pass, reference: Reference) -> Rows:
    """The checkpoint's rows for the packed rows of a pass; the prompt's were computed when its cache was filled."""
    if seen.number == 0:
        assert reference.last is not None
        return reference.last
    return reference.tree(seen.tokens, seen.tree)


class _Judged:
    """A pass, the checkpoint's rows beside it, and the questions asked of them in turn."""

    def __init__(self, seen: Pass, rows: Rows, limits: Limits, before: Sequence[int], tolerance: float) -> None:
        self._seen = seen
        self._rows = rows
        self._limits = limits
        self._before = list(before)
        self._held = len(self._before)
        self._tolerance = tolerance
        self._path: list[int] = seen.pending_rows.tolist()
        self._room = limits.max_length - self._held  # tokens that may still be published
        self.scale = np.maximum(np.abs(rows.logits).max(axis=-1), 1e-9)  # [N]: the largest logit of each row

    def errors(self) -> npt.NDArray[Any] | None:
        """[N] largest error of each row's logits; NaN where one is."""
        if self._seen.logits is None:
            return None
        return np.abs(self._seen.logits.astype(np.float32) - self._rows.logits).max(axis=-1)

    def wrong_logits(self, errors: npt.NDArray[Any] | None) -> Difference | None:
        """The first row whose logits are beyond the tolerance."""
        if errors is None or self._seen.logits is None:
            return None
        wrong = np.flatnonzero(~(errors <= self._tolerance * self.scale))  # NaN is wrong
        if not len(wrong):
            return None
        row = int(wrong[0])
        got, expected = self._seen.logits[row], self._rows.logits[row]
        token = int(np.abs(got - expected).argmax())
        reason = (
            f"logit of token {token} is {got[token]:.4f} instead of {expected[token]:.4f}, off by"
            f" {abs(got[token] - expected[token]) / self.scale[row]:.1e} of the row's largest;"
            f" wrong rows: {_listed(wrong)} of {len(errors)}"
        )
        return self._difference("logits", row, reason, engine_token=int(got.argmax()))

    def impossible_path(self) -> Difference | None:
        """What the engine says of its own path and counts, where that does not fit the tree."""
        seen, path = self._seen, self._path
        reason = ""
        if not 1 <= len(path) <= min(self._room, len(seen.tokens)) or seen.published.past_length != self._held:
            reason = (
                f"{counted(len(path), 'token')} published behind {seen.published.past_length} in the cache;"
                f" {counted(self._held, 'token')} came before, and there is room for {self._room}"
            )
        elif not any(path == entry[: len(path)].tolist() for entry in seen.tree.retrieve_indices):
            reason = f"the accepted rows {path} are no path of the tree"
        elif seen.published.tokens.tolist() != seen.tokens[path].tolist():
            carried = seen.tokens[path].tolist()
            reason = f"rows {path} carry {carried}, but {seen.published.tokens.tolist()} is published"
        return self._difference("acceptance", 0, reason) if reason else None

    def wrong_choice(self) -> list[Difference]:
        """The first token on the engine's path that is not the checkpoint's; else whether the path ends too early."""
        seen, path, chosen = self._seen, self._path, self._rows.logits.argmax(axis=-1)
        ends = len(path) == self._room  # the answer ends here: what would come next is not told
        choices = [*seen.published.tokens[1:].tolist(), *([] if ends else [int(seen.proposed[0])])]
        for row, token in zip(path, choices, strict=False):
            if token == chosen[row]:
                continue
            margin = float(self._rows.logits[row, chosen[row]] - self._rows.logits[row, token])
            fault = not margin <= self._tolerance * self.scale[row]
            reason = f"token {token} was chosen instead of {chosen[row]}"
            return [self._difference("token", row, reason, engine_token=token, fault=fault)]
        expected = accept_greedy(seen.tokens, chosen, seen.tree.retrieve_indices)
        if len(path) >= min(expected.published_count, self._room):
            return []
        row, accepted = path[-1], int(expected.path_rows[len(path)])
        reason = (
            f"{counted(len(path), 'token')} published instead of {expected.published_count}: row {accepted} carries the"
            f" token {chosen[row]} that is chosen behind row {row}"
        )
        return [self._difference("acceptance", row, reason)]

    def wrong_cache(self, expected: Mapping[str, npt.NDArray[Any]]) -> tuple[float, Difference | None]:
        """The largest error of committed and pending rows, and the first layer and row beyond the tolerance."""
        seen = self._seen
        past_length = seen.published.past_length
        rows = np.concatenate([np.arange(past_length), past_length + seen.pending_rows])
        most, first = 0.0, None
        for layer in range(self._limits.layers):
            for kind in ("key", "value"):
                name = f"{kind}.{layer}"
                values = expected[name]
                if values.shape[2] != len(rows) or rows.max() >= self._limits.cache_rows:
                    reason = f"the cache holds {counted(len(rows), 'row')} for {counted(values.shape[2], 'token')}"
                    return most, self._difference("cache", 0, reason)
                got = seen.cache[name][:, :, rows].astype(np.float32)
                scale = max(float(np.abs(values).max()), 1e-9)
                errors = np.abs(got - values).max(axis=(0, 1, 3)) / scale  # [tokens]
                most = float(np.fmax(most, errors.max())) if np.isfinite(errors).all() else float("inf")
                wrong = np.flatnonzero(~(errors <= self._tolerance))
                if first is None and len(wrong):
                    first = self._wrong_cache_row(name, rows, wrong, float(errors[wrong[0]]))
        return most, first
        return most, first

    def _wrong_cache_row(self, name: str, rows: npt.NDArray[Any], wrong: npt.NDArray[Any], error: float) -> Difference:
        token = int(wrong[0])
        kind, layer = name.split(".")
        pending = token - self._seen.published.past_length
        reason = (
            f"{kind} of layer {layer} in cache row {int(rows[token])}, of token {token}, is off by {error:.1e} of the"
            f" layer's largest; wrong: {_listed(wrong)} of {counted(len(rows), 'token')}"
        )
        row = int(self._seen.pending_rows[pending]) if pending >= 0 else 0
        return self._difference("cache", row, reason, position=token)

    def wrong_draft(self, reference: Reference) -> tuple[int, Difference | None]:
        """How many drafts of the heads are others at a near-tie, and the first that is wrong."""
        seen, topk = self._seen, self._limits.topk
        if seen.next_tree is None or len(seen.proposed) < 2:
            return 0, None
        winner = int(seen.pending_rows[-1])
        ranked, logits = reference.drafts(self._rows.hidden[winner], topk)
        near_ties = 0
        for place, slot in enumerate(seen.next_tree.tree_indices.tolist()):
            if slot == 0 or slot > self._limits.heads * topk:  # the root, or looked up
                continue
            head, rank = divmod(slot - 1, topk)
            token, expected = int(seen.proposed[place]), int(ranked[head, rank])
            if token == expected:
                continue
            limit = self._tolerance * float(np.abs(logits[head][np.isfinite(logits[head])]).max())
            if abs(float(logits[head, expected] - logits[head, token])) <= limit:
                near_ties += 1
                continue
            path = path_of(seen.next_tree, place, topk=topk, heads=self._limits.heads)
            reason = (
                f"head {head} lists token {token} at rank {rank} instead of {expected}, for row {place}, path"
                f" {list(path)}, of the next tree"
            )
            return near_ties, self._difference("draft", winner, reason)
        return near_ties, None

    def wrong_lookup(self) -> Difference | None:
        """The first lookup node of the next tree that does not hold what the context says."""
        seen, of_heads = self._seen, self._limits.heads * self._limits.topk
        if seen.next_tree is None or len(self._path) == self._room:  # the answer ends here
            return None
        context = [*self._before, *seen.published.tokens.tolist(), int(seen.proposed[0])]
        expected = lookup_tokens(context, max(1, self._limits.lookup))
        for place, slot in enumerate(seen.next_tree.tree_indices.tolist()):
            if slot <= of_heads or int(seen.proposed[place]) == expected[slot - of_heads - 1]:
                continue
            reason = (
                f"lookup gives token {int(seen.proposed[place])} at depth {slot - of_heads} instead of"
                f" {int(expected[slot - of_heads - 1])}, for row {place} of the next tree"
            )
            return self._difference("draft", self._path[-1], reason)
        return None

    def _difference(
        self,
        kind: str,
        row: int,
        reason: str,
        *,
        engine_token: int | None = None,
        fault: bool = True,
        position: int | None = None,
    ) -> Difference:
        expected = self._rows.logits[row]
        second, best = (int(token) for token in np.argsort(expected)[-2:])
        other = second if engine_token in (None, best) else int(engine_token)
        pair = [other, best]
        engine_logits = None
        if self._seen.logits is not None:
            engine_logits = tuple(float(value) for value in self._seen.logits[row, pair])
        at = self._held + int(self._seen.tree.position_offsets[row]) if position is None else position
        return Difference(
            kind=kind,
            fault=fault,
            round=self._seen.number,
            row=row,
            path=path_of(self._seen.tree, row, topk=self._limits.topk, heads=self._limits.heads),
            position=at,
            reason=reason,
            engine_token=other,
            reference_token=best,
            engine_logits=engine_logits,
            reference_logits=(float(expected[other]), float(expected[best])),
            margin=float(expected[best] - expected[other]),
            near_tie_margin=float(self._tolerance * self.scale[row]),
        )


def _listed(rows: npt.NDArray[Any], most: int = 8) -> str:
    shown = ", ".join(str(int(row)) for row in rows[:most])
    return shown + (", ..." if len(rows) > most else "")
