"""Many independent conversations through one ONNX Runtime step: the engine that writes training data.

The round decodes one conversation as fast as it can; here throughput counts, so each of B rows is a conversation
of its own with its own length, and one pass over the weights advances all of them by one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import torch

from medusa_engine.exporter import graphs
from medusa_engine.exporter.cache import TracedCache
from medusa_engine.exporter.passes.fuse import FusePass
from medusa_engine.exporter.round import RowProjection
from medusa_engine.exporter.trace import OPSET, quiet_export

TOP = 64  # candidates a step returns per row; sampling is truncated to them


class StepResult(NamedTuple):
    """What one step says about each row.

    Attributes:
        top_ids: [B, TOP] int64, the most likely next tokens, best first.
        top_logprobs: [B, TOP] float32, their natural log probabilities.
        hidden: [B, H] float32, the state the LM head and the Medusa heads read.
    """

    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]


class ScatterCache(TracedCache):
    """Duck-typed transformers cache: row b writes at its own position."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], rows: torch.Tensor, live: int) -> None:
        self.keys, self.values = list(keys), list(values)
        self._rows, self._live = rows, live

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for buffers, new in ((self.keys, key), (self.values, value)):
            buffers[layer] = torch.onnx.ops.symbolic(
                "TensorScatter",
                (buffers[layer], new, self._rows),
                {"axis": 2},
                dtype=new.dtype,
                shape=buffers[layer].shape,
                version=OPSET,
            )
        return self.keys[layer][:, :, : self._live], self.values[layer][:, :, : self._live]


class BatchStep(torch.nn.Module):
    """One token for each of B rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.projection = RowProjection(model.get_output_embeddings())
        model.set_output_embeddings(self.projection)

    def forward(
        self,
        input_ids: torch.Tensor,  # [B, 1]
        position_ids: torch.Tensor,  # [B, 1]; also the cache row that is written
        live: torch.Tensor,  # [L]: 0 ... longest row
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        cache = ScatterCache(keys, values, position_ids[:, 0], live.shape[0])
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=(live[None] <= position_ids)[:, None, None],  # [B, 1, 1, L]
            past_key_values=cache,
            use_cache=True,
        )
        logits = out.logits[:, 0]  # [B, V]
        top = logits.topk(TOP, dim=-1)
        named = {
            "top_ids": top.indices,
            "top_logprobs": top.values - logits.logsumexp(dim=-1, keepdim=True),
            "hidden": self.projection.rows,
        }
        for layer, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
            named |= {f"present_key.{layer}": key, f"present_value.{layer}": value}
        return named


class BatchEngine:
    """B rows of one model on ONNX Runtime.

    Args:
        model: a causal LM as `exporter.checkpoint.load_model` returns it; it is changed and cannot be used on.
        folder: an empty folder for the graph and its weights.
        batch: B.
        max_length: tokens a row may have.
        threads: of ONNX Runtime; 0 for one per physical core.
    """

    def __init__(self, model: Any, folder: Path, *, batch: int, max_length: int, threads: int = 0) -> None:
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.batch, self.max_length, self.hidden_size = batch, max_length, config.hidden_size
        layers, shape = config.num_hidden_layers, (batch, kv_heads, max_length, head_dim)
        graph = folder / "batch_step.onnx"
        _write_graph(model, graph, layers, shape)

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._cache = []
        for name in (f"{kind}.{layer}" for kind in ("key", "value") for layer in range(layers)):
            buffer = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype=np.float32))
            self._binding.bind_ortvalue_input(f"past_{name}", buffer)
            self._binding.bind_ortvalue_output(f"present_{name}", buffer)
            self._cache.append(buffer)

    def step(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> StepResult:
        """Feed token [B] at position [B] of every row; a row restarts by starting over at position 0."""
        live = np.arange(positions.max() + 1)
        inputs = {"input_ids": tokens[:, None], "position_ids": positions[:, None], "live": live}
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in StepResult._fields:
            self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        outputs = dict(zip(self._binding_names(), self._binding.get_outputs(), strict=True))
        return StepResult(*(outputs[name].numpy() for name in StepResult._fields))

    def _binding_names(self) -> list[str]:
        cache = [f"present_{kind}.{layer}" for kind in ("key", "value") for layer in range(len(self._cache) // 2)]
        return [*cache, *StepResult._fields]  # outputs come in the order in which they were bound


def _write_graph(model: Any, path: Path, layers: int, shape: tuple[int, ...]) -> None:
    batch = shape[0]
    caches = {kind: [torch.zeros(shape) for _ in range(layers)] for kind in ("keys", "values")}
    ids = torch.zeros(batch, 1, dtype=torch.int64)
    inputs = {"input_ids": ids, "position_ids": ids + 3, "live": torch.arange(4), **caches}
    dynamic = dict.fromkeys(("input_ids", "position_ids")) | {
        "live": {0: torch.export.Dim("live_rows", min=2, max=shape[2])},
        "keys": [None] * layers,
        "values": [None] * layers,
    }
    cache_names = [f"{kind}.{layer}" for kind in ("past_key", "past_value") for layer in range(layers)]
    with torch.no_grad(), quiet_export():
        step = BatchStep(model)
        traced = torch.onnx.export(
            step,
            kwargs=inputs,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=["input_ids", "position_ids", "live", *cache_names],
            output_names=[
                *StepResult._fields,
                *[n for i in range(layers) for n in (f"present_key.{i}", f"present_value.{i}")],
            ],
            dynamic_shapes=dynamic,
        ).model
    FusePass()(traced)
    graphs.write_weights(traced, path.parent)
    ir.save(traced, path)
