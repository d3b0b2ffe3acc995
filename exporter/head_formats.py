"""Layouts of Medusa head checkpoints: which tensor is which part of which head, told by names alone.

`h` counts heads, `l` the residual blocks of a head, `L` is their number.

| format | residual block | projection |
|---|---|---|
| original | `{h}.{l}.linear.weight`, `.bias` | `{h}.{L}.weight`, or none: the backbone's |
| medusa-2 | the same behind `medusa_head.`, among the weights of the whole model | the same |
| vllm | `blocks.{h}.layers.{l}.weight`, `.bias` | `lm_heads.{h}.weight`, or `lm_head.weight` for all heads |
| tensorrt-llm | `medusa_heads.{h}.medusa_layers.{l}.linear.weight`, `.bias` | `medusa_heads.{h}.lm_head.weight` |
| modelopt | `medusa_heads.{h}.{l}.linear.weight`, `.bias` | `medusa_heads.{h}.{L}.weight` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeadFormat:
    """One layout.

    Attributes:
        name: as users write it.
        residual: name of a residual block's linear, with `{h}` and `{l}`; `.weight` and `.bias` follow.
        projection: name of a head's own projection weight, with `{h}` and maybe `{l}` (which is then L).
        common_projection: name of one projection for all heads, or None.
        token_map: name of the draft vocabulary, or None.
        prefix: of every head tensor; `optional_prefix`: may stand before every tensor.
        ignored: patterns of tensors that carry nothing the heads need.
        whole_model: other tensors belong to the backbone.
    """

    name: str
    residual: str
    projection: str
    common_projection: str | None = None
    token_map: str | None = None
    optional_prefix: str = "module."
    ignored: tuple[str, ...] = ()
    whole_model: bool = False

    def parse(self, names: Iterable[str]) -> HeadNames:
        """Sort tensor names into the parts of the heads."""
        found = HeadNames(self)
        patterns = {
            "weight": _pattern(self.residual + ".weight"),
            "bias": _pattern(self.residual + ".bias"),
            "projection": _pattern(self.projection),
        }
        for name in names:
            plain = name.removeprefix(self.optional_prefix)
            matches = {part: match for part, pattern in patterns.items() if (match := pattern.fullmatch(plain))}
            if "weight" in matches or "bias" in matches:
                part, match = next(iter(matches.items()))
                found.residual[int(match["h"]), int(match["l"]), part] = name
            elif "projection" in matches:
                groups = matches["projection"].groupdict()
                layer = groups.get("l")
                found.projection[int(groups["h"])] = (name, None if layer is None else int(layer))
            elif plain == self.common_projection:
                found.common_projection = name
            elif plain == self.token_map:
                found.token_map = name
            elif any(re.fullmatch(pattern, plain) for pattern in self.ignored):
                found.ignored.append(name)
            else:
                found.unknown.append(name)
        return found


@dataclass
class HeadNames:
    """Names of a checkpoint's tensors, by what they are in one format.

    Attributes:
        residual: (head, layer, "weight" or "bias") -> name.
        projection: head -> (name, layer index written in it or None).
        common_projection, token_map: names, or None.
        ignored: known and not needed. unknown: belong to no part of a head.
    """

    format: HeadFormat
    residual: dict[tuple[int, int, str], str] = field(default_factory=dict)
    projection: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    common_projection: str | None = None
    token_map: str | None = None
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def heads(self) -> int:
        return 1 + max((head for head, _, _ in self.residual), default=-1)

    @property
    def layers(self) -> int:
        return 1 + max((layer for _, layer, _ in self.residual), default=-1)


ORIGINAL = HeadFormat("original", residual="{h}.{l}.linear", projection="{h}.{l}.weight")
MEDUSA_2 = HeadFormat(
    "medusa-2", residual="medusa_head.{h}.{l}.linear", projection="medusa_head.{h}.{l}.weight", whole_model=True
)
VLLM = HeadFormat(
    "vllm",
    residual="blocks.{h}.layers.{l}",
    projection="lm_heads.{h}.weight",
    common_projection="lm_head.weight",
    token_map="token_map",
    optional_prefix="medusa_heads.",
)
TENSORRT_LLM = HeadFormat(
    "tensorrt-llm",
    residual="medusa_heads.{h}.medusa_layers.{l}.linear",
    projection="medusa_heads.{h}.lm_head.weight",
    optional_prefix="",
    ignored=(r"transformer\..*", r"lm_head\..*"),  # its checkpoints hold the backbone, under names of its own
)
MODELOPT = HeadFormat(
    "modelopt",
    residual="medusa_heads.{h}.{l}.linear",
    projection="medusa_heads.{h}.{l}.weight",
    optional_prefix="",
    ignored=(r"medusa_heads\..*\.input_scale",),
)
FORMATS: Mapping[str, HeadFormat] = {
    layout.name: layout for layout in (ORIGINAL, MEDUSA_2, VLLM, TENSORRT_LLM, MODELOPT)
}


def identify(names: Iterable[str]) -> HeadNames | None:
    """The format in which most tensors are residual blocks of heads; None if none has any."""
    names = list(names)
    parsed = [layout.parse(names) for layout in FORMATS.values()]
    best = max(parsed, key=lambda found: len(found.residual))
    return best if best.residual else None


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    return re.compile(escaped.replace(r"\{h\}", r"(?P<h>\d{1,4})").replace(r"\{l\}", r"(?P<l>\d{1,4})"))
