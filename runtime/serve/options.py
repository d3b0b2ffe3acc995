"""How a server behaves, checked where it enters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.policy import GREEDY
from medusa_engine.runtime.strict_json import shown

if TYPE_CHECKING:
    from medusa_engine.runtime.tree import Tree

_MOST_SESSIONS = 1024
_MOST_QUEUED = 1 << 20
_MOST_BODY_BYTES = 1 << 30


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server.

    Attributes:
        model_name: of the model in requests and answers.
        sessions: caches; as many answers are written at once.
        max_queue: requests that may wait for a session; one more is refused.
        max_body_bytes: of one request.
        deadline_ms: most milliseconds of one answer, from its first pass; None for no limit.
        api_key: that requests have to bring; None asks for none.
        tree: another tree than the bundle's.
        speculation: False decodes plainly.
        adaptive: False verifies the bundle's first tree in every round.
        acceptance: policy of requests that do not choose one.
        parameters: of that policy, those that are not its defaults.

    Raises:
        UserError: a value out of range; names it.
    """

    model_name: str
    sessions: int = 2
    max_queue: int = 32
    max_body_bytes: int = 1 << 20
    deadline_ms: float | None = None
    api_key: str | None = field(default=None, repr=False)
    tree: Tree | None = None
    speculation: bool = True
    adaptive: bool = True
    acceptance: str = GREEDY
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least, most in (
            ("sessions", 1, _MOST_SESSIONS),
            ("max_queue", 0, _MOST_QUEUED),
            ("max_body_bytes", 1, _MOST_BODY_BYTES),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise WrongValueError(name, shown(value), f"give a whole number from {least} to {most}")
        if self.deadline_ms is not None and not self.deadline_ms / 1000 > 0:  # NaN is not
            raise WrongValueError("deadline_ms", shown(self.deadline_ms), "give a time above 0")
        if not self.model_name:
            raise UserError("the served model name is empty", "give at least one character")
        if self.api_key is not None and not self.api_key:
            raise UserError("the API key is empty", "give a key of at least one character, or none")
