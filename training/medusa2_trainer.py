"""transformers' Trainer for Medusa-2: two stages, two learning rates, losses normalised over the whole batch."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.output_file import writing
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.medusa2_loss import combine, loss_weights
from medusa_engine.training.medusa2_model import Medusa2
from medusa_engine.training.plot import Curve, draw_training
from medusa_engine.training.training_log import LOG_NAME, PLOT_NAME

STATE_FILE = "adapter_and_heads.safetensors"


class Medusa2Trainer(transformers.Trainer):
    """Trains a `Medusa2` on batches of `RowCollator`.

    Optimiser steps before `warmup_steps` train the heads alone, with the backbone frozen; later ones train both. In
    each stage the learning rate rises over the first twentieth; in the second it then falls on a cosine.

    Args:
        model: what is trained.
        args: of transformers; `learning_rate` is the backbone's.
        lambda_0: weight of the heads' losses beside the backbone's.
        warmup_steps: of the first stage; None for a tenth of all.
        heads_factor: the heads' learning rate over the backbone's.
        distilled: the backbone's loss is the divergence from itself without its adapter.
        others: as of transformers' Trainer.
    """

    loss_is_scaled_for_ga = True  # `combine` divides by the labels of all accumulated parts

    def __init__(
        self,
        model: Medusa2,
        args: transformers.TrainingArguments,
        *,
        lambda_0: float,
        warmup_steps: int | None,
        heads_factor: float,
        distilled: bool,
        **others: Any,
    ) -> None:
        args._n_gpu = min(args.n_gpu, 1)  # several GPUs have a process each, started by torchrun or accelerate
        super().__init__(model, args, **others)
        self.lambda_0 = lambda_0
        self.warmup_steps = warmup_steps
        self.heads_factor = heads_factor
        self.distilled = distilled
        self._clear_sums()
        for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(_LogWriter(Path(args.output_dir)))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimiser that the arguments name, with the group of the backbone, then that of the heads."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            heads = list(self.model.heads.parameters())
            backbone = [p for p in self.model.backbone.parameters() if p.requires_grad]
            rate = self.args.learning_rate
            groups = [
                {"params": backbone, "lr": rate},
                {"params": [p for p in heads if p.requires_grad], "lr": rate * self.heads_factor},
            ]
            options |= {"lr": rate, "weight_decay": self.args.weight_decay}
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Learning rates by step.

        Raises:
            UserError: the first stage leaves no steps for the second.
        """
        if self.warmup_steps is None:
            self.warmup_steps = num_training_steps // 10
        first, total = self.warmup_steps, num_training_steps
        if first >= total:
            raise UserError(
                f"--warmup-steps {first}: training has {counted(total, 'step')}, so the backbone would never be"
                " trained",
                "give fewer, or more --epochs; heads alone are trained with --method medusa-1",
            )
        if self.lr_scheduler is None:

            def second_stage(step: int) -> float:
                rise, progress = _rise(step - first, total - first), (step - first) / (total - first)
                return rise * 0.5 * (1 + math.cos(math.pi * min(progress, 1)))

            rates = [
                lambda step: 0.0 if step < first else second_stage(step),
                lambda step: _rise(step, first) if step < first else second_stage(step),
            ]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rates)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss [] of one part of a batch; over all parts and processes it sums up to that of the batch.

        Args:
            num_items_in_batch: [1 + K] labels in the batch, all parts and processes together; None: of this part.
        """
        heads_only = self.state.global_step < (self.warmup_steps or 0)
        counts = _label_counts(inputs["labels"])
        sums, hits = model(**inputs, heads_only=heads_only, distilled=self.distilled)
        if model.training:
            table = torch.cat([counts[:, None], sums.detach()[:, None], hits], dim=1)
            self._sums = table if self._sums is None else self._sums + table
        weights = loss_weights(len(sums) - 1, self.lambda_0, heads_only=heads_only)
        if num_items_in_batch is None:
            loss = combine(sums, counts, weights)
        else:  # the processes' gradients are averaged, so that the sum over them needs this factor
            loss = combine(sums, num_items_in_batch, weights) * self.accelerator.num_processes
        if not torch.isfinite(loss):
            raise UserError(f"the loss is {float(loss)}: training has diverged", "give a smaller --learning-rate")
        return (loss, {"losses": sums}) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each head's loss and accuracies since the last time."""
        if "loss" in logs and self._sums is not None:
            table = self.accelerator.reduce(self._sums, reduction="sum").tolist()
            self._clear_sums()
            logs["heads_learning_rate"] = self.lr_scheduler.get_last_lr()[1]  # transformers logs the first group's
            for index, (count, loss, top1, top5) in enumerate(table):
                name = "backbone" if index == 0 else f"head_{index - 1}"
                scores = {"loss": loss, "top1": top1, "top5": top5}
                logs |= {f"{name}_{score}": value / max(count, 1) for score, value in scores.items()}
        super().log(logs, start_time)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        if not batch_samples:
            return None
        counts = torch.stack([_label_counts(batch["labels"]) for batch in batch_samples]).sum(dim=0).to(device)
        return self.accelerator.reduce(counts, reduction="sum")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write what is trained; the backbone's own weights stay as they are."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous() for name, tensor in self.model.trained_state().items()}
        with writing(folder / STATE_FILE, also=(SafetensorError,)):
            save_file(state, folder / STATE_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        file = Path(resume_from_checkpoint) / STATE_FILE
        hint = "give a checkpoint of this model, with the same --heads, --layers and --lora-rank"
        if not file.is_file():
            raise UserError(f"{file}: there is no such file", hint)
        try:
            self.model.load_trained_state(load_file(file))
        except (ValueError, OSError, SafetensorError) as error:
            raise UserError(f"{file}: {first_line(error)}", hint) from error

    def _clear_sums(self) -> None:
        """[1 + K, 4] since the last log: labels, losses, top-1 and top-5 hits."""
        self._sums: torch.Tensor | None = None


class _LogWriter(transformers.TrainerCallback):
    """Writes each log as a line of LOG_NAME and to standard error."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME

    def on_log(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        logs: dict[str, float] | None = None,
        **_others: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float))
        print(f"step {state.global_step}/{state.max_steps}  {shown}", file=sys.stderr, flush=True)


def plot_log(folder: Path, heads: int) -> Path:
    """Draw losses and accuracies over the steps of the whole log, resumed runs included; returns the picture's path."""
    lines = (folder / LOG_NAME).read_text(encoding="utf-8").splitlines()
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was cut where a run was killed
            records.append(json.loads(line))
    records = [record for record in records if "backbone_loss" in record]
    steps = [record["step"] for record in records]
    names = ["backbone", *(f"head_{head}" for head in range(heads))]
    losses = [Curve(name, steps, [record[f"{name}_loss"] for record in records]) for name in names]
    accuracies = [
        Curve(f"{name} {kind}", steps, [record[f"{name}_{kind}"] for record in records], dotted=kind == "top5")
        for name in names
        for kind in ("top1", "top5")
    ]
    with writing(folder / PLOT_NAME):
        draw_training(folder / PLOT_NAME, losses, accuracies, x_label="step", title="Training accuracy")
    return folder / PLOT_NAME


def _label_counts(labels: torch.Tensor) -> torch.Tensor:
    """Labels [B, L, 1 + K] -> how many of each: [1 + K] float32."""
    return (labels != IGNORED).sum(dim=(0, 1)).float()


def _rise(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / max(1, steps // 20))
