"""The export itself: checkpoint and heads in, bundle out."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import transformers

from medusa_engine.exporter import bundle, checkpoint, graphs
from medusa_engine.exporter.backbone import check_backbone
from medusa_engine.exporter.check import check_logits, reference_logits
from medusa_engine.exporter.check_rows import check_rows
from medusa_engine.exporter.cost_facts import cost_facts, stored_facts
from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.exact_attention import use_exact_attention
from medusa_engine.exporter.experts import dense_experts
from medusa_engine.exporter.family import cache_sizes
from medusa_engine.exporter.generation_note import generation_note
from medusa_engine.exporter.head_checkpoint import fit_heads, read_checkpoint
from medusa_engine.exporter.heads import HeadWeights, MedusaHeads, no_heads, untrained_heads
from medusa_engine.exporter.rope import fixed_positions, fixed_rope
from medusa_engine.exporter.round import Round
from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.exporter.saved_tokenizer import save_tokenizer, stop_token_ids, write_generation_config
from medusa_engine.exporter.settings import BITS, DEFAULT_MAX_LENGTH, ExportSettings, check_settings
from medusa_engine.exporter.stage import stage
from medusa_engine.exporter.trace import EXAMPLE_ROWS, OPSET, trace_round
from medusa_engine.exporter.vocabulary import check_vocabulary
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import (
    GENERATION_NAME,
    TENSORRT,
    Limits,
    Manifest,
    cache_rows,
    file_sha256,
    graph_names,
    parse_limits,
    tree_names,
)
from medusa_engine.runtime.tree import Tree, check_tree, load_tree

_TOOLS = ("medusa-engine", "torch", "transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime")


@torch.no_grad()
def export(settings: ExportSettings) -> Path:
    """Export and return the bundle's folder; progress goes to standard error.

    Raises:
        UserError: see `medusa-export`; nothing is left at the output then.
    """
    check_settings(settings)
    trees = _load_trees(settings.trees)
    if settings.no_heads or settings.untrained_heads is not None:  # else the heads' file tells their number
        _check_trees(trees, settings, settings.untrained_heads or 0)
    source = checkpoint.find_source(settings.model)
    target = settings.output or Path("engines") / source.name.lower()
    place = target.resolve()  # what is checked is what is replaced: `..` and links are followed here, once
    for path in (target, place):
        bundle.check_target(path, force=settings.force)
    heads_path = _heads_path(settings, source)
    stored = None if heads_path is None else read_checkpoint(heads_path)
    if stored is not None:
        _check_trees(trees, settings, stored.weights.heads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is checked, and refused, here

    dtype = getattr(torch, settings.dtype)
    with stage(f"loading {source.path}"):
        model = checkpoint.load_model(source, settings.dtype)
        config, architecture = model.config.get_text_config(), type(model).__name__
        if stored is not None:
            heads = fit_heads(stored, hidden=config.hidden_size, vocab_size=config.vocab_size, dtype=dtype)
        elif settings.no_heads:
            heads = no_heads(config.hidden_size).to(dtype)
        else:
            heads = untrained_heads(settings.untrained_heads, config.hidden_size).to(dtype)
        check_backbone(heads, source.weight_files())
        with _traceable(source, architecture):
            limits = _limits(settings, model, heads, source.path)
    for note in heads.notes:
        print(f"note: {heads_path}: {note}", file=sys.stderr)
    if note := generation_note(model.generation_config):
        print(f"note: {source.path}: {note}", file=sys.stderr)
    with bundle.new_bundle(place, force=settings.force) as folder:
        with stage("writing tokenizer and tree"):
            tokenizer = save_tokenizer(source, folder)
            if tokenizer is not None:
                check_vocabulary(source.path, tokenizer, limits.vocab_size)
            stop_ids = stop_token_ids(model, tokenizer)
            write_generation_config(folder / GENERATION_NAME, stop_ids)
            fixed = settings.target == TENSORRT
            quantised = settings.weights in BITS
            shape = RoundShape.of(limits, stop_ids=len(stop_ids), fixed=fixed, exact=quantised, dtype=dtype)
            for name, tree in zip(tree_names(len(trees)), trees, strict=True):
                _write_tree(folder / name, tree)
        with (
            stage(f"tracing {counted(limits.layers, 'layer')} and {counted(limits.heads, 'head')}"),
            _traceable(source, architecture),
        ):
            if shape.exact:
                use_exact_attention(model)
            medusa_heads = MedusaHeads(heads, model.get_output_embeddings())
            round_module = Round(
                model, medusa_heads, shape, settings.policies, repetition_penalty=settings.repetition_penalty
            )
            with fixed_rope(model), dense_experts(model):
                traced = trace_round(round_module)
        probe = (folder / "check" if quantised else folder) / "check.onnx"
        with stage("fusing and writing graphs and weights"), _traceable(source, architecture):
            graphs.finish_graph(traced, shape)
            probe.parent.mkdir(exist_ok=True)
            graphs.write_weights(traced, probe.parent)
            graphs.write_graph(traced, probe, shape, graph_name="round", logits=True)
            if not quantised:
                _write_graphs(traced, folder, shape, settings)
                del traced
        with stage("comparing logits with transformers"), _traceable(source, architecture):
            reference = reference_logits(model, shape)
            facts = {"hidden_size": config.hidden_size, **cost_facts(model)}
            if not quantised:  # from here on the weights are those of the bundle
                for parameter in round_module.parameters():
                    parameter.data = torch.empty(0)
            check_logits(reference, probe, shape)
            probe.unlink()
        if quantised:
            with stage(f"quantising to {settings.weights}, comparing rows of a tree with plain decoding"):
                facts |= stored_facts(graphs.quantize(traced, settings.weights), facts["layer_weights"])
                graphs.write_weights(traced, folder)
                shutil.rmtree(probe.parent)
                probe = folder / "check.onnx"
                graphs.write_graph(traced, probe, shape, graph_name="round", logits=True)
                check_rows(probe, shape)
                probe.unlink()
                _write_graphs(traced, folder, shape, settings)
        with stage("writing the manifest"):
            manifest = _manifest(target.name, limits, source, architecture, facts, heads, folder, settings)
            bundle.write_manifest(folder, manifest)
            bundle.check_readable(folder)
    return target


def _load_trees(paths: Sequence[Path]) -> list[Tree]:
    """Trees that differ in name, which reports call them by, and in paths."""
    trees: list[Tree] = []
    for path in paths:
        tree = load_tree(path)
        for other in trees:
            if tree.paths == other.paths:
                raise UserError(f"{path}: the tree {other.name} has the same paths", "give every tree once")
            if tree.name == other.name:
                raise UserError(
                    f"{path}: another tree is called {tree.name}, too", 'give one of them another "name" or file name'
                )
        trees.append(tree)
    return trees


def _check_trees(trees: Sequence[Tree], settings: ExportSettings, heads: int) -> None:
    for tree in trees:
        check_tree(
            tree,
            heads=heads,
            topk=settings.topk,
            max_tree_nodes=settings.max_tree_nodes,
            lookup=settings.lookup_nodes(heads),
        )


def _heads_path(settings: ExportSettings, source: checkpoint.Source) -> Path | None:
    """Where the heads are, or None for untrained ones and for none."""
    if settings.untrained_heads or settings.no_heads:
        return None
    if settings.heads is not None:
        path = Path(settings.heads).expanduser()
        return path if path.is_file() else checkpoint.find_folder(settings.heads, what="heads checkpoint")
    if source.heads is None:
        raise UserError(
            f"{settings.model}: has no Medusa heads",
            "give --heads, --no-heads to let the context alone propose, or --untrained-heads K",
        )
    return source.heads


def _limits(settings: ExportSettings, model: Any, heads: HeadWeights, path: Path) -> Limits:
    config = model.config.get_text_config()
    trained = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
    positions, rope_type = fixed_positions(config) or (trained, None)
    max_length = settings.max_length or min(DEFAULT_MAX_LENGTH, positions)
    if max_length > positions:
        why = f"; past them its rope ({rope_type}) would rotate the keys in the cache anew" if rope_type else ""
        raise UserError(
            f"--max-length {max_length} is beyond the {counted(positions, 'position')} of the model{why}",
            f"give at most {positions}",
        )
    choices = config.vocab_size if heads.token_map is None else len(heads.token_map)
    if settings.topk > choices:
        raise UserError(
            f"--top-k {settings.topk} is more than the {counted(choices, 'token')} the heads choose from",
            f"give at most {choices}",
        )
    lookup, sizes = settings.lookup_nodes(heads.heads), cache_sizes(model)
    depth = max(heads.heads, lookup)
    limits = Limits(
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        cache_rows=max(cache_rows(settings.target, max_length, depth, settings.max_tree_nodes), EXAMPLE_ROWS),
        max_length=max_length,
        heads=heads.heads,
        topk=settings.topk,
        max_tree_nodes=settings.max_tree_nodes,
        vocab_size=config.vocab_size,
        lookup=lookup,
    )
    try:
        parse_limits(asdict(limits), settings.target, path)
    except UserError as error:  # what opens the bundle would say
        raise UserError(error.problem, "give another --max-length, or correct the model's config") from error
    if rope_type and settings.max_length is None and positions < min(DEFAULT_MAX_LENGTH, trained):
        print(f"note: --max-length is {positions}: as far as the model's rope ({rope_type}) is fixed", file=sys.stderr)
    return limits


def _write_tree(path: Path, tree: Tree) -> None:
    """From what was read and checked: the user's file may be a pipe, or may have changed."""
    document = {"name": tree.name, "paths": tree.document(), **tree.metadata}
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")


def _graph_names(settings: ExportSettings) -> list[str]:
    return graph_names(settings.policies, repetition_penalty=settings.repetition_penalty, target=settings.target)


def _write_graphs(traced: ir.Model, folder: Path, shape: RoundShape, settings: ExportSettings) -> None:
    for name in _graph_names(settings):
        graphs.write_graph(traced, folder / _graph_file(name), shape, graph_name=name)


def _graph_file(name: str) -> str:
    return f"{name}.onnx"


def _manifest(
    name: str,
    limits: Limits,
    source: checkpoint.Source,
    architecture: str,
    facts: dict[str, Any],
    heads: HeadWeights,
    folder: Path,
    settings: ExportSettings,
) -> Manifest:
    return Manifest(
        name=name,
        target=settings.target,
        dtype=settings.dtype,
        weights=settings.weights,
        limits=limits,
        model={
            "name": source.name,
            "architecture": architecture,
            **facts,
            "weights_sha256": {file.name: file_sha256(file) for file in source.weight_files()},
        },
        heads={
            "source": heads.source,
            "trained": heads.trained,
            "residual_layers": heads.layers,
            "projection": "shared" if heads.projection is None else "own",
            "projections": heads.projections,
            "draft_vocabulary": None if heads.token_map is None else len(heads.token_map),
            "sha256": {file.name: file_sha256(file) for file in heads.files},
        },
        tools={"opset": OPSET, **{tool: version(tool) for tool in _TOOLS}},
        graphs={graph: _graph_file(graph) for graph in _graph_names(settings)},
        files=bundle.file_facts(folder),
        policies=settings.policies,
        repetition_penalty=settings.repetition_penalty,
        trees=tuple(tree_names(len(settings.trees))),
    )


@contextmanager
def _traceable(source: checkpoint.Source, architecture: str) -> Iterator[None]:
    """Name the model when its architecture is not one that can be traced, whatever that trips over."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UserError(
            f"{source.path}: {architecture} cannot be exported: {type(cause).__name__}: {first_line(cause)}",
            "give a decoder that computes attention through transformers' attention interface, as Llama and Qwen do",
        ) from error
