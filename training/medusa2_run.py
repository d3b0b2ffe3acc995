"""A run of Medusa-2 training: data and backbone in, release out."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.trainer_utils import get_last_checkpoint

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.output_file import make_folder, writing
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import read_json
from medusa_engine.training.features import shard_paths
from medusa_engine.training.json_file import write_json
from medusa_engine.training.medusa2_cli import MEDUSA_2_DISTILL, Medusa2Settings, base_reference, chosen_settings
from medusa_engine.training.medusa2_data import RowCollator, packed_rows, shard_examples
from medusa_engine.training.medusa2_loss import DIRECT_LAMBDA, DISTILLED_LAMBDA
from medusa_engine.training.medusa2_model import Medusa2, add_adapter, load_backbone
from medusa_engine.training.medusa2_release import write_adapter_release, write_merged_release
from medusa_engine.training.medusa2_trainer import Medusa2Trainer, plot_log

FACTS_NAME = "training.json"


def run(options: argparse.Namespace) -> None:
    """Train as the options of `medusa-train` say, and write the release.

    Raises:
        UserError: see `medusa-train`.
    """
    try:
        _train(options)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():  # started by torchrun or accelerate
            torch.distributed.destroy_process_group()  # else its threads may abort a process that is about to exit


def _train(options: argparse.Namespace) -> None:
    settings = chosen_settings(options)
    paths = shard_paths(*options.data)
    data = ", ".join(map(str, options.data))
    make_folder(options.output)
    arguments = training_arguments(settings, options.output)
    resumed = _checkpoint(settings, options.output)
    chosen = {"method": options.method, "settings": asdict(settings) | {"resume": None}, "shards": len(paths)}
    if resumed is not None:
        _check_resumed(options.output / FACTS_NAME, chosen)
    source = checkpoint.find_base(options.model)
    transformers.set_seed(arguments.seed)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is checked, and refused, when loading
    model = load_backbone(source, getattr(torch, settings.dtype))
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or settings.max_length
    pad_id = config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0
    rows = packed_rows(shard_examples(paths), min(settings.max_length, positions), pad_id, name=data)
    if max(int(row.input_ids.max()) for row in rows) >= config.vocab_size:
        raise UserError(
            f"{data}: holds tokens past the model's vocabulary of {config.vocab_size}",
            "give the model that wrote the data",
        )
    print(counted(len(rows), "packed row"), file=sys.stderr, flush=True)
    adapted = add_adapter(model, rank=settings.lora_rank, alpha=settings.lora_alpha)
    trained = Medusa2(adapted, heads=settings.heads, layers=settings.layers)
    distilled = options.method == MEDUSA_2_DISTILL
    default_lambda = DISTILLED_LAMBDA if distilled else DIRECT_LAMBDA
    trainer = Medusa2Trainer(
        trained,
        arguments,
        lambda_0=default_lambda if settings.lambda_0 is None else settings.lambda_0,
        warmup_steps=settings.warmup_steps,
        heads_factor=settings.heads_learning_rate_factor,
        distilled=distilled,
        train_dataset=rows,
        data_collator=RowCollator(settings.heads),
    )
    if resumed is None and trainer.is_world_process_zero():
        write_json(options.output / FACTS_NAME, chosen, indent=2)
    with writing(options.output, also=(SafetensorError,)):
        try:
            trainer.train(resume_from_checkpoint=resumed)
        except RuntimeError as error:
            if "PytorchStreamWriter" in str(error) or "file write failed" in str(error):  # torch's own for a full disk
                raise OSError(first_line(error)) from error
            raise
    if trainer.is_world_process_zero():
        print(f"losses and accuracies: {plot_log(options.output, settings.heads)}", file=sys.stderr, flush=True)
        if settings.merge:
            write_merged_release(trained, source, options.output)
        else:
            write_adapter_release(trained, base_reference(options.model), options.output)
        print(options.output)


def training_arguments(settings: Medusa2Settings, output: Path) -> transformers.TrainingArguments:
    """The arguments of transformers' Trainer.

    Raises:
        UserError: it does not know one of those given with `--trainer`.
    """
    arguments = {
        "output_dir": str(output),
        "per_device_train_batch_size": settings.batch // settings.accumulate,
        "gradient_accumulation_steps": settings.accumulate,
        "num_train_epochs": settings.epochs,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "seed": settings.seed,
        "bf16": settings.bf16,
        "logging_steps": 10,
        "save_steps": 200,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "ddp_find_unused_parameters": settings.warmup_steps != 0,  # the adapter is unused in the first stage
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    defaults = {entry.name: entry.default for entry in fields(transformers.TrainingArguments)}
    for name, value in settings.trainer.items():
        usual = defaults.get(name)
        if isinstance(usual, (bool, int, float)) and not isinstance(value, (bool, int, float)):
            raise UserError(f"--trainer {name}={value}: not a number or true or false", f"its default is {usual}")
    try:
        return transformers.TrainingArguments(**(arguments | settings.trainer))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"transformers refuses the training arguments: {error}", "see its TrainingArguments for names and values"
        ) from error


def _check_resumed(path: Path, chosen: dict[str, Any]) -> None:
    """Refuse to go on with another method, other settings or other data than the run began with."""
    hint = "give the options of that run, or another --output"
    before = read_json(path, max_bytes=1 << 20, hint=hint)
    wanted = json.loads(json.dumps(chosen))
    if before != wanted:
        known = before if isinstance(before, dict) else {}
        flat = {**wanted, **wanted["settings"]}
        old = {**known, **known.get("settings", {})}
        changed = [name for name in flat if name != "settings" and old.get(name) != flat[name]]
        raise UserError(f"{path}: the run began with another value of {', '.join(changed) or 'its settings'}", hint)


def _checkpoint(settings: Medusa2Settings, output: Path) -> str | None:
    """The checkpoint to go on from, or None for a fresh start."""
    newest = get_last_checkpoint(str(output)) if output.is_dir() else None
    if newest is None and any([*output.glob("*.safetensors"), *output.glob("config.json")]):
        raise UserError(f"{output}: holds a model already", "give another --output")
    if settings.resume is None:
        if newest is not None:
            raise UserError(
                f"{output}: holds checkpoints of an earlier run", "go on there with --resume, or give another --output"
            )
        return None
    if settings.resume is True:
        if newest is None:
            raise UserError(f"{output}: holds no checkpoint to resume", "leave out --resume")
        return newest
    if not Path(str(settings.resume)).is_dir():
        raise UserError(f"--resume {settings.resume}: there is no such folder", "give a checkpoint-N folder")
    return str(settings.resume)
