"""The round that the exporter traces, run by torch on a GPU at the shape of a large model, as one CUDA graph.

Weights are random: what is measured is time, not text. Norms, rotary embedding, the gated product and the softmax are
fused by torch.compile as TensorRT fuses them; compaction is the plugin's own kernel where it could be compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

from medusa_engine.exporter import cache as exporter_cache
from medusa_engine.exporter.heads import HeadWeights, MedusaHeads
from medusa_engine.exporter.round import Round
from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.exporter.trace import example_inputs
from medusa_engine.runtime.tree import Tree
from medusa_engine.runtime.tree_buffers import compile_tree

HEADS, TOPK = 4, 10
ATTENTION = "medusa_gpu_check"
PASS = ("input_ids", "position_ids", "past_length", "pending_rows", "pending_count", "token_budget", "finished")


@dataclass(frozen=True)
class Shape:
    """A model's shape."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    own_projections: bool  # of the Medusa heads

    def config(self, positions: int) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
        )


SHAPES = {
    "7b": Shape("Llama 7B", 4096, 11008, 32, 32, 32, 32000, own_projections=True),
    "8b": Shape("Llama 3 8B", 4096, 14336, 32, 32, 8, 128256, own_projections=False),
    "tiny": Shape("tiny, to try the check without a GPU", 64, 96, 2, 4, 2, 101, own_projections=True),
}


class Model:
    """Backbone and heads of a shape with random weights on one device.

    Args:
        shape: of the model.
        device: "cuda" or "cpu".
        dtype: of weights and cache.
        compact: the compaction kernel, in place; None for torch's own operators.
    """

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, compact: Any | None) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        AttentionInterface.register(ATTENTION, attention)
        torch.manual_seed(0)
        config = shape.config(8192)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype).eval()
            state = torch.randn(HEADS, 1, shape.hidden, shape.hidden, dtype=dtype) * 0.01
            projection = None
            if shape.own_projections:
                projection = torch.randn(HEADS, shape.vocab, shape.hidden, dtype=dtype) * 0.01
            weights = HeadWeights(state, state[..., 0], projection, trained=False, source="random")
            self.heads = MedusaHeads(weights, model.get_output_embeddings())
        self.model = model.requires_grad_(False)
        self.compact = compact
        self.backbone_bytes = _bytes(model.parameters()) - _bytes([model.get_input_embeddings().weight])
        self.head_bytes = (
            _bytes(self.heads.parameters())
            if shape.own_projections
            else _bytes([state]) + _bytes([model.get_output_embeddings().weight])
        )

    def cache_bytes(self, rows: int) -> int:
        """Of the keys and values of so many rows."""
        head_dim = self.shape.hidden // self.shape.heads
        return 2 * self.shape.layers * self.shape.kv_heads * rows * head_dim * self.dtype.itemsize

    def round_shape(self, rows: int, nodes: int) -> RoundShape:
        return RoundShape(
            layers=self.shape.layers,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.hidden // self.shape.heads,
            cache_rows=rows,
            heads=HEADS,
            topk=TOPK,
            max_tree_nodes=nodes,
            vocab_size=self.shape.vocab,
            fixed=True,
            dtype=self.dtype,
        )


class Loop:
    """Rounds of one tree whose outputs are copied back into their inputs; captured once and replayed on a GPU.

    Args:
        model: the backbone and heads.
        tree: that every round verifies and proposes; the root alone for rounds of one node.
        context: committed rows at the start.
        rows: S_max.
        plain: leave heads and acceptance out: a plain decoding step, the target's argmax alone.
    """

    def __init__(self, model: Model, tree: Tree, context: int, rows: int, *, plain: bool = False) -> None:
        self.model, self.context, self.plain = model, context, plain
        shape = model.round_shape(rows, tree.nodes)
        buffers = compile_tree(tree, topk=TOPK, depth=HEADS)
        output_embeddings = model.model.get_output_embeddings()
        self.round = Round(model.model, model.heads, shape)
        self._unwrap = lambda: model.model.set_output_embeddings(output_embeddings)
        with torch.device(model.device):
            self.inputs: dict[str, Any] = example_inputs(shape)
            size = shape.cache_size
            self.inputs["keys"] = [torch.randn(size, dtype=model.dtype) for _ in range(shape.layers)]
            self.inputs["values"] = [torch.randn(size, dtype=model.dtype) for _ in range(shape.layers)]
            paths = torch.full((tree.nodes, HEADS + 1), -1)
            paths[: len(buffers.retrieve_indices)] = _tensor(buffers.retrieve_indices)
            self.inputs |= {
                "input_ids": torch.zeros(1, tree.nodes, dtype=torch.int64),
                "position_ids": _tensor(buffers.position_offsets).to(model.device)[None] + context,
                "tree_mask": _tensor(buffers.tree_mask).to(model.device),
                "logit_rows": torch.arange(tree.nodes),
                "retrieve_indices": paths.to(model.device),
                "tree_indices": _tensor(buffers.tree_indices).to(model.device),
                "past_length": torch.tensor([context]),
                "token_budget": torch.tensor([1 << 40]),
            }
        self._start = {name: self.inputs[name].clone() for name in PASS}
        self.published = torch.zeros(2 + HEADS, dtype=torch.int64, pin_memory=model.device == "cuda")
        self._graph: Any = None

    def reset(self) -> None:
        """Back to the context it began with."""
        for name, value in self._start.items():
            self.inputs[name].copy_(value)

    def run(self) -> None:
        """One round, launched; nothing is waited for."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._pass()

    def capture(self) -> None:
        """Run a few rounds, then record one as a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._pass()
        torch.cuda.current_stream().wait_stream(stream)
        self.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._pass()
        self._graph = graph
        self.reset()

    def close(self) -> None:
        """Give the model its projection back, and the memory of the graph and the cache."""
        self._unwrap()
        self._graph = None
        self.inputs = {}

    @torch.no_grad()
    def _pass(self) -> None:
        with torch.device(self.model.device), _in_place_cache(self.model.compact):
            out = self._step() if self.plain else self._round()
            for name in PASS:
                self.inputs[name].copy_(out[f"next_{name}"])
            if not self.plain:
                self.published[0:1].copy_(out["accepted_count"], non_blocking=True)
                self.published[1:].copy_(out["accepted_tokens"], non_blocking=True)

    def _round(self) -> dict[str, torch.Tensor]:
        out = self.round(**self.inputs)
        return {name.removeprefix("round."): value for name, value in out.items() if name.startswith("round.")}

    def _step(self) -> dict[str, torch.Tensor]:
        given = self.inputs
        staged = given["past_length"] + given["pending_count"]
        state = (given["past_length"], given["pending_rows"], given["pending_count"])
        nan = torch.zeros(1, 1, dtype=self.model.dtype)
        cache = exporter_cache.StaticCache(given["keys"], given["values"], *state, None, nan)
        columns = torch.arange(self.round.shape.cache_rows)
        logits, _ = self.round.backbone(
            given["input_ids"], given["position_ids"], given["tree_mask"], given["logit_rows"], columns, staged, cache
        )
        return {
            "next_input_ids": logits.argmax(dim=-1)[None],
            "next_position_ids": given["position_ids"] + 1,
            "next_past_length": given["position_ids"][0],
            "next_pending_rows": torch.zeros_like(given["pending_rows"]),
            "next_pending_count": torch.ones(1, dtype=torch.int64),
            "next_token_budget": given["token_budget"] - 1,
            "next_finished": given["finished"],
        }


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Three launches: scores, softmax, sum. The queries of a group are rows of one product, so keys are read once."""
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, key[0].transpose(1, 2))  # [H_kv, H / H_kv * N, S_max]
    weights = _softmax(scores.reshape(heads, rows, -1), attention_mask[0], scaling)
    out = torch.matmul(weights.reshape(kv_heads, -1, key.shape[2]), value[0])
    return out.reshape(1, heads, rows, head_dim).transpose(1, 2), None


def _softmax(scores: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    return (scores.float() * scaling + mask.float()).softmax(dim=-1).to(scores.dtype)


def fuse() -> None:
    """Let torch.compile fuse what is computed by element, once for all layers."""
    global _softmax
    torch._dynamo.config.recompile_limit = 64
    compiled = {"dynamic": False, "fullgraph": True}
    _softmax = torch.compile(_softmax, **compiled)
    modeling_llama.apply_rotary_pos_emb = torch.compile(modeling_llama.apply_rotary_pos_emb, **compiled)
    modeling_llama.LlamaRMSNorm.forward = torch.compile(modeling_llama.LlamaRMSNorm.forward, **compiled)
    activation = torch.compile(_gated, **compiled)
    modeling_llama.LlamaMLP.forward = lambda self, x: self.down_proj(activation(self.gate_proj(x), self.up_proj(x)))


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@contextlib.contextmanager
def _in_place_cache(compact: Any | None) -> Iterator[None]:
    """The cache of the round, compacted and appended to where it lies, without asking the host for a length."""

    def update(self: Any, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object, **__: object) -> Any:
        (compact or _compact)(self.keys[layer], self.values[layer], key.contiguous(), value.contiguous(), *self._state)
        return self.keys[layer], self.values[layer]

    before = exporter_cache.StaticCache.update
    exporter_cache.StaticCache.update = update
    try:
        yield
    finally:
        exporter_cache.StaticCache.update = before


def _compact(
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    past_length: torch.Tensor,
    pending_rows: torch.Tensor,
    pending_count: torch.Tensor,
) -> None:
    """With torch's operators; rows of pending slots that do not count are overwritten or never seen."""
    slots = torch.arange(pending_rows.shape[0])
    source, target = past_length + pending_rows, past_length + slots
    appended = past_length + pending_count + torch.arange(new_key.shape[2])
    for past, new in ((past_key, new_key), (past_value, new_value)):
        past.index_copy_(2, target, past.index_select(2, source))
        past.index_copy_(2, appended, new)


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array.copy())  # that of a tree is not to be written to


def _bytes(tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
