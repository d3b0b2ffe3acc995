"""The sizes of a bundle's model that costs depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import TENSORRT, Manifest

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class ModelFacts:
    """The sizes that costs depend on.

    Attributes:
        hidden, vocab: H and V.
        layers, attention_heads, kv_heads, head_dim: of the decoder.
        layer_weights: elements of all weight matrices in the layers: each row of a pass multiplies them once.
        parameters: of the backbone, embeddings and LM projection included, tied ones once.
        heads, residual_blocks: K heads of so many blocks.
        choices: V', tokens that a head chooses from.
        projections: of the heads' own: 0 where they share the LM projection, 1 where they share another one, K.
        layer_weight_bytes, lm_weight_bytes: of the weight matrices in the layers; of the LM projection.
        weight_bytes, value_bytes: of one number of embeddings and heads; of cache and logits.
        lookup: tokens that the context proposes; 0 without lookup.
        fixed_cache_rows: S_max where the graphs are those of fixed shapes, else 0. They cover the whole cache, move D+1
            rows of it however many were accepted, and run heads and lookup whatever the next tree is.
    """

    hidden: int
    vocab: int
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    layer_weights: int
    parameters: int
    heads: int
    residual_blocks: int
    choices: int
    projections: int
    layer_weight_bytes: int
    lm_weight_bytes: int
    weight_bytes: float
    value_bytes: float
    lookup: int = 0
    fixed_cache_rows: int = 0

    @property
    def depth(self) -> int:
        """D, edges of the longest path that a tree may have."""
        return max(self.heads, self.lookup)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one row of the key/value cache, all layers."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes)

    @property
    def residual_parameters(self) -> int:
        """Parameters of one residual block: weight [H, H] and bias [H]."""
        return self.hidden * self.hidden + self.hidden

    @property
    def projection_parameters(self) -> int:
        """Parameters of one head projection, [V', H]."""
        return self.choices * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters that the heads add to the backbone's."""
        blocks = self.heads * self.residual_blocks * self.residual_parameters
        return blocks + self.projections * self.projection_parameters

    @property
    def resident_parameters(self) -> int:
        """Parameters in memory while rounds run."""
        return self.parameters + self.head_parameters


def facts_of(manifest: Manifest) -> ModelFacts:
    """The sizes of a bundle.

    Raises:
        UserError: it was exported before the manifest told them.
    """

    def fact(section: str, name: str) -> int:
        value: Any = getattr(manifest, section).get(name)
        if type(value) is not int or value < 0:
            raise UserError(
                f'{manifest.name}: the bundle\'s manifest does not tell "{section}.{name}", which costs depend on',
                "export the model again with this version of medusa-export",
            )
        return value

    limits = manifest.limits
    scalar = _BYTES.get(manifest.dtype)
    if scalar is None:
        raise UserError(
            f"{manifest.name}: weights of dtype {manifest.dtype} have no known size", f"known are {', '.join(_BYTES)}"
        )
    hidden, layer_weights = fact("model", "hidden_size"), fact("model", "layer_weights")
    if manifest.weights == manifest.dtype:
        layer_bytes, lm_bytes = layer_weights * scalar, limits.vocab_size * hidden * scalar
    else:
        layer_bytes, lm_bytes = fact("model", "layer_weight_bytes"), fact("model", "lm_weight_bytes")
    return ModelFacts(
        hidden=hidden,
        vocab=limits.vocab_size,
        layers=limits.layers,
        attention_heads=fact("model", "attention_heads"),
        kv_heads=limits.kv_heads,
        head_dim=limits.head_dim,
        layer_weights=layer_weights,
        parameters=fact("model", "parameters"),
        heads=limits.heads,
        residual_blocks=fact("heads", "residual_layers"),
        choices=manifest.heads.get("draft_vocabulary") or limits.vocab_size,
        projections=fact("heads", "projections"),
        layer_weight_bytes=layer_bytes,
        lm_weight_bytes=lm_bytes,
        weight_bytes=scalar,
        value_bytes=scalar,
        lookup=limits.lookup,
        fixed_cache_rows=limits.cache_rows if manifest.target == TENSORRT else 0,
    )
