"""`medusa-train`: train Medusa heads on feature shards (Medusa-1: the backbone stays as it is)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_engine.runtime.command_line import run_command
from medusa_engine.runtime.errors import UserError
from medusa_engine.training import medusa2_cli


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-train",
        description="Train Medusa heads on data of medusa-distill; goes on where it was interrupted.",
    )
    parser.add_argument("--model", required=True, help="the backbone: Hugging Face folder, hub id or .gguf file")
    parser.add_argument("--data", required=True, type=Path, help="data folder written by medusa-distill")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder of the heads")
    parser.add_argument("--heads", type=int, help="K; default: 4")
    parser.add_argument("--layers", type=int, help="residual blocks per head; default: 1")
    parser.add_argument("--epochs", type=int, help="at most this many passes over the data; default: 4")
    parser.add_argument("--batch", type=int, help="positions per optimiser step; default: 2048")
    parser.add_argument("--accumulate", type=int, help="forward passes a batch is split into; default: 1")
    parser.add_argument("--learning-rate", type=float, help="default: 0.002")
    parser.add_argument("--weight-decay", type=float, help="default: 0.01")
    parser.add_argument("--soft", type=float, help="share of the target's distribution in the loss; default: 1")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument(
        "--draft-vocabulary", type=int, metavar="N", help="heads choose from the N most frequent tokens"
    )
    medusa2_cli.add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    if options.method != medusa2_cli.MEDUSA_1:
        _run_medusa2(options)
        return
    medusa2_cli.refuse_options(options)
    import torch

    from medusa_engine.exporter import checkpoint
    from medusa_engine.exporter.head_checkpoint import HEAD_FILES, HeadCheckpoint, write_checkpoint
    from medusa_engine.exporter.head_formats import ORIGINAL, VLLM
    from medusa_engine.training.features import load_features, shard_paths
    from medusa_engine.training.medusa1 import HeadTrainer, TrainSettings, Vocabulary, draft_vocabulary

    names = ("heads", "layers", "epochs", "batch", "accumulate", "learning_rate", "weight_decay", "soft", "seed")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = TrainSettings(**chosen)
    paths = shard_paths(options.data)
    source = checkpoint.find_source(options.model)
    model = checkpoint.load_model(source)
    projection = model.get_output_embeddings().weight.detach().clone()
    del model

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    training = load_features(paths, settings.heads, held_out=False)
    held_out = load_features(paths, settings.heads, held_out=True)
    if training.hidden.shape[1] != projection.shape[1]:
        raise UserError(
            f"{options.data}: hidden states of {training.hidden.shape[1]}, but the model has {projection.shape[1]}",
            "give the model that wrote the data",
        )
    report(f"{len(training)} training and {len(held_out)} held-out positions")
    token_map = draft_vocabulary(training, options.draft_vocabulary) if options.draft_vocabulary else None
    options.output.mkdir(parents=True, exist_ok=True)
    trainer = HeadTrainer(settings, Vocabulary(projection, token_map), options.output, report=report)
    weights = trainer.run(training, held_out)
    if token_map is not None:
        weights = weights.with_token_map(torch.from_numpy(token_map))
    written = HeadCheckpoint((options.output,), ORIGINAL, weights.half(), "float16", biases=True, base=None, notes=())
    write_checkpoint(written, VLLM if token_map is not None else ORIGINAL, options.output / HEAD_FILES[0])
    config = {
        "base_model_name_or_path": source.name,
        "medusa_num_heads": settings.heads,
        "medusa_num_layers": settings.layers,
    }
    (options.output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(options.output)


def _run_medusa2(options: argparse.Namespace) -> None:
    if options.model.endswith(".gguf"):
        os.environ.setdefault("TQDM_DISABLE", "1")  # as medusa-export does
    try:
        from medusa_engine.training import medusa2_run
    except ModuleNotFoundError as error:
        raise UserError(
            f"the package {error.name} is not installed",
            "install what training needs: pip install '.[train]' in a clone of medusa-engine",
        ) from error
    medusa2_run.run(options)


if __name__ == "__main__":
    sys.exit(main())
