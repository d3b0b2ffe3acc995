"""Acceptance in torch: which path of a tree a round publishes. References: runtime/accept.py, posterior.py."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Paths(NamedTuple):
    """The paths of a packed tree.

    Attributes:
        rows: [paths, D+1] packed rows, 0 in place of the padding: -1 never reaches a gather.
        tokens: [paths, D+1] their tokens.
        valid: [paths, D+1] bool, False in the padding.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    valid: torch.Tensor

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """[N] values by packed row -> [paths, D+1]."""
        return values.index_select(0, self.rows.reshape(-1)).view_as(self.rows)


class AcceptedPath(NamedTuple):
    """A path of the tree and how far it is accepted.

    Attributes:
        rows: [D+1] its packed rows, 0 in place of the padding.
        tokens: [D+1] their tokens.
        length: [1] int64, G: so many of them are accepted, the root included.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    length: torch.Tensor

    @property
    def winning_row(self) -> torch.Tensor:
        """[1]: the packed row of the last one."""
        return self.rows.index_select(0, self.length - 1)


def paths_of(tokens: torch.Tensor, retrieve_indices: torch.Tensor) -> Paths:
    """The paths of packed tokens [N] and `retrieve_indices` [paths, D+1]."""
    rows = retrieve_indices.clamp(min=0)
    return Paths(rows, tokens.index_select(0, rows.reshape(-1)).view_as(rows), retrieve_indices >= 0)


def accept_tokens(paths: Paths, chosen: torch.Tensor) -> AcceptedPath:
    """The longest path whose every token is what the target chose at its parent row: its argmax, or a token drawn.

    Args:
        chosen: [N] the target's token by packed row.
    """
    return accept_passed(paths, paths.tokens[:, 1:] == paths.by_row(chosen)[:, :-1])


def accept_likely(paths: Paths, likely: torch.Tensor, threshold: torch.Tensor) -> AcceptedPath:
    """The longest path whose every token is likelier than the threshold of its parent row; ties, the likeliest path.

    Args:
        likely: [paths, D] the target's probability of each token behind the root.
        threshold: [N] by packed row.
    """
    return accept_passed(paths, likely > paths.by_row(threshold)[:, :-1], likely)


def accept_passed(paths: Paths, passed: torch.Tensor, likely: torch.Tensor | None = None) -> AcceptedPath:
    """The path with the most edges passed from the root on; of equals the likeliest, then the first.

    Args:
        passed: [paths, D] bool, anything in the padding.
        likely: [paths, D] probabilities, above 0 where passed.
    """
    misses = (~(passed & paths.valid[:, 1:])).to(torch.int32).cumsum(dim=1, dtype=torch.int32)
    accepted = (misses == 0).to(torch.int32).sum(dim=1, dtype=torch.int32)  # [paths]: a of each path
    if likely is None:
        best = accepted.argmax(dim=0, keepdim=True)  # [1]
    else:
        score = torch.where(misses == 0, likely, 1.0).log().sum(dim=1)  # [paths]
        best = torch.where(accepted == accepted.amax(dim=0), score, -torch.inf).argmax(dim=0, keepdim=True)
    length = accepted.index_select(0, best).to(torch.int64) + 1  # [1]
    return AcceptedPath(paths.rows.index_select(0, best)[0], paths.tokens.index_select(0, best)[0], length)
