"""Medusa-1: train the heads on stored hidden states; the backbone and its projection never change."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.heads import HeadWeights, MedusaHeads, untrained_heads
from medusa_engine.exporter.tensor_file import check_archive
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.training.features import Features
from medusa_engine.training.labels import IGNORED, head_weights
from medusa_engine.training.medusa1_settings import TrainSettings
from medusa_engine.training.training_log import HeadScores, TrainingLog
from medusa_engine.training.vocabulary import Vocabulary

STATE_NAME = "state.pt"
_SAVE_EVERY = 200  # batches
_REPORT_EVERY = 50


class HeadTrainer:
    """Trains `MedusaHeads` on features; call `run`.

    Args:
        settings: see there.
        vocabulary: the rows of the backbone's LM projection that the heads use; they are not changed.
        log: takes progress and results.
        folder: where the resumable state goes.
        start: heads to go on from, of as many heads and layers; None for new ones.
    """

    def __init__(
        self,
        settings: TrainSettings,
        vocabulary: Vocabulary,
        folder: Path,
        log: TrainingLog,
        *,
        start: HeadWeights | None = None,
    ) -> None:
        self.settings = settings
        self._vocabulary = vocabulary
        self._folder = folder
        self._log = log
        self._dtype = getattr(torch, settings.dtype)
        weight = vocabulary.weight.to(settings.device, torch.float32)
        projection = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        weights = start or untrained_heads(settings.heads, weight.shape[1], layers=settings.layers)
        if settings.own_projection and weights.projection is None:
            weights = weights.with_projection(weight.repeat(settings.heads, 1, 1))
        self._started_from = None if start is None else [file_sha256(file) for file in start.files]
        self.heads = MedusaHeads(weights, projection).to(settings.device)
        self.heads.residual_bias.requires_grad_(settings.biases)
        self._frozen = None if settings.own_projection else weight.to(self._dtype)
        self._trained = [parameter for parameter in self.heads.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._weights = torch.from_numpy(head_weights(settings.heads)).float()
        self._step = 0

    def run(self, training: Features, held_out: Features) -> HeadWeights:
        """Train until the held-out loss stops falling; returns the heads with the lowest.

        Raises:
            UserError: the folder holds the state of training with other settings or data.
        """
        settings = self.settings
        per_epoch = math.ceil(len(training) / settings.batch)
        identity = asdict(settings) | {
            "positions": len(training),
            "vocabulary": len(self._vocabulary.weight),
            "init": self._started_from,
        }
        best_loss, best, stopped = self._resume(identity)
        if not self._step:
            self._log.restart()
        while not stopped and (epoch := self._step // per_epoch) < settings.epochs:
            started = time.monotonic()
            order = np.random.default_rng([settings.seed, epoch]).permutation(len(training))
            for index in range(self._step % per_epoch, per_epoch):
                rows = order[index * settings.batch : (index + 1) * settings.batch]
                measured = (index + 1) % _REPORT_EVERY == 0
                scores = self._train_batch(training, rows, per_epoch * settings.epochs, measured=measured)
                self._log.batch(epoch, index + 1, per_epoch, scores)
                if (index + 1) % _SAVE_EVERY == 0 and index + 1 < per_epoch:
                    self._save(identity, best_loss, best, stopped=False)
            scores = self.evaluate(held_out)
            loss = float(scores.loss @ self._weights.numpy())
            _check_finite(loss, "held-out loss")
            self._log.epoch(epoch, loss, scores, time.monotonic() - started)
            stopped = epoch > 0 and loss >= best_loss
            if loss < best_loss:
                best_loss, best = loss, self._weights_now()
            self._save(identity, best_loss, best, stopped=stopped)
            if stopped:
                self._log.say("the held-out loss has stopped falling")
        residual_weight, residual_bias, *projection = best
        return HeadWeights(
            residual_weight,
            residual_bias,
            projection=projection[0] if projection else None,
            trained=True,
            source="medusa-train",
        )

    def evaluate(self, features: Features) -> HeadScores:
        """Mean loss, and per head top-1 and top-5 accuracy over all of its labels, those outside the vocabulary too."""
        total = HeadScores.zero(self.settings.heads)
        for start in range(0, len(features), self.settings.batch):
            rows = np.arange(start, min(start + self.settings.batch, len(features)))
            labels = self._vocabulary.places(features.labels[rows])
            with torch.no_grad():
                states = self._states(features, rows)
                for head, state in enumerate(states):
                    logits = self._logits(head, state)
                    total.loss[head] += float(self._loss(logits, features, rows, head, labels[:, head])) * len(rows)
                    total.count_hits(head, logits, labels[:, head])
            total.labels += (features.labels[rows] != IGNORED).sum(axis=0)
        return total.means(len(features))

    def _train_batch(
        self, features: Features, rows: npt.NDArray[np.int64], total: int, *, measured: bool
    ) -> HeadScores:
        """One optimiser step; with `measured`, accuracies on its own positions besides the losses."""
        self._set_rate(total)
        self._optimizer.zero_grad(set_to_none=True)
        labels = self._vocabulary.places(features.labels[rows])
        scores = HeadScores.zero(self.settings.heads)
        for part in np.array_split(np.arange(len(rows)), self.settings.accumulate):
            states = self._states(features, rows[part])
            cut = states.detach().requires_grad_()  # the blocks are differentiated once for all heads
            for head in range(self.settings.heads):
                logits = self._logits(head, cut[head])
                loss = self._loss(logits, features, rows[part], head, labels[part, head])
                (loss * self._weights[head] * (len(part) / len(rows))).backward()
                scores.loss[head] += float(loss.detach()) * len(part)
                _check_finite(scores.loss[head], f"loss of head {head} at step {self._step}")
                if measured:
                    scores.count_hits(head, logits.detach(), labels[part, head])
            states.backward(cut.grad)
        if measured:
            scores.labels += (features.labels[rows] != IGNORED).sum(axis=0)
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._step += 1
        return scores.means(len(rows))

    def _states(self, features: Features, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        hidden = torch.from_numpy(features.hidden[rows]).to(self.settings.device, torch.float32)  # [M, H]
        with torch.autocast(self.settings.device.split(":")[0], self._dtype, enabled=self._dtype != torch.float32):
            return self.heads.states(hidden).float()  # [K, M, H]

    def _logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, V'] float32."""
        weight = self._frozen
        if weight is None:
            assert self.heads.projections is not None
            weight = self.heads.projections[head].to(self._dtype)
        return torch.nn.functional.linear(state.to(self._dtype), weight).float()

    def _loss(
        self,
        logits: torch.Tensor,  # [M, V']
        features: Features,
        rows: npt.NDArray[np.int64],
        head: int,
        labels: npt.NDArray[np.int64],  # [M] places in the vocabulary
    ) -> torch.Tensor:
        """Mean over all M rows, so that rows without a label weigh nothing and never divide by zero."""
        device = logits.device
        normaliser = logits.logsumexp(dim=-1)  # [M]
        if self.settings.soft < 1:
            targets = torch.from_numpy(np.maximum(labels, 0)).to(device)
            known = torch.from_numpy((labels != IGNORED).astype(np.float32)).to(device)
            hard = (normaliser - logits.gather(1, targets[:, None])[:, 0]) * known
            if not self.settings.soft:
                return hard.mean()
        owned = features.labels[rows, head] != IGNORED
        places = self._vocabulary.places(features.top_ids[rows, head])  # [M, 8]
        known = (places != IGNORED) & owned[:, None]
        probabilities = torch.from_numpy(features.top_probabilities[rows, head] * known).to(device)
        likely = logits.gather(1, torch.from_numpy(np.maximum(places, 0)).to(device))
        soft = ((normaliser[:, None] - likely) * probabilities).sum(dim=1)
        if self.settings.soft == 1:
            return soft.mean()
        return (self.settings.soft * soft + (1 - self.settings.soft) * hard).mean()

    def _set_rate(self, total: int) -> None:
        warm = max(1, total // 50)
        progress = max(0, self._step - warm) / max(1, total - warm)
        factor = min((self._step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor

    def _weights_now(self) -> list[torch.Tensor]:
        """Blocks' weights and biases as checkpoints hold them, then [K, V', H] if the heads have own projections."""
        weights = [tensor.cpu() for tensor in self.heads.residual()]
        if self.settings.own_projection:
            assert self.heads.projections is not None
            weights.append(torch.stack([projection.detach().cpu() for projection in self.heads.projections]))
        return weights

    def _save(self, identity: dict[str, Any], best_loss: float, best: list[torch.Tensor], *, stopped: bool) -> None:
        state: dict[str, Any] = {
            "identity": identity,
            "stopped": stopped,
            "step": self._step,
            "best_loss": best_loss,
            "best": best,
            "heads": [parameter.detach() for parameter in self._trained],
            "optimizer": self._optimizer.state_dict(),
        }
        partial = self._folder / "state.partial"
        try:
            torch.save(state, partial)
            partial.replace(self._folder / STATE_NAME)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second for a full disk
            raise UserError(f"{partial}: cannot write: {first_line(error)}", "free space there") from error

    def _resume(self, identity: dict[str, Any]) -> tuple[float, list[torch.Tensor], bool]:
        """Lowest held-out loss so far, its weights, and whether training had ended."""
        path = self._folder / STATE_NAME
        if not path.exists():
            return math.inf, self._weights_now(), False
        hint = "give another output folder, or remove the file to train anew"
        check_archive(path, hint)
        try:
            state = torch.load(path, weights_only=True)
            missing = {"identity", "stopped", "step", "best_loss", "best", "heads", "optimizer"} - set(state)
        except Exception as error:  # pickle, zip and torch each raise their own
            raise UserError(f"{path}: damaged: {type(error).__name__}", hint) from error
        if missing:
            raise UserError(f"{path}: damaged: has no {min(missing)}", hint)
        saved = state["identity"]
        if changed := [
            name for name, value in identity.items() if not isinstance(saved, dict) or saved.get(name) != value
        ]:
            raise UserError(f"{path}: was written by training with another value of {', '.join(changed)}", hint)
        try:
            with torch.no_grad():
                for parameter, values in zip(self._trained, state["heads"], strict=True):
                    parameter.copy_(values)
            self._optimizer.load_state_dict(state["optimizer"])
            self._step, best_loss, stopped = int(state["step"]), float(state["best_loss"]), bool(state["stopped"])
            for parameter, values in zip(self._trained, state["best"], strict=True):
                if parameter.shape != values.shape:
                    raise ValueError(f"shape {list(values.shape)}")
        except Exception as error:  # whatever a value of another kind makes torch trip over
            raise UserError(f"{path}: damaged: {first_line(error)}", hint) from error
        return best_loss, state["best"], stopped


def _check_finite(loss: float, what: str) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"the {what} is {loss}: training has diverged, or the data holds such numbers",
            "give a smaller --learning-rate, or look at the data",
        )
