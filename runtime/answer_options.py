"""What a caller may ask of one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:  # a command line reads the defaults below before it loads anything
    from medusa_engine.runtime.policy import AcceptancePolicy
    from medusa_engine.runtime.tree import Tree

DEFAULT_MAX_NEW_TOKENS = 256

Message = Mapping[str, str]


class AnswerOptions(TypedDict, total=False):
    """Keyword arguments of `Session.stream`, which describes them, for what passes them on."""

    prompt_ids: Sequence[int] | None
    max_new_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    deadline: float | None
    speculation: bool
    tree: Tree | None
    adaptive: bool
    acceptance: AcceptancePolicy | None
