"""Rotary embeddings whose frequencies depend on the length of the text.

With "dynamic" and "longrope" every key would have to be rotated anew when the text grows past the positions of the
original training, and those in the cache are not. Up to there the frequencies are fixed, and that far goes an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BY_LENGTH = ("dynamic", "longrope")


def fixed_positions(config: Any) -> tuple[int, str] | None:
    """Positions up to which the rotation does not depend on the length, and the rope's type; None: all of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    found = []
    for parameters in by_layer_type or [rope]:
        if (rope_type := parameters.get("rope_type")) in _BY_LENGTH:
            original = parameters.get("original_max_position_embeddings") if rope_type == "longrope" else None
            found.append((original or config.max_position_embeddings, rope_type))
    return min(found, default=None)


@contextmanager
def fixed_rope(model: Any) -> Iterator[None]:
    """Take the look at the length out of a model's rotary embeddings, which does not trace; they keep their tables."""
    changed = []
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            fixed = {layer: "default" if kind in _BY_LENGTH else kind for layer, kind in rope_type.items()}
        else:
            fixed = "default" if rope_type in _BY_LENGTH else rope_type
        if fixed != rope_type:
            changed.append((module, rope_type))
            module.rope_type = fixed
    try:
        yield
    finally:
        for module, rope_type in changed:
            module.rope_type = rope_type
