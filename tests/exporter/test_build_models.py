"""medusa-build really builds plans of exported models: a tiny one per family, and the demo model. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import pytest
from command_checks import Commands

from medusa_engine.runtime.manifest import read_manifest
from medusa_engine.runtime.plan import check_plan_files, read_plan

ROWS, STOPS = 24, 2
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": [1, 2],
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}
DEMO_HEADS = demo_model.ROOT / "heads" / "smollm2-135m-instruct"
DEMO_TREE = demo_model.ROOT / "trees" / "smollm2.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports a tiny model of a family in a precision, each once; gives the bundle."""
    bundles: dict[tuple[str, str], Path] = {}

    def bundle_of(family: str, precision: str, *options: str) -> Path:
        import torch
        from tiny_models import export
        from transformers import AutoConfig, AutoModelForCausalLM

        if (family, precision) not in bundles:
            folder = tmp_path_factory.mktemp(f"{family}-{precision}")
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            sizes = ("--max-length", "96", "--top-k", "5", "--max-tree-nodes", str(ROWS), "--untrained-heads", "3")
            target = ("--target", "tensorrt", "--precision", precision)
            bundles[family, precision] = export(folder, folder / "bundle", *sizes, *target, *options).bundle
        return bundles[family, precision]

    return bundle_of


def check_plan(path: Path, bundle: Path, capability: str) -> None:
    """The tensors are checked against the manifest while it is built; here, against the model."""
    plan = read_plan(path)
    check_plan_files(path, plan)
    assert plan.bundle == read_manifest(bundle)
    assert (plan.compute_capability, plan.compaction) == (capability, "function")
    assert plan.builder["attention"] == "fused"
    limits = plan.bundle.limits
    cache = (1, limits.kv_heads, limits.max_length + limits.max_tree_nodes + limits.heads + 1, limits.head_dim)
    tensors = {tensor.name: tensor for tensor in plan.io}
    for layer in range(limits.layers):
        for kind in ("key", "value"):
            past, present = tensors[f"past_{kind}.{layer}"], tensors[f"present_{kind}.{layer}"]
            assert (past.shape, past.dtype) == (present.shape, present.dtype) == (cache, plan.bundle.dtype)
    assert tensors["next_input_ids"].shape == (1, limits.max_tree_nodes)
    assert plan.profiles[0].rows == (limits.max_tree_nodes,) * 3
    assert plan.profiles[1].rows[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "capabilities"),
    [
        ("llama", "fp16", ("8.9", "12.0")),
        ("llama", "bf16", ("8.9", "12.0")),
        ("mistral", "fp16", ("8.9",)),
        ("qwen2", "bf16", ("8.9",)),
        ("qwen3", "fp16", ("8.9",)),
        ("gemma3_text", "bf16", ("8.9",)),
    ],
)
def test_plan_of_each_family(
    family: str,
    precision: str,
    capabilities: tuple[str, ...],
    exported: Callable[..., Path],
    tmp_path: Path,
    commands: Commands,
) -> None:
    bundle = exported(family, precision)
    for capability in capabilities:
        path = tmp_path / f"{capability}.plan"
        commands.build(bundle, "--flavor", "tensorrt-rtx", "--compute-capability", capability, "-o", path)
        check_plan(path, bundle, capability)


@pytest.mark.slow
def test_plan_of_each_policy(exported: Callable[..., Path], tmp_path: Path, commands: Commands) -> None:
    bundle = exported("qwen2", "fp16", "--acceptance", "sample,typical")
    for policy in ("greedy", "sample", "typical"):
        path = tmp_path / f"{policy}.plan"
        options = ("--flavor", "tensorrt-rtx", "--compute-capability", "8.9", "--acceptance", policy)
        commands.build(bundle, *options, "-o", path)
        check_plan(path, bundle, "8.9")
        plan = read_plan(path)
        assert plan.acceptance == policy
        assert ("uniforms" in {tensor.name for tensor in plan.io}) == (policy != "greedy")


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for TensorRT in fp16."""
    from medusa_engine.exporter.cli import main

    folder = tmp_path_factory.mktemp("demo") / "smollm2-135m"
    source = ("--model", demo_model.GGUF, "--heads", DEMO_HEADS, "--tree", DEMO_TREE, "--top-k", "16")
    target = ("--target", "tensorrt", "--precision", "fp16", "-o", folder)
    assert main([str(argument) for argument in (*source, *target)]) == 0
    return folder


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.9", "12.0"])
def test_plan_of_the_demo_model(
    capability: str, demo_bundle: Path, tmp_path: Path, commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "smollm2-135m.plan"
    printed = commands.build(demo_bundle, "--compute-capability", capability, "-o", path)
    with capfd.disabled():
        print(f"\n{printed}")
    check_plan(path, demo_bundle, capability)
    limits = read_plan(path).bundle.limits
    assert (limits.layers, limits.max_tree_nodes, limits.cache_rows) == (30, 64, 2048 + 64 + 3 + 1)
