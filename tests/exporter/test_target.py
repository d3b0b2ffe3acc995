"""`--target tensorrt`: what is refused, what the bundle says of itself, and what its graphs are made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import write_tree
from fixed_rounds import FixedProbe
from graph_probe import Pending, chunk_buffers
from onnx import TensorProto
from tiny_models import export
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_engine.exporter import check
from medusa_engine.exporter.cli import main
from medusa_engine.exporter.graphs import PASS_OUTPUTS
from medusa_engine.exporter.round import Round
from medusa_engine.runtime.bundle_files import verify_files
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import DTYPE_BYTES, Manifest, read_manifest

TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
ROWS, VOCAB, HIDDEN = 20, 61, 128


def save_model(folder: Path, *, embedding_scale: float = 1.0) -> Path:
    """A two-layer Llama with heads of 64, which fused attention takes, and two stop tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=[1, 2],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight *= embedding_scale
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(precision: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its hidden states are large: their squares are infinite in fp16."""
    folder = tmp_path_factory.mktemp(precision)
    model = save_model(folder / "model", embedding_scale=1e4)
    options = ("--untrained-heads", "3", "--top-k", "5", "--max-length", "100", "--max-tree-nodes", str(ROWS))
    policies = () if precision == "bf16" else ("--acceptance", "sample")
    return export(
        model, folder / "bundle", "--target", "tensorrt", "--precision", precision, *options, *policies
    ).bundle


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


@pytest.fixture(scope="module")
def graph(bundle: Path) -> Any:
    return onnx.load(bundle / "round.onnx", load_external_data=False).graph


def test_manifest_names_target_and_dtype_and_every_file(bundle: Path, manifest: Manifest, precision: str) -> None:
    assert (manifest.target, manifest.dtype) == ("tensorrt", {"fp16": "float16", "bf16": "bfloat16"}[precision])
    assert [name for name in manifest.graphs if name.startswith("step")] == []
    verify_files(bundle, manifest)
    assert set(manifest.files) | {"manifest.json"} == {path.name for path in bundle.iterdir()}
    limits = manifest.limits
    assert limits.cache_rows == limits.max_length + limits.max_tree_nodes + limits.depth + 1
    rows = 2 * limits.layers * limits.kv_heads * limits.cache_rows
    assert manifest.cache_bytes == rows * limits.head_dim * DTYPE_BYTES[manifest.dtype] == rows * 64 * 2


def test_inputs_and_outputs_have_fixed_sizes_but_n_and_r(graph: Any, manifest: Manifest, precision: str) -> None:
    limits = manifest.limits
    cache = [1, limits.kv_heads, limits.cache_rows, limits.head_dim]
    layers = range(limits.layers)
    sizes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.input
    }
    n, r = sizes["input_ids"][1], sizes["logit_rows"][0]
    assert isinstance(n, str)
    assert isinstance(r, str)
    assert sizes == {
        "input_ids": [1, n],
        "position_ids": [1, n],
        "tree_mask": [n, n],
        "logit_rows": [r],
        "retrieve_indices": [ROWS, limits.depth + 1],
        "tree_indices": [ROWS],
        "past_length": [1],
        "pending_rows": [limits.depth + 1],
        "pending_count": [1],
        "stop_ids": [2],
        "token_budget": [1],
        "finished": [1],
        "history": [limits.cache_rows],
        **{f"past_{kind}.{layer}": cache for kind in ("key", "value") for layer in layers},
    }
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert {types[name] for name in ("tree_mask", "finished", "next_finished")} == {TensorProto.BOOL}
    narrow = {name for name, type_ in types.items() if type_ == TYPES[precision]}
    presents = [f"present_{kind}.{layer}" for kind in ("key", "value") for layer in layers]
    assert narrow == {*presents, *(name for name in sizes if name.startswith("past_") and "." in name)}
    out = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.output}
    assert list(out) == [*PASS_OUTPUTS, "next_history", *presents]
    assert out["next_history"] == [limits.cache_rows]
    assert out["next_input_ids"] == out["next_position_ids"] == [1, ROWS]
    assert out["accepted_tokens"] == out["next_pending_rows"] == [limits.depth + 1]


def test_attention_covers_the_whole_cache_with_one_additive_mask(
    graph: Any, manifest: Manifest, precision: str
) -> None:
    attention = [node for node in graph.node if node.op_type == "Attention"]
    assert len(attention) == manifest.limits.layers
    (mask,) = {node.input[3] for node in attention}
    compaction = {output for node in graph.node if node.op_type == "CompactAppendKV" for output in node.output}
    assert {name for node in attention for name in node.input[1:3]} == compaction
    (info,) = (value for value in graph.value_info if value.name == mask)
    assert info.type.tensor_type.elem_type == TYPES[precision]
    assert info.type.tensor_type.shape.dim[3].dim_value == manifest.limits.cache_rows


def test_nothing_is_there_that_tensorrt_refuses_or_leaves_open(bundle: Path, manifest: Manifest) -> None:
    for name in manifest.graphs.values():
        graph = onnx.load(bundle / name, load_external_data=False).graph
        counts = Counter(node.op_type for node in graph.node)
        assert not set(counts) & {"If", "Loop", "Scan", "CumProd", "ArgMax", "NonZero", "Unique", "Compress"}
        types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input)}
        constants = {tensor.name for tensor in graph.initializer}
        constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
        for node in graph.node:
            if node.op_type == "Where":
                assert types.get(node.input[1]) != TensorProto.BOOL
            if node.op_type in ("TopK", "Slice"):
                assert set(node.input[1:]) <= constants, node.name


def test_norms_are_computed_in_fp32_and_logits_compared_in_fp32(graph: Any, manifest: Manifest) -> None:
    producer = {output: node for node in graph.node for output in node.output}
    norms = [node for node in graph.node if node.op_type == "RMSNormalization"]
    assert len(norms) == 2 * manifest.limits.layers + 1
    for node in norms:
        for name in node.input:
            cast = producer[name]
            assert (cast.op_type, cast.attribute[0].i) == ("Cast", TensorProto.FLOAT)
    logits = producer["logits"]
    assert (logits.op_type, logits.attribute[0].i) == ("Cast", TensorProto.FLOAT)


def test_squares_past_the_range_of_fp16_leave_the_top_1_of_fp32(bundle: Path, precision: str) -> None:
    if precision == "bf16":
        pytest.skip("ONNX Runtime computes no bf16 on the CPU; the export compared it in fp32")
    model = LlamaForCausalLM.from_pretrained(bundle.parent / "model", dtype=torch.float32)
    tokens = list(range(3, 15))
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    assert out.hidden_states[0].abs().max() ** 2 > 65504
    probe = FixedProbe(bundle, stop_ids=2)
    probe.reset()
    limits = probe.limits
    cache = np.zeros((1, limits.kv_heads, limits.cache_rows, limits.head_dim), np.float16)
    probe._cache = dict.fromkeys(probe._cache, cache)
    rows = np.arange(len(tokens))
    values = probe.run(tokens, Pending(0, []), chunk_buffers(len(tokens), limits.depth), logit_rows=rows)
    expected = out.logits[0].numpy()
    assert np.isfinite(values["logits"]).all()
    first, second = np.sort(expected, axis=-1)[:, ::-1][:, :2].T
    clear = first - second > 2 * check.FP16_TOLERANCE * np.abs(expected).max()
    assert clear.any()
    assert (values["logits"].argmax(axis=-1) == expected.argmax(axis=-1))[clear].all()


def test_opening_it_names_medusa_build(bundle: Path) -> None:
    with pytest.raises(UserError) as refused:
        Engine.open(bundle)
    assert str(bundle) in refused.value.problem
    assert "tensorrt" in refused.value.problem.replace(str(bundle), "")
    assert f"medusa-build {bundle} -o {bundle}.plan" in refused.value.hint


REFUSED: list[tuple[list[str], list[str]]] = [
    (["--precision", "fp16"], ["--target onnxruntime", "--precision fp16", "--target tensorrt"]),
    (["--precision", "bf16"], ["--target onnxruntime", "--precision bf16"]),
    (["--target", "tensorrt", "--precision", "fp32"], ["--target tensorrt", "--precision fp32", "fp16 or bf16"]),
    (["--target", "tensorrt", "--acceptance", "rejection"], ["--target tensorrt", "--acceptance rejection"]),
    (["--target", "tensorrt", "--repetition-penalty"], ["--target tensorrt", "--repetition-penalty"]),
    (["--target", "tensorrt", "--top-k", "3841"], ["--target tensorrt", "--top-k", "3840"]),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=str)
def test_options_that_do_not_go_together_are_refused_by_name(
    options: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = write_tree(tmp_path / "tree.json")
    arguments = ["--model", str(tmp_path), "--untrained-heads", "2", "--tree", str(tree), "-o", str(tmp_path / "out")]
    assert main([*arguments, *options]) == 1
    error = capsys.readouterr().err
    assert all(name in error for name in named), error
    assert not (tmp_path / "out").exists()


def causal_mask(self: Round, position_ids: Any, tree_mask: torch.Tensor, live: Any, staged: Any) -> torch.Tensor:
    """Siblings see one another."""
    rows = tree_mask.shape[0]
    return (live[None] <= staged + torch.arange(rows)[:, None])[None, None]


def test_wrong_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model")
    monkeypatch.setattr(Round, "attention_mask", causal_mask)
    tree = write_tree(tmp_path / "tree.json")
    arguments = ["--model", model, "--untrained-heads", "2", "--tree", tree, "-o", tmp_path / "out"]
    assert main([*map(str, arguments), "--target", "tensorrt"]) == 1
    assert "differ from transformers'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
