"""The options of `medusa-train` that belong to Medusa-2, and what was chosen."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from medusa_engine.runtime.errors import UserError

MEDUSA_1, MEDUSA_2, MEDUSA_2_DISTILL = METHODS = ("medusa-1", "medusa-2", "medusa-2-distill")
MOST_RANK = 4096
_OWN_OPTIONS = {
    "output_dir": "--output",
    "seed": "--seed",
    "learning_rate": "--learning-rate",
    "weight_decay": "--weight-decay",
    "num_train_epochs": "--epochs",
    "per_device_train_batch_size": "--batch",
    "gradient_accumulation_steps": "--accumulate",
    "bf16": "--bf16",
}
_MEDUSA_1_ONLY = ("biases", "own_projection", "soft", "draft_vocabulary", "train_on_inputs", "init", "base", "device")


@dataclass(frozen=True)
class Medusa2Settings:
    """How backbone and heads are trained together.

    Attributes:
        heads, layers: K heads of that many residual blocks.
        lora_rank, lora_alpha: of the adapter; its change of a layer is scaled by alpha / rank.
        epochs: passes over the data.
        batch: packed rows per optimiser step and process.
        accumulate: forward passes a batch is split into; the result is that of the whole batch.
        warmup_steps: optimiser steps that train the heads alone; None for a tenth of all.
        learning_rate, weight_decay: of the backbone's adapter.
        heads_learning_rate_factor: the heads' learning rate over the backbone's.
        lambda_0: weight of the heads' losses; None for 0.2, or 0.01 with medusa-2-distill.
        max_length: tokens of a packed row.
        dtype: of the backbone's frozen weights; adapter and heads are float32.
        bf16: compute in bfloat16 (mixed precision).
        merge: write the backbone with the adapter merged, instead of the adapter.
        resume: True for the newest checkpoint in the output folder, or the folder of one.
        seed: of initial weights and order.
        trainer: other arguments of transformers' TrainingArguments.
    """

    heads: int = 4
    layers: int = 1
    lora_rank: int = 32
    lora_alpha: int = 16
    epochs: int = 2
    batch: int = 8
    accumulate: int = 1
    warmup_steps: int | None = None
    learning_rate: float = 5e-4
    weight_decay: float = 0.0
    heads_learning_rate_factor: float = 4.0
    lambda_0: float | None = None
    max_length: int = 2048
    dtype: str = "float32"
    bf16: bool = False
    merge: bool = False
    resume: str | bool | None = None
    seed: int = 0
    trainer: dict[str, Any] = field(default_factory=dict)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--method` and the options of Medusa-2; what is not given stays None."""
    default = Medusa2Settings
    parser.add_argument(
        "--method",
        choices=METHODS,
        default=MEDUSA_1,
        help="medusa-1: heads alone; medusa-2: heads and a LoRA adapter of the backbone; medusa-2-distill: the same, "
        "with the backbone as its own teacher; default: %(default)s",
    )
    group = parser.add_argument_group(
        "medusa-2",
        "Of the options above, --batch counts packed rows per optimiser step and process (default: "
        f"{default.batch}), --epochs defaults to {default.epochs}, --learning-rate is the backbone's (default: "
        f"{default.learning_rate}), --weight-decay defaults to {default.weight_decay:g}, and --dtype is that of the "
        f"frozen weights (default: {default.dtype}). Several GPUs: start it "
        "with torchrun or accelerate launch -m medusa_engine.training.train_cli.",
    )
    group.add_argument("--lora-rank", type=int, help=f"default: {default.lora_rank}")
    group.add_argument("--lora-alpha", type=int, help=f"default: {default.lora_alpha}")
    group.add_argument(
        "--warmup-steps", type=int, metavar="N", help="the first N steps train the heads alone; default: a tenth of all"
    )
    group.add_argument(
        "--heads-learning-rate-factor",
        type=float,
        metavar="F",
        help=f"learning rate of the heads over the backbone's; default: {default.heads_learning_rate_factor:g}",
    )
    group.add_argument(
        "--lambda",
        type=float,
        dest="lambda_0",
        metavar="L",
        help="weight of the heads' losses; default: 0.2, or 0.01 with medusa-2-distill",
    )
    group.add_argument("--max-length", type=int, help=f"tokens of a packed row; default: {default.max_length}")
    group.add_argument("--bf16", action="store_true", default=None, help="compute in bfloat16 (mixed precision)")
    group.add_argument(
        "--merge", action="store_true", default=None, help="write the whole model, not the adapter and the heads"
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint in the output folder, or from this one",
    )
    group.add_argument(
        "--trainer",
        action="append",
        metavar="NAME=VALUE",
        help="any other argument of transformers' TrainingArguments, such as save_steps=100; may be repeated",
    )


def chosen_settings(options: argparse.Namespace) -> Medusa2Settings:
    """What was chosen for Medusa-2, the rest by default.

    Raises:
        UserError: an option is another method's, or has no sensible value.
    """
    for name in _MEDUSA_1_ONLY:
        if getattr(options, name) is not None:
            raise UserError(f"{_option(name)} is an option of --method {MEDUSA_1}", "leave it out")
    names = [entry.name for entry in fields(Medusa2Settings)]
    chosen = {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}
    if "trainer" in chosen:
        chosen["trainer"] = dict(_trainer_argument(text) for text in chosen["trainer"])
    settings = Medusa2Settings(**chosen)
    for name in ("heads", "layers", "lora_rank", "lora_alpha", "epochs", "batch", "accumulate"):
        _check(name, getattr(settings, name) >= 1, settings, "give 1 or more")
    for name in ("heads", "layers"):
        _check(name, getattr(settings, name) <= 64, settings, "give at most 64")
    _check("lora_rank", settings.lora_rank <= MOST_RANK, settings, f"give at most {MOST_RANK}")
    for name in ("learning_rate", "heads_learning_rate_factor"):
        _check(name, 0 < getattr(settings, name) < math.inf, settings, "give a number above 0")
    for name in ("weight_decay", "warmup_steps", "lambda_0"):
        _check(name, 0 <= (getattr(settings, name) or 0) < math.inf, settings, "give 0 or more")
    _check("seed", 0 <= settings.seed < 1 << 32, settings, f"give a number from 0 to {(1 << 32) - 1}")
    for name in settings.trainer.keys() & _OWN_OPTIONS.keys():
        raise UserError(f"--trainer {name}: has an option of its own", f"give {_OWN_OPTIONS[name]}")
    _check("max_length", settings.max_length >= 2, settings, "give 2 or more")
    if settings.batch % settings.accumulate:
        raise UserError(
            f"--accumulate {settings.accumulate} does not divide --batch {settings.batch}",
            "give a batch that is a multiple",
        )
    return settings


def refuse_options(options: argparse.Namespace) -> None:
    """Refuse options of Medusa-2 where heads alone are trained.

    Raises:
        UserError: one was given.
    """
    names = ("lora_rank", "lora_alpha", "warmup_steps", "heads_learning_rate_factor", "lambda_0", "max_length")
    for name in (*names, "bf16", "merge", "resume", "trainer"):
        if getattr(options, name) is not None:
            raise UserError(f"{_option(name)} is an option of --method {MEDUSA_2}", "leave it out, or give the method")


def _check(name: str, fine: bool, settings: Medusa2Settings, hint: str) -> None:
    if not fine:
        raise UserError(f"{_option(name)} is {getattr(settings, name)}", hint)


def _option(name: str) -> str:
    if name == "biases":
        return "--no-bias"
    return "--lambda" if name == "lambda_0" else f"--{name.replace('_', '-')}"


def _trainer_argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--trainer {text}: not of the form NAME=VALUE", "give for example save_steps=100")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def base_reference(model: str) -> str:
    """What a release calls its base: an absolute path, or the hub id."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
