"""A bundle for TensorRT whose graph is written by hand: right in names, shapes and dtypes, with no acceptance in it.

It is there in a moment, and can be made wrong in one place: what a build refuses is tried on these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from medusa_engine.exporter.bundle import file_facts, write_manifest
from medusa_engine.plugins.compact_append_kv.body import compact_append_kv_function
from medusa_engine.runtime.manifest import GENERATION_NAME, WEIGHTS_NAME, Limits, Manifest, cache_rows, graph_name

HEADS, NODES, MAX_LENGTH, VOCAB, LAYERS, KV_HEADS = 2, 8, 40, 61, 2, 2
HEAD_DIM = 16  # TensorRT-RTX 1.7 has a fused attention for 12 and more, not for 8
STOP_IDS = (3, 5)
DEPTH = HEADS


def limits(head_dim: int = HEAD_DIM) -> Limits:
    return Limits(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        cache_rows=cache_rows("tensorrt", MAX_LENGTH, DEPTH, NODES),
        max_length=MAX_LENGTH,
        heads=HEADS,
        topk=4,
        max_tree_nodes=NODES,
        vocab_size=VOCAB,
    )


@dataclass
class RoundGraph:
    """A graph in the making; `change` adds to it or spoils it before it is saved."""

    head_dim: int = HEAD_DIM
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def build(self) -> RoundGraph:
        int64, fp16, boolean, path = TensorProto.INT64, TensorProto.FLOAT16, TensorProto.BOOL, DEPTH + 1
        self.input("input_ids", int64, [1, "N"])
        self.input("position_ids", int64, [1, "N"])
        self.input("tree_mask", boolean, ["N", "N"])
        self.input("logit_rows", int64, ["R"])
        self.input("retrieve_indices", int64, [NODES, path])
        self.input("tree_indices", int64, [NODES])
        for name, size in (("past_length", 1), ("pending_rows", path), ("pending_count", 1)):
            self.input(name, int64, [size])
        self.input("stop_ids", int64, [len(STOP_IDS)])
        self.input("token_budget", int64, [1])
        self.input("finished", boolean, [1])
        for name, shape in (
            ("accepted_tokens", [path]),
            ("accepted_count", [1]),
            ("next_token_budget", [1]),
            ("next_input_ids", [1, NODES]),
            ("next_position_ids", [1, NODES]),
            ("next_past_length", [1]),
            ("next_pending_rows", [path]),
            ("next_pending_count", [1]),
        ):
            self.output(name, int64, shape)
        self.output("next_finished", boolean, [1])
        size = limits(self.head_dim)
        for kind in ("key", "value"):
            for layer in range(LAYERS):
                shape = [1, KV_HEADS, size.cache_rows, self.head_dim]
                self.input(f"past_{kind}.{layer}", fp16, shape)
                self.output(f"present_{kind}.{layer}", fp16, shape)
        self._mask(size.cache_rows)
        self._results(self._decoder())
        return self

    def _mask(self, rows: int) -> None:
        """[1, 1, N, S_max], added to the scores."""
        self.constant("zero", np.array([0]))
        self.constant("one", np.array([1]))
        self.constant("row", np.arange(rows))
        self.node("Squeeze", ["input_ids", "zero"], "ids")
        self.node("Add", ["past_length", "pending_count"], "staged")
        self.node("Sub", ["row", "staged"], "packed")
        self.node("Shape", ["ids"], "count")
        self.node("Sub", ["count", "one"], "last")
        self.node("Min", [self.node("Max", ["packed", "zero"], "from_zero"), "last"], "column")
        self.node("Gather", ["tree_mask", "column"], "of_tree", axis=1)
        ahead, behind = (
            self.node("GreaterOrEqual", ["packed", "zero"], "ahead"),
            self.node("Less", ["packed", "count"], "in"),
        )
        self.node("And", ["of_tree", self.node("And", [ahead, behind], "inside")], "seen")
        self.node("Or", ["seen", self.node("Less", ["packed", "zero"], "committed")], "visible")
        self.constant("seen_score", np.zeros((), np.float16))
        self.constant("hidden_score", np.full((), -30000, np.float16))
        self.node("Where", ["visible", "seen_score", "hidden_score"], "added")
        self.node("Unsqueeze", ["added", self.constant("outer", np.array([0, 1]))], "mask")

    def _decoder(self) -> str:
        generator = np.random.default_rng(0)
        width = KV_HEADS * self.head_dim

        def weights(name: str, *shape: int) -> str:
            scale = 8 if "value" in name else 1  # what is attended to decides the tokens
            return self.constant(name, (scale * generator.standard_normal(shape) / np.sqrt(width)).astype(np.float16))

        hidden = self.node("Gather", [weights("embedding", VOCAB, width), "input_ids"], "hidden.0", axis=0)  # [1, N, H]
        self.constant("by_head", np.array([1, -1, KV_HEADS, self.head_dim]))
        self.constant("joined", np.array([1, -1, width]))
        state = ["past_length", "pending_rows", "pending_count"]
        for layer in range(LAYERS):
            rows = {}
            for kind in ("query", "key", "value"):
                name = f"{kind}.{layer}"
                flat = self.node("MatMul", [hidden, weights(f"w_{name}", width, width)], f"flat_{name}")
                split = self.node("Reshape", [flat, "by_head"], f"split_{name}")
                rows[kind] = self.node("Transpose", [split], f"new_{name}", perm=[0, 2, 1, 3])
            caches = [f"{when}_{kind}.{layer}" for when in ("past", "present") for kind in ("key", "value")]
            self.nodes.append(
                helper.make_node(
                    "CompactAppendKV",
                    [*caches[:2], rows["key"], rows["value"], *state],
                    caches[2:],
                    name=f"cache.{layer}",
                    domain="medusa",
                    plugin_namespace="medusa",
                )
            )
            seen = self.node("Attention", [rows["query"], *caches[2:], "mask"], f"attention.{layer}")
            seen = self.node("Transpose", [seen], f"back.{layer}", perm=[0, 2, 1, 3])
            seen = self.node("Reshape", [seen, "joined"], f"seen.{layer}")
            hidden = self.node("Add", [hidden, seen], f"hidden.{layer + 1}")
        self.node("Gather", [hidden, "logit_rows"], "chosen", axis=1)  # [1, R, H]
        logits = self.node("MatMul", ["chosen", weights("lm_head", width, VOCAB)], "logits")
        return self.node("ArgMax", [logits], "best", axis=2, keepdims=0)  # [1, R]

    def _results(self, best: str) -> None:
        self.constant("vocab", np.array([VOCAB]))
        token = self.node("Gather", [self.node("Squeeze", [best, "zero"], "of_rows"), "zero"], "token", axis=0)  # [1]
        path = self.node("Gather", ["retrieve_indices", self.constant("first", np.array(0))], "path", axis=0)  # [D+1]
        self.node("Max", [self.node("Add", [path, token], "tokens"), "zero"], "accepted_tokens")
        stops = self.node("ReduceSum", ["stop_ids"], "stops", keepdims=1)
        self.node("Add", ["one", self.node("Mul", [stops, "zero"], "nothing")], "accepted_count")
        self.node("Sub", ["token_budget", "accepted_count"], "next_token_budget")
        self.node("Not", [self.node("Not", ["finished"], "unfinished")], "next_finished")
        ids = self.node("Mod", [self.node("Add", ["tree_indices", token], "drafts"), "vocab"], "next_ids")
        self.node("Unsqueeze", [ids, "zero"], "next_input_ids")
        position = self.node("Squeeze", ["position_ids", "zero"], "position")  # [N]
        root = self.node("Gather", [position, self.node("Gather", ["logit_rows", "zero"], "root_row")], "root")  # [1]
        behind = self.node("Add", [root, "one"], "behind")
        depth = self.node("Min", ["tree_indices", "one"], "depth")  # right for one level of drafts
        self.node("Unsqueeze", [self.node("Add", [depth, behind], "next_at"), "zero"], "next_position_ids")
        self.node("Add", [root, "zero"], "next_past_length")
        self.node("Sub", [path, path], "next_pending_rows")  # the root alone
        self.node("Add", ["accepted_count", "zero"], "next_pending_count")

    def save(self, path: Path) -> None:
        graph = helper.make_graph(self.nodes, "medusa", self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("medusa", 1)]
        functions = [compact_append_kv_function(fixed=True)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=11), path)


Change = Callable[[RoundGraph], object]


def save_bundle(
    folder: Path, *, change: Change | None = None, head_dim: int = HEAD_DIM, dtype: str = "float16"
) -> Path:
    """Write a bundle with the graph `round`, changed before it is saved; returns its folder."""
    folder.mkdir()
    graph = RoundGraph(head_dim).build()
    if change is not None:
        change(graph)
    name = f"{graph_name('round', 'greedy')}.onnx"
    graph.save(folder / name)
    (folder / WEIGHTS_NAME).write_bytes(b"\0" * 16)
    (folder / "tree.json").write_text("[[0], [1], [0, 0]]\n")
    (folder / GENERATION_NAME).write_text(f'{{"eos_token_id": {list(STOP_IDS)}}}\n')
    (folder / "tokenizer_config.json").write_text("{}\n")
    manifest = Manifest(
        name=folder.name,
        target="tensorrt",
        dtype=dtype,
        weights=dtype,
        limits=limits(head_dim),
        model={},
        heads={},
        tools={},
        graphs={"round": name},
        files=file_facts(folder),
        policies=("greedy",),
        repetition_penalty=False,
        trees=("tree.json",),
    )
    write_manifest(folder, manifest)
    return folder
