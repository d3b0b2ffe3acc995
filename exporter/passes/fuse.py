"""Fuse decomposed normalisation and rotary embedding into the standard operators.

1. x * rsqrt(mean(x^2) + epsilon) * scale  ->  RMSNormalization(x, scale)
2. x * cos(f,f) + rotate_half(x) * sin(f,f)  ->  RotaryEmbedding(x, cos(f), sin(f))
3. a rotary embedding of the first part of each head  ->  the same node with rotary_embedding_dim

The patterns are onnxscript's own; what they do not match stays decomposed, which is slower and equally right.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript.rewriter.rules.fusion import _rms_normalization, _rotary_embedding

_RULES = (
    _rms_normalization.rms_normalization_ruleset,
    _rotary_embedding.rotary_embedding_rules,
    _rotary_embedding.partial_embedding_rules,
)


class FusePass(ir.passes.InPlacePass):
    """Apply the rules of this module, then remove what they leave behind."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for rules in _RULES:
            modified |= rules.apply_to_model(model) > 0
        modified |= CommonSubexpressionEliminationPass()(model).modified
        modified |= RemoveUnusedNodesPass()(model).modified
        return ir.passes.PassResult(model, modified)
