"""Weights of 8 and 4 bits: rounds give plain decoding's tokens for any tree and drafts, and the numbers are right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from command_checks import Commands
from drafts import ObservedState, PlantedDrafts
from hypothesis import given, settings
from hypothesis import strategies as st
from nan_weights import with_nan_row
from optimised_graph import OptimisedGraph
from tiny_models import RANDOM_VOCAB, Exported, export, random_heads, random_llama
from transformers import LlamaConfig, LlamaForCausalLM
from tree_strategies import trees

from medusa_engine.benchmarks.bench import Results
from medusa_engine.benchmarks.settings import BenchSettings
from medusa_engine.benchmarks.text import facts
from medusa_engine.exporter import attention, exact_attention
from medusa_engine.exporter.verify import Verification
from medusa_engine.exporter.verify_page import page as verify_page
from medusa_engine.exporter.verify_report import document as verify_document
from medusa_engine.exporter.verify_report import text as verify_text
from medusa_engine.runtime.cost import round_ledger
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import read_manifest
from medusa_engine.runtime.model_facts import facts_of
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import Tree, chain
from medusa_engine.runtime.tree_plan import TreePlan

HEADS = 3
SIZES = ("--max-length", "200", "--top-k", "5", "--max-tree-nodes", "24", "--acceptance", "sample")


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A random Llama with grouped key/value heads; 40 rows of its MLP are no multiple of any block."""
    folder = tmp_path_factory.mktemp(request.param)
    random_llama(folder, tied=False, seed=1)
    random_heads(folder, heads=HEADS, layers=1, own_projection=True, scale=0.3, seed=2)
    return export(folder, folder / "bundle", *SIZES, "--precision", request.param)


def plain_answer(engine: Engine, prompt_ids: list[int], count: int) -> list[int]:
    return engine.generate(prompt_ids=prompt_ids, max_new_tokens=count, speculation=False).token_ids


@settings(max_examples=15, deadline=None)
@given(
    tree=trees(depth=HEADS, topk=5, max_nodes=24),
    prompt_ids=st.lists(st.integers(0, RANDOM_VOCAB - 1), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_rounds_give_the_tokens_of_plain_decoding(
    quantised: Exported, tree: Tree, prompt_ids: list[int], seed: int
) -> None:
    engine = quantised.engine
    expected = plain_answer(engine, prompt_ids, 40)
    drafts = PlantedDrafts(len(prompt_ids), expected, RANDOM_VOCAB, np.random.default_rng(seed))
    state = ObservedState(engine.backend.new_state(), drafts)
    plan = TreePlan(tree, engine.limits)
    decoding = Decoding(state, engine.limits, prompt_ids, plan=plan, max_new_tokens=40, stop_ids=frozenset())
    assert [token for round_ in decoding for token in round_.token_ids] == expected


def test_a_sampled_answer_is_that_of_plain_decoding(quantised: Exported) -> None:
    engine = quantised.engine
    for seed in range(5):
        policy = AcceptancePolicy("sample", temperature=1.5, seed=seed)
        plain, speculative = (
            engine.generate(prompt_ids=[3, 1, 4], max_new_tokens=40, acceptance=policy, speculation=speculation)
            for speculation in (False, True)
        )
        assert plain.token_ids == speculative.token_ids


def test_logits_are_those_of_the_quantised_weights(quantised: Exported) -> None:
    """Quantising changes some greedy tokens of the model, with 8 bits hardly any."""
    model, engine = quantised.model, quantised.engine
    prompts = [[first, second, 9] for first in range(RANDOM_VOCAB) for second in (3, 7)]
    with torch.no_grad():
        best = [int(model(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in prompts]
    agreed = sum(plain_answer(engine, prompt, 1) == [token] for prompt, token in zip(prompts, best, strict=True))
    assert agreed >= len(prompts) * (0.9 if read_manifest(quantised.bundle).weights == "int8" else 0.6)


def test_weights_take_the_bits_and_the_manifest_says_so(quantised: Exported) -> None:
    manifest = read_manifest(quantised.bundle)
    assert manifest.dtype == "float32"
    model = onnx.load(quantised.bundle / manifest.graphs["round"])
    counts = Counter(node.op_type for node in model.graph.node)
    layers = manifest.limits.layers
    # queries with keys and values; attention's output; gate with up; down: four products a layer, and the LM projection
    assert counts["MatMulNBits"] == 4 * layers + 1
    bits = {part.i for node in model.graph.node for part in node.attribute if part.name == "bits"}
    assert bits == {8 if manifest.weights == "int8" else 4}
    sizes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    integers = [name for name, kind in kinds.items() if kind == onnx.TensorProto.UINT8]
    assert len([name for name in integers if len(sizes[name]) > 1]) == 4 * layers + 1
    floats = [name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT and len(sizes[name]) == 2]
    hidden = manifest.model["hidden_size"]
    of_heads = hidden, manifest.limits.heads * hidden
    assert all(RANDOM_VOCAB in sizes[name] or sizes[name] == of_heads for name in floats), (
        "beside the embedding, and heads, no matrix is fp32"
    )


@pytest.mark.parametrize("name", ["step", "round"])
def test_a_layer_has_no_more_nodes_than_it_needs(quantised: Exported, name: str, tmp_path: Path) -> None:
    """As tests/exporter/test_node_counts.py counts them, with 13 for attention."""
    graph = OptimisedGraph(quantised.bundle / f"{name}.onnx", tmp_path)
    layers = 2 * (27 + 12)
    around = 9
    nan_drafts = 0 if name == "step" else 2 + 3
    assert graph.of_layers().total() <= layers + around + nan_drafts, graph.of_layers()
    assert not graph.computed_twice()


def test_an_export_whose_rows_are_not_plain_decodings_is_refused(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attention summed in fp32 a row depends on where its keys lie."""
    monkeypatch.setattr(exact_attention, "exact_tree_attention", attention.tree_attention)
    config = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=RANDOM_VOCAB, num_key_value_heads=2, **config)).save_pretrained(tmp_path)
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps([[0]]))
    options = ("--model", tmp_path, "--untrained-heads", "3", "--tree", tree, "--precision", "int8")
    commands.export_refuses(*options, "--output", tmp_path / "bundle", named=["speculation would not be exact"])
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("infinite", [np.nan, np.inf])
def test_a_row_that_is_not_finite_ends_in_an_error(quantised: Exported, tmp_path: Path, infinite: float) -> None:
    folder = with_nan_row(quantised.bundle, tmp_path / "bundle", "model.embed_tokens.weight", 9, infinite)
    engine = Engine.open(folder, threads=1)
    for speculation in (False, True):
        with pytest.raises(UserError, match="NaN or infinite"):
            engine.generate(prompt_ids=[3, 1, 9], max_new_tokens=3, speculation=speculation)


def test_queries_keys_and_values_are_one_product(own_heads: Exported) -> None:
    """In fp32, too: the sizes of the products tell."""
    model = onnx.load(own_heads.bundle / "step.onnx", load_external_data=False)
    dims = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    products = Counter(dims[node.input[1]] for node in model.graph.node if node.op_type == "MatMul")
    assert products == {(32, 64): 2, (32, 32): 2, (32, 80): 2, (40, 32): 2}  # [q|k|v], o, [gate|up], down of two layers


def test_reports_name_the_format_of_the_weights(quantised: Exported) -> None:
    manifest = read_manifest(quantised.bundle)
    found = SimpleNamespace(
        manifest=manifest.document(),
        machine={"memory_bytes": 1, "load_average": (0.0, 0.0, 0.0), "processor": "", "cores": 1, "system": ""}
        | {"python": ""},
        settings=BenchSettings(quantised.bundle, threads=1),
        load_seconds=0.0,
        versions={},
    )
    assert f"bundle: {manifest.weights} weights, float32, 3 heads" in facts(cast(Results, found))["engine"]
    verified = Verification("m", "e", 1, manifest.dtype, manifest.weights, 1e-4, True, [], [], [])
    assert f"e: {manifest.weights} weights, float32" in verify_text(verified)
    assert f"e, {manifest.weights} weights, float32" in verify_page(verified)
    assert verify_document(verified)["weights"] == manifest.weights


def test_the_ledger_counts_weights_as_they_are_stored(quantised: Exported) -> None:
    """Those of weights.bin, and the scales that are so few here that they stay in the graph file."""
    sizes = facts_of(read_manifest(quantised.bundle))
    ledger = round_ledger(sizes, chain(HEADS), context=20)
    table = sizes.vocab * sizes.hidden * 4  # of embeddings, of which a round reads its rows'
    counted = sum(part.weight_bytes for part in ledger.parts) - ledger.rows * sizes.hidden * 4 + table
    graph = onnx.load(quantised.bundle / "round.onnx", load_external_data=False).graph
    inline = [tensor for tensor in graph.initializer if not tensor.external_data]
    stored = (quantised.bundle / "weights.bin").stat().st_size
    stored += sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in inline)
    assert counted == pytest.approx(stored, rel=0.03)  # biases, norms and small constants apart
