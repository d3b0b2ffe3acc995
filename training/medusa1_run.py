"""A run of Medusa-1 training: data folder and backbone in, heads out."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import torch

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.head_checkpoint import HEAD_FILES, HeadCheckpoint, load_heads, write_checkpoint
from medusa_engine.exporter.head_formats import ORIGINAL, VLLM
from medusa_engine.exporter.heads import HeadWeights
from medusa_engine.exporter.output_file import make_folder
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.training.device import choose_device, choose_dtype
from medusa_engine.training.features import load_features, shard_paths
from medusa_engine.training.json_file import write_json
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.medusa1 import HeadTrainer
from medusa_engine.training.medusa1_settings import TrainSettings
from medusa_engine.training.shards import read_manifest
from medusa_engine.training.training_log import TrainingLog
from medusa_engine.training.vocabulary import Vocabulary, draft_vocabulary

MOST_HEADS = 64
_COUNTS = ("heads", "layers", "epochs", "batch", "accumulate", "draft_vocabulary")
_CHOSEN = (*_COUNTS[:-1], "learning_rate", "weight_decay", "soft", "seed", "own_projection", "biases")


def run(options: argparse.Namespace) -> None:
    """Train as the options of `medusa-train` say, and write the heads.

    Raises:
        UserError: see `medusa-train`.
    """
    _check(options)
    device = choose_device(options.device)
    chosen: dict[str, Any] = {name: getattr(options, name) for name in _CHOSEN if getattr(options, name) is not None}
    settings = TrainSettings(**chosen, device=device, dtype=choose_dtype(options.dtype, device))
    paths = shard_paths(*options.data)
    source = checkpoint.find_base(options.model)
    data = [read_manifest(folder, source.weight_files()) for folder in options.data]
    folders = ", ".join(map(str, options.data))
    make_folder(options.output)
    model = checkpoint.load_model(source)
    projection = model.get_output_embeddings().weight.detach().clone()
    del model
    start = None
    if options.init is not None:
        start = load_heads(options.init, hidden=projection.shape[1], vocab_size=len(projection))
        settings = _like_start(options, settings, start)

    training, held_out = load_features(paths, settings.heads, train_on_inputs=bool(options.train_on_inputs))
    if training.hidden.shape[1] != projection.shape[1]:
        raise UserError(
            f"{folders}: hidden states of {training.hidden.shape[1]}, but the model has {projection.shape[1]}",
            "give the model that wrote the data",
        )
    largest = max(int(ids.max()) for ids in (training.labels, training.top_ids, held_out.top_ids))
    if largest >= len(projection):
        raise UserError(
            f"{folders}: holds token {largest}, but the model has {len(projection)}",
            "give the model that wrote the data",
        )
    for head in range(settings.heads):
        if not (training.labels[:, head] != IGNORED).any():
            raise UserError(
                f"{folders}: no label for head {head}, which looks {counted(head + 2, 'token')} ahead",
                "give fewer --heads",
            )
    _report(f"{len(training)} training and {counted(len(held_out), 'held-out position')}")
    token_map = draft_vocabulary(training, options.draft_vocabulary) if options.draft_vocabulary else None
    if token_map is not None and len(token_map) < options.draft_vocabulary:
        _report(f"draft vocabulary: the data has only {counted(len(token_map), 'different label')}, all are in it")
    if start is not None and start.token_map is not None:
        token_map, start = start.token_map.numpy(), replace(start, token_map=None)  # the vocabulary applies it
    log = TrainingLog(options.output, settings.heads, report=_report)
    trainer = HeadTrainer(settings, Vocabulary(projection, token_map), options.output, log, start=start)
    weights = trainer.run(training, held_out)
    _report(f"losses and accuracies: {log.plot()}")
    if token_map is not None:
        weights = weights.with_token_map(torch.from_numpy(token_map))
    written = HeadCheckpoint(
        (options.output,), ORIGINAL, weights.half(), "float16", biases=settings.biases, base=None, notes=()
    )
    write_checkpoint(written, VLLM if token_map is not None else ORIGINAL, options.output / HEAD_FILES[0])
    config = {
        "base_model_name_or_path": options.base or options.model,
        "medusa_num_heads": settings.heads,
        "medusa_num_layers": settings.layers,
    }
    write_json(options.output / "config.json", config, indent=2)
    facts = {
        "settings": asdict(settings)
        | {
            "draft_vocabulary": None if token_map is None else len(token_map),
            "train_on_inputs": bool(options.train_on_inputs),
        },
        "init": None if start is None else {file.name: file_sha256(file) for file in start.files},
        "positions": {"training": len(training), "held_out": len(held_out)},
        "held_out": log.best_epoch(),
        "data": data,
        "versions": {name: version(name) for name in ("medusa-engine", "torch", "transformers")},
    }
    write_json(options.output / "training.json", facts, indent=2)
    print(options.output)


def _like_start(options: argparse.Namespace, settings: TrainSettings, start: HeadWeights) -> TrainSettings:
    """The settings with the shape of the heads to go on from, which no option may contradict."""
    shape = {"heads": start.heads, "layers": start.layers, "own_projection": start.projection is not None}
    biases = bool(start.residual_bias.any())
    for name, value in shape.items():
        if getattr(options, name) not in (None, value):
            raise UserError(
                f"--{name.replace('_', '-')}: {options.init} has {value}", "leave it out: heads keep their shape"
            )
    if not settings.biases and biases:
        raise UserError(f"--no-bias: {options.init} has biases", "leave it out: heads keep their shape")
    if options.draft_vocabulary is not None:
        raise UserError("--draft-vocabulary: heads to go on from have their vocabulary", "leave it out")
    if start.projection is not None and len(start.projection) != start.heads:
        raise UserError(f"{options.init}: one projection for all heads cannot be trained", "give other heads")
    return replace(settings, **shape, biases=biases)


def _check(options: argparse.Namespace) -> None:
    checks = [(name, lambda value: value >= 1, "give 1 or more") for name in _COUNTS]
    checks += [
        ("heads", lambda value: value <= MOST_HEADS, f"give at most {MOST_HEADS}"),
        ("layers", lambda value: value <= MOST_HEADS, f"give at most {MOST_HEADS}"),
        ("learning_rate", lambda value: 0 < value < math.inf, "give a number above 0"),
        ("weight_decay", lambda value: 0 <= value < math.inf, "give 0 or more"),
        ("soft", lambda value: 0 <= value <= 1, "give a share from 0 to 1"),
        ("seed", lambda value: value >= 0, "give 0 or more"),
    ]
    for name, fits, hint in checks:
        value = getattr(options, name)
        if value is not None and not fits(value):
            raise UserError(f"--{name.replace('_', '-')} is {value}", hint)
    batch = options.batch or TrainSettings.batch
    if (options.accumulate or 1) > batch:
        raise UserError(f"--accumulate {options.accumulate} is more than the batch of {batch}", "give fewer parts")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
