"""How large a value of a chat template is, everything in it counted as often as it is reached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

MOST_WEIGHT = 1 << 22  # characters of a value, so that whatever is done with it once ends soon
MOST_DEPTH = 100  # of lists in lists: what Python does with them recurses
ELEMENT = 128  # what an element counts, in characters
_MOST_BITS = 60  # numbers that are larger can be made to collide in mappings


class Weights:
    """Weighs values that do not change: the sandbox changes none.

    Each list and mapping is weighed once, and held until the end of the rendering, as others may take its id.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int, Any]] = {}  # by id: characters, depth, the value

    def weigh(self, value: Any) -> int:
        """Characters that a value stands for; an element of a list or a mapping is worth `ELEMENT` of them.

        Raises:
            SecurityError: it is more than `MOST_WEIGHT`, nested too deeply, or of a kind that no template needs.
        """
        if type(value) is str:  # most are
            return self.checked(len(value))
        return self._weigh(value)[0]

    def _weigh(self, value: Any, outside: int = 0) -> tuple[int, int]:
        """Characters and depth of a value that lies `outside` lists deep."""
        if isinstance(value, str):
            return self.checked(len(value)), 0
        if isinstance(value, int):
            if value.bit_length() > _MOST_BITS:
                raise SecurityError("the template computes a number that is too large")
            return ELEMENT, 0
        if isinstance(value, (bytes, bytearray, memoryview)):
            raise SecurityError("the template makes bytes")
        if isinstance(value, range) or not isinstance(value, Collection):
            return ELEMENT, 0
        known = self._known.get(id(value))
        if known is None:
            if outside >= MOST_DEPTH:
                raise SecurityError("the template nests lists too deeply")
            self.checked(ELEMENT * len(value))
            weight, depth = ELEMENT, 0
            parts = (*value, *value.values()) if isinstance(value, Mapping) else value
            for part in parts:
                its_weight, its_depth = (len(part), 0) if type(part) is str else self._weigh(part, outside + 1)
                weight += its_weight if its_weight > ELEMENT else ELEMENT
                depth = its_depth if its_depth > depth else depth
            self.checked(weight)
            known = self._known[id(value)] = (weight, depth + 1, value)
        if outside + known[1] > MOST_DEPTH:
            raise SecurityError("the template nests lists too deeply")
        return known[:2]

    def checked(self, weight: int) -> int:
        """A weight that is not too much."""
        if weight > MOST_WEIGHT:
            raise SecurityError("the template handles a value that is too large")
        return weight
