"""Trace a round into one ONNX model whose outputs are the outputs of every graph of the bundle."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import onnx_ir as ir
import torch

from medusa_engine.exporter.round import Round
from medusa_engine.exporter.round_shape import RoundShape

OPSET = 24
LIVE_INPUT = "live"
STATE_INPUTS = ("past_length", "pending_rows", "pending_count")
STOP_INPUTS = ("stop_ids", "token_budget", "finished")
TREE_INPUTS = ("input_ids", "position_ids", "tree_mask", "logit_rows", "retrieve_indices", "tree_indices")
SAMPLING_INPUTS = ("uniforms", "temperature", "top_k", "top_p", "min_p", "ranks")
TYPICAL_INPUTS = ("posterior_threshold", "posterior_alpha", "root_drawn")
REJECTION_INPUTS = ("proposal", "accept_uniforms", "draft_uniforms")
PENALTY_INPUTS = ("history", "repetition_penalty")
POLICY_INPUTS = (*SAMPLING_INPUTS, *TYPICAL_INPUTS, *REJECTION_INPUTS, *PENALTY_INPUTS)

_LARGEST_DIM = 1 << 20
EXAMPLE_ROWS = 5  # the smallest cache that can be traced has as many


def trace_round(round_module: Round) -> ir.Model:
    """Trace with example inputs; N, R, paths, N', S and the live rows stay dynamic; of fixed shapes N and R alone.

    Nothing is computed, so that no weights are read.

    Returns:
        A model with the inputs of the contract, plus `live` (passes/live_rows.py replaces it).
    """
    shape = round_module.shape
    inputs = example_inputs(shape)
    with torch.no_grad(), quiet_export():
        program = torch.onnx.export(
            round_module,
            kwargs=inputs,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=[
                *(*TREE_INPUTS, *STATE_INPUTS, *STOP_INPUTS, LIVE_INPUT, *POLICY_INPUTS),
                *cache_names("past_key", "past_value", shape),
            ],
            dynamic_shapes=_dynamic_shapes(shape),
        )
    names = program.exported_program.call_spec.out_spec.context  # keys of what `Round.forward` returned
    for value, name in zip(program.model.graph.outputs, names, strict=True):
        value.name = name
    return program.model


def _dynamic_shapes(shape: RoundShape) -> dict[str, object]:
    """Of each argument of `Round.forward`, the sizes that stay dynamic."""
    dim = torch.export.Dim
    rows = dim("N", min=2, max=_LARGEST_DIM)
    logit_rows = dim("R", min=2, max=_LARGEST_DIM)
    dynamic: dict[str, object] = dict.fromkeys((*TREE_INPUTS, *STATE_INPUTS, *STOP_INPUTS, LIVE_INPUT, *POLICY_INPUTS))
    dynamic |= {"keys": [None] * shape.layers, "values": [None] * shape.layers}
    dynamic |= {"input_ids": {1: rows}, "position_ids": {1: rows}, "tree_mask": {0: rows, 1: rows}}
    dynamic |= {"logit_rows": {0: logit_rows}}
    if shape.fixed:
        return dynamic
    free = {0: dim.DYNAMIC}
    return dynamic | {
        "retrieve_indices": {0: dim("paths", min=2, max=_LARGEST_DIM)},
        "tree_indices": {0: dim("next_N", min=2, max=_LARGEST_DIM)},
        "stop_ids": {0: dim("S", min=2, max=_LARGEST_DIM)},
        "live": {0: dim("live_rows", min=2, max=shape.cache_rows)},
        "uniforms": {0: logit_rows},
        # it has a size of its own: other graphs would take R from its shape, and so ask for it
        "accept_uniforms": free,
        "ranks": free,
        "history": free,
    }


def cache_names(key: str, value: str, shape: RoundShape) -> list[str]:
    """`past_key.0 ... past_value.0 ...`, keys first."""
    return [f"{kind}.{layer}" for kind in (key, value) for layer in range(shape.layers)]


def example_inputs(shape: RoundShape) -> dict[str, object]:
    """Arguments of `Round.forward`: a small tree, no dynamic dimension of size 0 or 1, and a cache of any content."""
    n = EXAMPLE_ROWS
    nodes = shape.max_tree_nodes if shape.fixed else 2
    paths = torch.full((nodes, shape.depth + 1), -1)
    paths[:, 0] = 0
    return {
        "input_ids": torch.arange(n)[None],
        "position_ids": torch.arange(n)[None],
        "tree_mask": torch.ones(n, n).tril().bool(),
        "logit_rows": torch.arange(n - 1),
        "retrieve_indices": paths,
        "tree_indices": torch.zeros(nodes, dtype=torch.int64),
        "past_length": torch.tensor([0]),
        "pending_rows": torch.zeros(shape.depth + 1, dtype=torch.int64),
        "pending_count": torch.tensor([0]),
        "stop_ids": torch.full((shape.stop_ids if shape.fixed else 2,), -1),
        "token_budget": torch.tensor([1]),
        "finished": torch.tensor([False]),
        "live": torch.arange(n),
        "uniforms": torch.full((shape.cache_rows if shape.fixed else n - 1,), 0.5),
        "temperature": torch.ones(1),
        "top_k": torch.tensor([2]),
        "top_p": torch.ones(1),
        "min_p": torch.zeros(1),
        "ranks": torch.arange(2),
        "posterior_threshold": torch.ones(1),
        "posterior_alpha": torch.ones(1),
        "root_drawn": torch.tensor([False]),
        "proposal": torch.full((max(1, shape.heads), shape.vocab_size), 1 / shape.vocab_size),
        "accept_uniforms": torch.full((n,), 0.5),
        "draft_uniforms": torch.full((2 * max(1, shape.heads),), 0.5),
        "history": torch.zeros(shape.cache_rows if shape.fixed else n + 1, dtype=torch.int64),
        "repetition_penalty": torch.ones(1),
        "keys": [torch.empty(shape.cache_size, dtype=shape.dtype) for _ in range(shape.layers)],
        "values": [torch.empty(shape.cache_size, dtype=shape.dtype) for _ in range(shape.layers)],
    }


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Keep the exporter's progress lines and its notes about packages that are not needed off the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
