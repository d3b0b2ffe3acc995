"""A run of Medusa-1 training: data folder and backbone in, heads out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.head_checkpoint import HEAD_FILES, HeadCheckpoint, write_checkpoint
from medusa_engine.exporter.head_formats import ORIGINAL, VLLM
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json
from medusa_engine.training.device import choose_device, choose_dtype
from medusa_engine.training.features import load_features, shard_paths
from medusa_engine.training.json_file import write_json
from medusa_engine.training.medusa1 import HeadTrainer, TrainSettings
from medusa_engine.training.shards import MANIFEST_NAME
from medusa_engine.training.training_log import TrainingLog
from medusa_engine.training.vocabulary import Vocabulary, draft_vocabulary

_COUNTS = ("heads", "layers", "epochs", "batch", "accumulate", "draft_vocabulary")
_CHOSEN = (*_COUNTS[:-1], "learning_rate", "weight_decay", "soft", "seed", "own_projection")


def run(options: argparse.Namespace) -> None:
    """Train as the options of `medusa-train` say, and write the heads.

    Raises:
        UserError: see `medusa-train`.
    """
    _check(options)
    device = choose_device(options.device)
    chosen: dict[str, Any] = {name: getattr(options, name) for name in _CHOSEN if getattr(options, name) is not None}
    settings = TrainSettings(**chosen, device=device, dtype=choose_dtype(options.dtype, device))
    paths = shard_paths(options.data)
    data = read_json(options.data / MANIFEST_NAME, max_bytes=1 << 20, hint="write the data with medusa-distill")
    source = checkpoint.find_source(options.model)
    if source.adapter is not None:
        raise UserError(
            f"{options.model}: an adapter with heads, not a base model", "give its base, or train it with --merge first"
        )
    model = checkpoint.load_model(source)
    projection = model.get_output_embeddings().weight.detach().clone()
    del model

    training = load_features(paths, settings.heads, held_out=False)
    held_out = load_features(paths, settings.heads, held_out=True)
    if training.hidden.shape[1] != projection.shape[1]:
        raise UserError(
            f"{options.data}: hidden states of {training.hidden.shape[1]}, but the model has {projection.shape[1]}",
            "give the model that wrote the data",
        )
    if (largest := int(training.labels.max())) >= len(projection):
        raise UserError(
            f"{options.data}: holds token {largest}, but the model has {len(projection)}",
            "give the model that wrote the data",
        )
    _report(f"{len(training)} training and {len(held_out)} held-out positions")
    token_map = draft_vocabulary(training, options.draft_vocabulary) if options.draft_vocabulary else None
    _make_folder(options)
    log = TrainingLog(options.output, settings.heads, report=_report)
    weights = HeadTrainer(settings, Vocabulary(projection, token_map), options.output, log).run(training, held_out)
    _report(f"losses and accuracies: {log.plot()}")
    if token_map is not None:
        weights = weights.with_token_map(torch.from_numpy(token_map))
    written = HeadCheckpoint((options.output,), ORIGINAL, weights.half(), "float16", biases=True, base=None, notes=())
    write_checkpoint(written, VLLM if token_map is not None else ORIGINAL, options.output / HEAD_FILES[0])
    config = {
        "base_model_name_or_path": options.base or options.model,
        "medusa_num_heads": settings.heads,
        "medusa_num_layers": settings.layers,
    }
    write_json(options.output / "config.json", config, indent=2)
    facts = {
        "settings": asdict(settings) | {"draft_vocabulary": None if token_map is None else len(token_map)},
        "positions": {"training": len(training), "held_out": len(held_out)},
        "held_out": log.best_epoch(),
        "data": data,
        "versions": {name: version(name) for name in ("medusa-engine", "torch", "transformers")},
    }
    write_json(options.output / "training.json", facts, indent=2)
    print(options.output)


def _check(options: argparse.Namespace) -> None:
    checks = [(name, lambda value: value >= 1, "give 1 or more") for name in _COUNTS]
    checks += [
        ("learning_rate", lambda value: value > 0, "give a number above 0"),
        ("weight_decay", lambda value: value >= 0, "give 0 or more"),
        ("soft", lambda value: 0 <= value <= 1, "give a share from 0 to 1"),
        ("seed", lambda value: value >= 0, "give 0 or more"),
    ]
    for name, fits, hint in checks:
        value = getattr(options, name)
        if value is not None and not fits(value):
            raise UserError(f"--{name.replace('_', '-')} is {value}", hint)


def _make_folder(options: argparse.Namespace) -> None:
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{options.output}: cannot make the folder: {error.strerror or error}", "give another --output"
        ) from error


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
