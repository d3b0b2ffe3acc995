"""Small Medusa-2 trainings: a random Llama, conversations, and the parts around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import RANDOM_VOCAB, random_llama

from medusa_engine.exporter import checkpoint
from medusa_engine.training.example import Example
from medusa_engine.training.medusa2_data import RowCollator
from medusa_engine.training.medusa2_model import Medusa2, add_adapter, load_backbone
from medusa_engine.training.medusa2_trainer import Medusa2Trainer
from medusa_engine.training.packing import PackedRow, pack
from medusa_engine.training.shards import KEPT_TOP, ShardWriter, StoredConversation

HEADS, LAYERS, RANK, LENGTH = 3, 1, 4, 24


def save_base(folder: Path, *, tied: bool = False) -> Path:
    """Save a random Llama without heads."""
    random_llama(folder, tied=tied, seed=21)
    return folder


def conversations(count: int, *, longest: int = 20, seed: int = 0) -> list[Example]:
    """Random tokens of 5 to `longest`, of which a random share is the assistant's."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(generator.integers(5, longest + 1))
        owned = generator.random(length) < generator.random()
        found.append(Example(generator.integers(0, RANDOM_VOCAB, length), owned))
    return found


def save_shard(folder: Path, examples: Sequence[Example]) -> Path:
    """Write conversations as a data folder of medusa-distill; what Medusa-2 does not read is zero."""
    folder.mkdir()
    writer = ShardWriter(folder, len(examples))
    for number, (tokens, owned) in enumerate(examples, start=1):
        top = np.zeros((len(tokens), KEPT_TOP))
        states = np.zeros((len(tokens), 1), dtype=np.float16)
        ids, logprobs = top.astype(np.int32), top.astype(np.float16)
        writer.add(StoredConversation(number, tokens.astype(np.int32), owned, states, ids, logprobs))
    return folder


def new_model(base: Path, *, attention: str = "sdpa") -> Medusa2:
    """The base with a fresh adapter and heads, always the same ones."""
    torch.manual_seed(5)
    backbone = load_backbone(checkpoint.find_source(str(base)), torch.float32)
    backbone.set_attn_implementation(attention)
    return Medusa2(add_adapter(backbone, rank=RANK, alpha=2 * RANK), heads=HEADS, layers=LAYERS)


def shake(model: Medusa2, scale: float = 0.1) -> Medusa2:
    """Give adapter and heads random values."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for tensor in model.trained_state().values():
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return model


def rows_of(examples: Sequence[Example], length: int = LENGTH) -> list[PackedRow]:
    return list(pack(examples, length, 0))


def new_trainer(model: Medusa2, rows: list[PackedRow], folder: Path, **settings: Any) -> Medusa2Trainer:
    """A trainer on the CPU; `settings` are its own or those of TrainingArguments."""
    own = {"lambda_0": 0.2, "warmup_steps": 0, "heads_factor": 4.0, "distilled": False}
    own |= {name: settings.pop(name) for name in list(settings) if name in own}
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = transformers.TrainingArguments(str(folder), **(arguments | settings))
    return Medusa2Trainer(model, args, train_dataset=rows, data_collator=RowCollator(HEADS), **own)


def tensors(row: PackedRow) -> dict[str, torch.Tensor]:
    """A batch of one row."""
    return RowCollator(HEADS)([row])
