"""`medusa-train`: train Medusa heads on feature shards (Medusa-1: the backbone stays as it is)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medusa_engine.runtime.command_line import run_command
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.device import DTYPES, choose_device, choose_dtype


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
    parser.add_argument(
        "--own-projection", action="store_true", help="each head trains an LM projection of its own; default: shared"
    )
    parser.add_argument("--epochs", type=int, help="at most this many passes over the data; default: 4")
    parser.add_argument("--batch", type=int, help="positions per optimiser step; default: 2048")
    parser.add_argument("--accumulate", type=int, help="forward passes a batch is split into; default: 1")
    parser.add_argument("--learning-rate", type=float, help="default: 0.002")
    parser.add_argument("--weight-decay", type=float, help="default: 0.01")
    parser.add_argument("--soft", type=float, help="share of the target's distribution in the loss; default: 1")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--base", help="name of the base model in the heads' config.json; default: what --model says")
    parser.add_argument(
        "--draft-vocabulary", type=int, metavar="N", help="heads choose from the N most frequent tokens"
    )
    parser.add_argument("--device", help="where training runs; default: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 where the device computes in it, else float32"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="train")


def _run(options: argparse.Namespace) -> None:
    import torch

    from medusa_engine.exporter import checkpoint
    from medusa_engine.exporter.head_checkpoint import HEAD_FILES, HeadCheckpoint, write_checkpoint
    from medusa_engine.exporter.head_formats import ORIGINAL, VLLM
    from medusa_engine.runtime.strict_json import read_json
    from medusa_engine.training.features import load_features, shard_paths
    from medusa_engine.training.json_file import write_json
    from medusa_engine.training.medusa1 import HeadTrainer, TrainSettings
    from medusa_engine.training.shards import MANIFEST_NAME
    from medusa_engine.training.training_log import TrainingLog
    from medusa_engine.training.vocabulary import Vocabulary, draft_vocabulary

    names = ("heads", "layers", "epochs", "batch", "accumulate", "learning_rate", "weight_decay", "soft", "seed")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    device = choose_device(options.device)
    settings = TrainSettings(
        **chosen,
        own_projection=options.own_projection,
        device=device,
        dtype=choose_dtype(options.dtype, device),
    )
    paths = shard_paths(options.data)
    data = read_json(options.data / MANIFEST_NAME, max_bytes=1 << 20, hint="write the data with medusa-distill")
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
    log = TrainingLog(options.output, settings.heads, report=report)
    trainer = HeadTrainer(settings, Vocabulary(projection, token_map), options.output, log)
    weights = trainer.run(training, held_out)
    report(f"losses and accuracies: {log.plot()}")
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
        "settings": asdict(settings),
        "positions": {"training": len(training), "held_out": len(held_out)},
        "held_out": log.best_epoch(),
        "data": data,
        "versions": {name: version(name) for name in ("medusa-engine", "torch", "transformers")},
    }
    write_json(options.output / "training.json", facts, indent=2)
    print(options.output)


if __name__ == "__main__":
    sys.exit(main())
