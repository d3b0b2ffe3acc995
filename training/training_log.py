"""What training says while it runs and leaves behind: lines, `log.jsonl` and a plot."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.exporter.output_file import writing
from medusa_engine.training.labels import head_weights
from medusa_engine.training.plot import Curve, draw_training

LOG_NAME = "log.jsonl"
PLOT_NAME = "training.png"


@dataclass
class HeadScores:
    """Per head [K]: loss, share of labels that are the head's first guess, and that are among its first five.

    Attributes:
        labels: how many labels the accuracies are over; 0 where they were not counted.
    """

    loss: npt.NDArray[np.float64]
    top1: npt.NDArray[np.float64]
    top5: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]

    @classmethod
    def zero(cls, heads: int) -> HeadScores:
        return cls(np.zeros(heads), np.zeros(heads), np.zeros(heads), np.zeros(heads, dtype=np.int64))

    def count_hits(self, head: int, logits: torch.Tensor, labels: npt.NDArray[np.int64]) -> None:
        """Add the hits among logits [M, V'] for labels [M], places in the vocabulary."""
        best = logits.topk(min(5, logits.shape[1]), dim=-1).indices.cpu().numpy()  # [M, 5]
        hits = best == labels[:, None]
        self.top1[head] += hits[:, 0].sum()
        self.top5[head] += hits.any(axis=1).sum()

    def means(self, positions: int) -> HeadScores:
        """Sums over `positions` to means."""
        counted = np.maximum(self.labels, 1)
        return HeadScores(self.loss / positions, self.top1 / counted, self.top5 / counted, self.labels)

    def shown(self) -> str:
        return "  ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(self.top1, self.top5, strict=True))


class TrainingLog:
    """Collects scores.

    Args:
        folder: where `log.jsonl` and the plot go; an existing log is continued.
        heads: K.
        report: called with one line of progress at a time.
    """

    def __init__(self, folder: Path, heads: int, *, report: Callable[[str], None]) -> None:
        self._path = folder / LOG_NAME
        self._plot = folder / PLOT_NAME
        self._weights = head_weights(heads)
        self._recent: list[npt.NDArray[np.float64]] = []
        self._epoch: list[npt.NDArray[np.float64]] = []
        self._started = time.monotonic()
        self.say = report

    def restart(self) -> None:
        """Forget the log of another training in this folder."""
        with writing(self._path):
            self._path.unlink(missing_ok=True)

    def batch(self, epoch: int, number: int, count: int, scores: HeadScores) -> None:
        """Note a batch; scores with accuracies are reported."""
        self._recent.append(scores.loss)
        self._epoch.append(scores.loss)
        if not scores.labels.any():
            return
        losses = np.mean(self._recent, axis=0)
        self._recent.clear()
        self._write({"epoch": epoch, "batch": number, "batches": count}, losses, scores)
        shown = " ".join(f"{loss:.3f}" for loss in losses)
        seconds = time.monotonic() - self._started
        self.say(
            f"epoch {epoch} batch {number}/{count}: loss {losses @ self._weights:.4f} (by head {shown}), "
            f"top-1/top-5 {scores.shown()}, {seconds:.0f} s"
        )

    def epoch(self, epoch: int, held_out_loss: float, scores: HeadScores, seconds: float) -> None:
        """Note the end of an epoch with its held-out scores."""
        training = float(np.mean(self._epoch, axis=0) @ self._weights) if self._epoch else None
        self._recent.clear()
        self._epoch.clear()
        facts = {
            "epoch": epoch,
            "training_loss": training,
            "held_out_loss": held_out_loss,
            "seconds": round(seconds, 1),
        }
        self._write(facts, scores.loss, scores)
        shown = "-" if training is None else f"{training:.4f}"
        self.say(
            f"epoch {epoch}: training {shown}, held-out {held_out_loss:.4f}, top-1/top-5 by head: {scores.shown()}"
        )

    def best_epoch(self) -> dict[str, Any]:
        """The record of the epoch with the lowest held-out loss."""
        return min(self._records("held_out_loss"), key=lambda record: float(record["held_out_loss"]))

    def _records(self, key: str) -> list[dict[str, Any]]:
        records = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that was cut where a run was killed
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict) and key in record]

    def _write(self, facts: dict[str, Any], losses: npt.NDArray[np.float64], scores: HeadScores) -> None:
        record = facts | {
            "head_loss": losses.tolist(),
            "top1": scores.top1.tolist(),
            "top5": scores.top5.tolist(),
        }
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def plot(self) -> Path:
        """Draw losses and accuracies of the whole log, resumed runs included; returns the picture's path."""
        batches, epochs = self._records("batch"), self._records("held_out_loss")
        at = [record["epoch"] + record["batch"] / record["batches"] for record in batches]
        ends = [record["epoch"] + 1 for record in epochs]
        training = [float(np.dot(record["head_loss"], self._weights)) for record in batches]
        losses = [Curve("training", at, training), Curve("held-out", ends, [r["held_out_loss"] for r in epochs])]
        accuracies = [
            Curve(f"head {head} {name}", ends, [record[name][head] for record in epochs], dotted=name == "top5")
            for head in range(len(self._weights))
            for name in ("top1", "top5")
        ]
        with writing(self._plot):
            draw_training(self._plot, losses, accuracies, x_label="epoch", title="Held-out accuracy")
        return self._plot
