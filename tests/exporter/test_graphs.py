"""What the exported graphs are made of: one node per layer of each kind, one pass over the heads, one weights file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import demo_model
import onnx
import pytest
from onnx import TensorProto, helper
from tiny_models import Exported

from medusa_engine.runtime.manifest import Limits, Manifest, read_manifest

TREE_INPUTS = ("input_ids", "position_ids", "tree_mask", "logit_rows")
ROUND_INPUTS = ("retrieve_indices", "tree_indices")
STATE_INPUTS = ("past_length", "pending_rows", "pending_count")


class Graph:
    """A graph file of a bundle, without its weights; its nodes and values are those of its branches, too."""

    def __init__(self, folder: Path, name: str) -> None:
        self.manifest: Manifest = read_manifest(folder)
        self.limits: Limits = self.manifest.limits
        self.model = onnx.load(folder / self.manifest.graphs[name], load_external_data=False)
        graph = self.model.graph
        self.choices = [node for node in graph.node if node.op_type == "If"]
        self.branches = [attribute.g for node in self.choices for attribute in node.attribute]
        self.nodes = [node for part in (graph, *self.branches) for node in part.node]
        self.producer = {output: node for node in self.nodes for output in node.output}
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        values = [value for part in self.branches for value in (*part.value_info, *part.output)]
        values += [*graph.value_info, *graph.input, *graph.output]
        self.types = {value.name: value.type.tensor_type for value in values}

    def shape(self, name: str) -> list[int | str]:
        """Sizes of a value; a name where the size is dynamic."""
        return [dim.dim_param or dim.dim_value for dim in self.types[name].shape.dim]

    def signature(self, values: Any) -> dict[str, tuple[int, list[int | str]]]:
        return {value.name: (self.types[value.name].elem_type, self.shape(value.name)) for value in values}

    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((node.domain, node.op_type) for node in self.nodes)

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shape of every floating-point initializer but single numbers."""
        floats = {name: t for name, t in self.initializers.items() if t.data_type == TensorProto.FLOAT}
        return {name: tuple(t.dims) for name, t in floats.items() if t.dims}

    def external(self) -> dict[str, dict[str, str]]:
        """Location, offset and length of every initializer that lies in another file."""
        return {
            name: {entry.key: entry.value for entry in tensor.external_data}
            for name, tensor in self.initializers.items()
            if tensor.data_location == TensorProto.EXTERNAL
        }


@pytest.fixture(
    scope="module", params=["own_heads", "shared_heads", "zero_heads", pytest.param("demo", marks=pytest.mark.demo)]
)
def folder(request: pytest.FixtureRequest) -> Path:
    """The folder of each bundle in turn."""
    if request.param == "demo":
        return demo_model.BUNDLE
    exported: Exported = request.getfixturevalue(request.param)
    return exported.bundle


@pytest.fixture(scope="module")
def round_graph(folder: Path) -> Graph:
    return Graph(folder, "round")


@pytest.fixture(scope="module")
def step_graph(folder: Path) -> Graph:
    return Graph(folder, "step")


@pytest.mark.parametrize("name", ["round", "step"])
def test_each_layer_has_one_node_of_each_fused_kind(folder: Path, name: str) -> None:
    graph = Graph(folder, name)
    layers = graph.limits.layers
    counts = graph.counts()
    assert counts["medusa", "CompactAppendKV"] == layers
    assert counts["", "Attention"] == layers
    assert counts["", "RotaryEmbedding"] == 2 * layers  # queries and keys
    assert counts["", "RMSNormalization"] == 2 * layers + 1  # before attention, before the MLP, before the projection
    assert {op for _, op in counts} & {"Softmax", "Rsqrt", "ReduceMean", "Pow"} == set(), "left decomposed"


@pytest.mark.parametrize("name", ["round", "step"])
def test_graphs_use_standard_operators_and_the_compaction_alone(folder: Path, name: str) -> None:
    graph = Graph(folder, name)
    assert {domain for domain, _ in graph.counts()} == {"", "medusa"}
    assert {opset.domain: opset.version for opset in graph.model.opset_import} == {"": 24, "medusa": 1}
    (function,) = graph.model.functions
    assert (function.domain, function.name) == ("medusa", "CompactAppendKV")
    assert {node.domain for node in function.node} == {""}
    attributes = {"plugin_namespace": b"medusa", "plugin_version": b"1", "aot": 1}
    assert set(function.attribute) == set(attributes)
    for node in graph.nodes:
        if node.domain == "medusa":
            assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == attributes


def test_each_layer_attends_the_cache_that_its_own_compaction_wrote(round_graph: Graph) -> None:
    compactions = [node for node in round_graph.nodes if node.op_type == "CompactAppendKV"]
    attentions = [node for node in round_graph.nodes if node.op_type == "Attention"]
    for layer, (compaction, attention) in enumerate(zip(compactions, attentions, strict=True)):
        assert list(compaction.input[:2]) == [f"past_key.{layer}", f"past_value.{layer}"]
        assert list(compaction.input[4:]) == list(STATE_INPUTS)
        assert list(compaction.output) == [f"present_key.{layer}", f"present_value.{layer}"]
        for source, present in zip(attention.input[1:3], compaction.output, strict=True):
            live = round_graph.producer[source]
            assert (live.op_type, live.input[0]) == ("Slice", present)


# Names, shapes and dtypes of the contract


def cache_signature(limits: Limits, key: str, value: str) -> dict[str, tuple[int, list[int]]]:
    shape = [1, limits.kv_heads, limits.cache_rows, limits.head_dim]
    return {f"{kind}.{layer}": (TensorProto.FLOAT, shape) for kind in (key, value) for layer in range(limits.layers)}


@pytest.mark.parametrize("name", ["round", "step"])
def test_inputs_and_outputs_have_the_names_shapes_and_dtypes_of_the_contract(folder: Path, name: str) -> None:
    graph = Graph(folder, name)
    limits, is_round = graph.limits, name == "round"
    int64, bool_, slots = TensorProto.INT64, TensorProto.BOOL, limits.depth + 1
    inputs = graph.signature(graph.model.graph.input)
    rows, logit_rows, stop_ids = inputs["input_ids"][1][1], inputs["logit_rows"][1][0], inputs["stop_ids"][1][0]
    paths = inputs["retrieve_indices"][1][0] if is_round else None
    next_rows = inputs["tree_indices"][1][0] if is_round else 1
    expected: dict[str, tuple[int, list[Any]]] = {
        "input_ids": (int64, [1, rows]),
        "position_ids": (int64, [1, rows]),
        "tree_mask": (bool_, [rows, rows]),
        "logit_rows": (int64, [logit_rows]),
        "past_length": (int64, [1]),
        "pending_rows": (int64, [slots]),
        "pending_count": (int64, [1]),
        "stop_ids": (int64, [stop_ids]),
        "token_budget": (int64, [1]),
        "finished": (bool_, [1]),
        **cache_signature(limits, "past_key", "past_value"),
    }
    if is_round:
        expected |= {"retrieve_indices": (int64, [paths, slots]), "tree_indices": (int64, [next_rows])}
        known = inputs["history"][1][0]
        expected |= {"history": (int64, [known])}
        sizes = (rows, logit_rows, paths, next_rows, stop_ids, known)
        assert len(set(sizes)) == len(sizes), "sizes that vary on their own have one name"
        assert all(isinstance(size, str) for size in sizes), "a fixed size"
    assert inputs == expected
    outputs = {
        "accepted_tokens": (int64, [slots]),
        "accepted_count": (int64, [1]),
        "next_token_budget": (int64, [1]),
        "next_finished": (bool_, [1]),
        "next_input_ids": (int64, [1, next_rows]),
        "next_position_ids": (int64, [1, next_rows]),
        "next_past_length": (int64, [1]),
        "next_pending_rows": (int64, [slots]),
        "next_pending_count": (int64, [1]),
        **cache_signature(limits, "present_key", "present_value"),
    }
    assert list(graph.signature(graph.model.graph.output).items()) == list(outputs.items())


# The heads


def test_the_heads_read_one_row_and_no_head_logits_of_all_rows_exist(round_graph: Graph) -> None:
    limits = round_graph.limits
    (topk,) = (node for node in round_graph.nodes if node.op_type == "TopK")
    choices = round_graph.manifest.heads["draft_vocabulary"] or limits.vocab_size
    assert round_graph.shape(topk.input[0]) == [limits.heads, choices]
    # Back from the heads' logits every activation has a fixed size, until one row is gathered from the hidden states.
    gathered = set()
    unvisited = {topk.input[0]}
    while unvisited:
        name = unvisited.pop()
        node = round_graph.producer.get(name)
        if node is None or round_graph.types[name].elem_type != TensorProto.FLOAT:
            continue  # a weight, or a row number
        assert is_fixed(round_graph, name), f"{name} has rows that vary"
        if node.op_type == "Gather" and not is_fixed(round_graph, node.input[0]):
            gathered.add(name)
        else:
            unvisited.update(node.input)
    (row,) = gathered
    assert round_graph.shape(row) == [1, round_graph.manifest.model["hidden_size"]]


def is_fixed(graph: Graph, name: str) -> bool:
    return all(isinstance(size, int) for size in graph.shape(name))


def test_the_step_has_no_heads(round_graph: Graph, step_graph: Graph) -> None:
    limits = round_graph.limits
    operators = {op for _, op in step_graph.counts()}
    assert "TopK" not in operators
    step, round_ = step_graph.weights(), round_graph.weights()
    assert step.items() <= round_.items()
    heads = round_graph.manifest.heads
    hidden = round_graph.manifest.model["hidden_size"]
    expected = heads["residual_layers"] * (limits.heads * hidden * hidden + limits.heads * hidden)
    if heads["projection"] == "own":
        expected += limits.heads * limits.vocab_size * hidden
    if heads["draft_vocabulary"]:  # the heads' rows of the shared projection
        expected += heads["draft_vocabulary"] * hidden
    assert elements(round_) - elements(step) == expected


def test_a_round_that_proposes_the_root_alone_leaves_the_heads_out(round_graph: Graph, step_graph: Graph) -> None:
    heads, lookup = ({part.name: part.g for part in choice.attribute} for choice in round_graph.choices)
    for branches in (heads, lookup):
        assert [node.op_type for node in branches["else_branch"].node] == ["Constant"]
    assert "ScatterElements" in {node.op_type for node in lookup["then_branch"].node}
    assert "ScatterElements" not in {node.op_type for node in heads["then_branch"].node}
    used = {name for node in heads["then_branch"].node for name in node.input}
    elsewhere = {name for node in round_graph.model.graph.node for name in node.input}
    # Where heads share the LM projection, both use it; their other weights are read in the branch alone.
    own = round_graph.weights().keys() - step_graph.weights().keys()
    assert own <= used and not own & elsewhere
    assert "TopK" in {node.op_type for node in heads["then_branch"].node}
    assert "TopK" not in {node.op_type for node in round_graph.model.graph.node}


def test_the_rounds_of_every_policy_do_so(own_heads: Exported) -> None:
    graphs = [Graph(own_heads.bundle, name) for name in read_manifest(own_heads.bundle).graphs]
    assert {bool(graph.branches) for graph in graphs if "tree_indices" in graph.types} == {True}
    assert {bool(graph.branches) for graph in graphs if "tree_indices" not in graph.types} == {False}


def test_the_step_has_no_drafts_to_keep_from_one_another(round_graph: Graph, step_graph: Graph) -> None:
    rounds, steps = round_graph.counts(), step_graph.counts()
    others = round_graph.limits.layers - 1
    assert rounds["", "IsNaN"] == 1  # in the last layer NaN of a committed row is kept
    assert rounds["", "ThresholdedRelu"] == others  # keys and values at once
    assert steps["", "IsNaN"] == steps["", "ThresholdedRelu"] == 0


def test_the_heads_read_each_block_in_one_product(round_graph: Graph) -> None:
    limits, weights = round_graph.limits, round_graph.weights()
    (branch,) = ({part.name: part.g for part in choice.attribute} for choice in round_graph.choices[:1])
    products = [node for node in branch["then_branch"].node if node.op_type == "MatMul"]
    blocks = [weights[node.input[1]] for node in products if node.input[1] in weights]
    hidden = blocks[0][0]
    # The first block of all heads is of one row; the others are of rows of their own.
    assert blocks[0] == (hidden, limits.heads * hidden)
    assert set(blocks[1:]) <= {(limits.heads, hidden, hidden)}


def test_the_step_takes_no_tree(step_graph: Graph) -> None:
    assert not set(ROUND_INPUTS) & {value.name for value in step_graph.model.graph.input}


def elements(weights: dict[str, tuple[int, ...]]) -> int:
    total = 0
    for shape in weights.values():
        size = 1
        for dim in shape:
            size *= dim
        total += size
    return total


# The weights


def test_both_graphs_read_the_same_bytes_of_one_weights_file(
    folder: Path, round_graph: Graph, step_graph: Graph
) -> None:
    step, round_ = step_graph.external(), round_graph.external()
    assert step
    assert {entry["location"] for entry in (*step.values(), *round_.values())} == {"weights.bin"}
    assert all(round_[name] == entry for name, entry in step.items())
    size = (folder / "weights.bin").stat().st_size
    ranges = sorted((int(entry["offset"]), int(entry["length"])) for entry in round_.values())
    for (begin, length), (end, _) in zip(ranges, [*ranges[1:], (size, 0)], strict=True):
        assert begin + length == end, "weights lie over one another, or are written and never read"


@pytest.mark.parametrize("bundle", ["own_heads", "shared_heads", "zero_heads"])
def test_no_weight_is_stored_twice(request: pytest.FixtureRequest, bundle: str) -> None:
    # Tied embeddings are one tensor, and where heads share the LM projection it is the backbone's own.
    exported: Exported = request.getfixturevalue(bundle)
    heads = exported.heads
    expected = exported.model.num_parameters() + exported.engine.limits.head_dim // 2  # rotary frequencies
    expected += heads.residual_weight.numel() + heads.residual_bias.numel()
    expected += 0 if heads.projection is None else heads.projection.numel()
    assert elements(Graph(exported.bundle, "round").weights()) == expected


@pytest.mark.parametrize("bundle", ["own_heads", "every_graph"])
def test_all_policies_graphs_read_the_same_weights(request: pytest.FixtureRequest, bundle: str) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    round_ = Graph(exported.bundle, "round").external().values()
    stored = {(entry["offset"], entry["length"]) for entry in round_}
    for name in read_manifest(exported.bundle).graphs:
        graph = Graph(exported.bundle, name).external().values()
        assert {(entry["offset"], entry["length"]) for entry in graph} <= stored, name
