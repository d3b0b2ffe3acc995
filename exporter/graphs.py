"""From the traced model to the graphs of a bundle: one trace, one weights file, a selection of outputs each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from medusa_engine.exporter.passes.first_argmax import FirstArgMaxPass
from medusa_engine.exporter.passes.flat_reshapes import FlatReshapesPass
from medusa_engine.exporter.passes.fuse import FusePass
from medusa_engine.exporter.passes.head_blocks import HeadBlocksPass
from medusa_engine.exporter.passes.idle_heads import IdleHeadsPass
from medusa_engine.exporter.passes.live_rows import LiveRowsPass
from medusa_engine.exporter.passes.no_drafts import NoDraftsPass
from medusa_engine.exporter.passes.one_cleaning import OneCleaningPass
from medusa_engine.exporter.passes.projections import FuseProjectionsPass
from medusa_engine.exporter.passes.quantize import QuantizePass, Stored
from medusa_engine.exporter.passes.split_heads import SplitHeadsPass
from medusa_engine.exporter.passes.wide_norms import WideNormsPass
from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.exporter.trace import OPSET, cache_names
from medusa_engine.exporter.weight_blocks import CONTRIB_DOMAIN
from medusa_engine.plugins.compact_append_kv.body import (
    DOMAIN,
    DOMAIN_VERSION,
    OP_TYPE,
    compact_append_kv_function,
)
from medusa_engine.runtime.manifest import WEIGHTS_NAME

PASS_OUTPUTS = (
    "accepted_tokens",
    "accepted_count",
    "next_token_budget",
    "next_finished",
    "next_input_ids",
    "next_position_ids",
    "next_past_length",
    "next_pending_rows",
    "next_pending_count",
)
POLICY_OUTPUTS = ("next_proposal", "next_history")  # of some graphs
LOGITS_OUTPUT = "logits"

_INLINE_BYTES = 1024  # smaller tensors stay in the graph file

# Behind `FusePass`, by whether the shapes are fixed.
_FIXED = (WideNormsPass(), FirstArgMaxPass())
_DYNAMIC = (
    FuseProjectionsPass(),
    SplitHeadsPass(),
    OneCleaningPass(),
    HeadBlocksPass(),
    FlatReshapesPass(),
    LiveRowsPass(),
)


def finish_graph(model: ir.Model, shape: RoundShape) -> None:
    """Run the passes, add the body of the compaction operator, drop the tracer's notes; in place."""
    FusePass()(model)
    for graph_pass in _FIXED if shape.fixed else _DYNAMIC:
        graph_pass(model)
    RemoveUnusedNodesPass()(model)  # weights that were joined are not written
    function = ir.serde.deserialize_function(compact_append_kv_function(fixed=shape.fixed))
    model.functions[function.identifier()] = function
    model.graph.opset_imports[DOMAIN] = DOMAIN_VERSION
    model.graph.name = "medusa"
    model.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None


def quantize(model: ir.Model, precision: str) -> Stored:
    """Make the weight matrices of the backbone `int8` or `int4`; in place. Returns what they take."""
    quantize_pass = QuantizePass(precision, LOGITS_OUTPUT)
    quantize_pass(model)
    RemoveUnusedNodesPass()(model)
    return quantize_pass.stored


def write_weights(model: ir.Model, folder: Path) -> None:
    """Move the weights into `folder`/weights.bin; every graph selected afterwards refers to that one file."""
    large = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes > _INLINE_BYTES
    ]
    external = ir.external_data.convert_tensors_to_external(
        [value.const_value for value in large], folder, WEIGHTS_NAME
    )
    for value, tensor in zip(large, external, strict=True):
        value.const_value = tensor


def write_graph(model: ir.Model, path: Path, shape: RoundShape, *, graph_name: str, logits: bool = False) -> None:
    """Write the graph that computes one kind of pass and nothing else.

    Args:
        graph_name: as in `manifest.graph_names`: `round`, `step` (no tree, no heads), or another variant of them.
        logits: also output the target logits [R, V].

    Raises:
        RuntimeError: the graph is not what the contract says; a fault of the exporter.
    """
    graph_model = model.clone()
    graph = graph_model.graph
    outputs = {value.name: value for value in graph.outputs}
    names = [*PASS_OUTPUTS, *(name for name in POLICY_OUTPUTS if f"{graph_name}.{name}" in outputs)]
    selected = [outputs[f"{graph_name}.{name}"] for name in names]
    for name, value in zip(names, selected, strict=True):
        value.name = name
    selected += [outputs[name] for name in cache_names("present_key", "present_value", shape)]
    selected += [outputs[LOGITS_OUTPUT]] if logits else []
    graph.outputs.clear()
    graph.outputs.extend(selected)
    RemoveUnusedNodesPass()(graph_model)
    if NoDraftsPass()(graph_model).modified:
        RemoveUnusedNodesPass()(graph_model)
    if not shape.fixed:
        IdleHeadsPass()(graph_model)
    for value in [value for value in graph.inputs if not value.uses() and not value.is_graph_output()]:
        graph.inputs.remove(value)
    check_graph(graph_model, shape)
    ir.save(graph_model, path)
    onnx.checker.check_model(str(path))


def check_graph(model: ir.Model, shape: RoundShape) -> None:
    """Raise RuntimeError unless each layer has one cache node and one attention, all in standard operators."""
    counts = Counter((node.domain, node.op_type) for node in model.graph.all_nodes())
    known = {("", None), (DOMAIN, OP_TYPE), (CONTRIB_DOMAIN, "MatMulNBits")}
    foreign = sorted(f"{domain}.{name}" for domain, name in counts if domain and (domain, name) not in known)
    if foreign:
        raise RuntimeError(f"the graph has the nodes {foreign}")
    for operator in ((DOMAIN, OP_TYPE), *([] if shape.exact else [("", "Attention")])):
        if counts[operator] != shape.layers:
            raise RuntimeError(f"the graph has {counts[operator]} {operator[1]} nodes for {shape.layers} layers")
    if model.graph.opset_imports[""] != OPSET:
        raise RuntimeError(f"the graph is of opset {model.graph.opset_imports['']}, not {OPSET}")
