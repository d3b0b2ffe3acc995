"""Medusa-1: train the heads on stored hidden states; the backbone and its projection never change."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.exporter.heads import HeadWeights, MedusaHeads, untrained_heads
from medusa_engine.training.features import Features
from medusa_engine.training.labels import IGNORED, head_weights


@dataclass(frozen=True)
class TrainSettings:
    """How the heads are trained.

    Attributes:
        heads, layers: K heads of that many residual blocks.
        epochs: passes over the data at most; training stops early when the held-out loss stops falling.
        batch: positions per optimiser step.
        accumulate: forward passes a batch is split into; the result is that of the whole batch.
        learning_rate, weight_decay: of AdamW; the rate warms up and falls on a cosine.
        soft: share of the loss that compares with the target's distribution instead of the written token.
        seed: of the order of positions.
    """

    heads: int = 4
    layers: int = 1
    epochs: int = 4
    batch: int = 2048
    accumulate: int = 1
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    soft: float = 1.0
    seed: int = 0


class Vocabulary:
    """The tokens the heads choose from: all, or a draft vocabulary.

    Args:
        projection: [V, H], the frozen LM projection.
        token_map: [V'] int64 ascending ids of the draft vocabulary, or None for all tokens.
    """

    def __init__(self, projection: torch.Tensor, token_map: npt.NDArray[np.int64] | None) -> None:
        self.token_map = token_map
        self.weight = projection if token_map is None else projection[torch.from_numpy(token_map)]
        self._place = np.arange(len(projection))
        if token_map is not None:
            self._place = np.full(len(projection), IGNORED)
            self._place[token_map] = np.arange(len(token_map))

    def places(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Rows of `weight` for token ids; IGNORED where a token is outside or is IGNORED itself."""
        return np.where(ids == IGNORED, IGNORED, self._place[np.maximum(ids, 0)])


def draft_vocabulary(features: Features, size: int) -> npt.NDArray[np.int64]:
    """The `size` most frequent labels of head 0, ascending: [V']."""
    labels = features.labels[:, 0]
    ids, counts = np.unique(labels[labels != IGNORED], return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:size]])


class HeadTrainer:
    """Trains `MedusaHeads` on features; call `run`.

    Args:
        projection: [V, H] float32, the backbone's LM projection; it is not changed.
        folder: where the log and the resumable state go.
        report: called with one line of progress at a time.
    """

    def __init__(
        self,
        settings: TrainSettings,
        vocabulary: Vocabulary,
        folder: Path,
        *,
        report: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self._vocabulary = vocabulary
        self._folder = folder
        self._report = report
        projection = torch.nn.Linear(vocabulary.weight.shape[1], len(vocabulary.weight), bias=False)
        projection.weight = torch.nn.Parameter(vocabulary.weight.float(), requires_grad=False)
        weights = untrained_heads(settings.heads, vocabulary.weight.shape[1], layers=settings.layers)
        self.heads = MedusaHeads(weights, projection)
        self._trained = [parameter for parameter in self.heads.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._weights = torch.from_numpy(head_weights(settings.heads)).float()
        self._step = 0

    def run(self, training: Features, held_out: Features) -> HeadWeights:
        """Train until the held-out loss stops falling; returns the heads with the lowest."""
        settings = self.settings
        per_epoch = math.ceil(len(training) / settings.batch)
        total = per_epoch * settings.epochs
        first_epoch, best_loss, best = self._resume()
        for epoch in range(first_epoch, settings.epochs):
            started, losses = time.monotonic(), []
            order = np.random.default_rng([settings.seed, epoch]).permutation(len(training))
            for index in range(per_epoch):
                rows = order[index * settings.batch : (index + 1) * settings.batch]
                losses.append(self._train_batch(training, rows, total))
                if (index + 1) % 100 == 0:
                    seconds = time.monotonic() - started
                    self._report(
                        f"epoch {epoch} batch {index + 1}/{per_epoch} loss {np.mean(losses[-100:]):.4f} {seconds:.0f} s"
                    )
            scores = self.evaluate(held_out)
            self._log(epoch, float(np.mean(losses)), scores, time.monotonic() - started)
            if scores["loss"] < best_loss:
                best_loss, best = scores["loss"], self.heads.residual()
            elif epoch > 0:
                self._report("the held-out loss has stopped falling")
                break
            self._save(epoch + 1, best_loss, best)
        return HeadWeights(*best, projection=None, trained=True, source="medusa-train")

    def evaluate(self, features: Features) -> dict[str, Any]:
        """Loss, and per head top-1 and top-5 accuracy over all of its labels, those outside the vocabulary too."""
        top1, top5, counts, losses = (np.zeros(self.settings.heads) for _ in range(4))
        for start in range(0, len(features), self.settings.batch):
            rows = np.arange(start, min(start + self.settings.batch, len(features)))
            labels = self._vocabulary.places(features.labels[rows])
            with torch.no_grad():
                states = self.heads.states(_rows(features.hidden, rows))
                for head, state in enumerate(states):
                    logits = self.heads.lm_head(state)
                    losses[head] += float(self._loss(logits, features, rows, head, labels[:, head])) * len(rows)
                    best = logits.topk(5, dim=-1).indices.numpy()  # [M, 5]
                    hits = best == labels[:, head, None]
                    top1[head] += hits[:, 0].sum()
                    top5[head] += hits.any(axis=1).sum()
            counts += (features.labels[rows] != IGNORED).sum(axis=0)
        losses /= len(features)
        return {
            "loss": float(losses @ self._weights.numpy()),
            "top1": (top1 / counts).tolist(),
            "top5": (top5 / counts).tolist(),
        }

    def _train_batch(self, features: Features, rows: npt.NDArray[np.int64], total: int) -> float:
        self._set_rate(total)
        self._optimizer.zero_grad(set_to_none=True)
        labels = self._vocabulary.places(features.labels[rows])
        loss_sum = 0.0
        for part in np.array_split(np.arange(len(rows)), self.settings.accumulate):
            states = self.heads.states(_rows(features.hidden, rows[part]))
            for head, state in enumerate(states):
                logits = self.heads.lm_head(state)
                loss = self._loss(logits, features, rows[part], head, labels[part, head])
                loss = loss * self._weights[head] * (len(part) / len(rows))
                loss.backward(retain_graph=head + 1 < self.settings.heads)
                loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._step += 1
        return loss_sum

    def _loss(
        self,
        logits: torch.Tensor,  # [M, V']
        features: Features,
        rows: npt.NDArray[np.int64],
        head: int,
        labels: npt.NDArray[np.int64],  # [M] places in the vocabulary
    ) -> torch.Tensor:
        """Mean over all M rows, so that rows without a label weigh nothing and never divide by zero."""
        logprobs = torch.log_softmax(logits, dim=-1)
        targets = torch.from_numpy(np.maximum(labels, 0))
        hard = -logprobs.gather(1, targets[:, None])[:, 0] * torch.from_numpy((labels != IGNORED).astype(np.float32))
        if not self.settings.soft:
            return hard.mean()
        owned = features.labels[rows, head] != IGNORED
        places = self._vocabulary.places(features.top_ids[rows, head])  # [M, 8]
        known = (places != IGNORED) & owned[:, None]
        probabilities = torch.from_numpy(features.top_probabilities[rows, head] * known)
        soft = -(logprobs.gather(1, torch.from_numpy(np.maximum(places, 0))) * probabilities).sum(dim=1)
        return (self.settings.soft * soft + (1 - self.settings.soft) * hard).mean()

    def _set_rate(self, total: int) -> None:
        warm = max(1, total // 50)
        progress = max(0, self._step - warm) / max(1, total - warm)
        factor = min((self._step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor

    def _log(self, epoch: int, loss: float, scores: dict[str, Any], seconds: float) -> None:
        record = {"epoch": epoch, "training_loss": loss, "seconds": round(seconds, 1), **scores}
        with (self._folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        shown = "  ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(scores["top1"], scores["top5"], strict=True))
        self._report(f"epoch {epoch}: training {loss:.4f}, held-out {scores['loss']:.4f}, top-1/top-5 by head: {shown}")

    def _save(self, epochs_done: int, best_loss: float, best: tuple[torch.Tensor, torch.Tensor]) -> None:
        state = {
            "epochs_done": epochs_done,
            "step": self._step,
            "best_loss": best_loss,
            "best": best,
            "heads": [parameter.detach() for parameter in self._trained],
            "optimizer": self._optimizer.state_dict(),
        }
        partial = self._folder / "state.partial"
        torch.save(state, partial)
        partial.replace(self._folder / "state.pt")

    def _resume(self) -> tuple[int, float, tuple[torch.Tensor, torch.Tensor]]:
        path = self._folder / "state.pt"
        if not path.exists():
            return 0, math.inf, self.heads.residual()
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for parameter, saved in zip(self._trained, state["heads"], strict=True):
                parameter.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
        return state["epochs_done"], state["best_loss"], state["best"]


def _rows(hidden: npt.NDArray[np.float16], rows: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(hidden[rows].astype(np.float32))  # [M, H]
