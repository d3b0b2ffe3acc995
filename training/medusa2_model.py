"""A backbone with a LoRA adapter and Medusa heads, in one module that computes their losses."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import peft
import torch

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.heads import HeadWeights, MedusaHeads, untrained_heads
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.medusa2_loss import cross_entropy_sum, divergence_sum, hits


def load_backbone(source: checkpoint.Source, dtype: torch.dtype) -> Any:
    """The causal LM to train: plain attention, weights in `dtype`.

    Raises:
        UserError: as `checkpoint.load_model`.
    """
    model = checkpoint.load_model(source)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # of a .gguf file: the weights are plain tensors, but marked as quantised
        quantizer.remove_quantization_config(model)
    model.set_attn_implementation("sdpa")
    return model.to(dtype)


def add_adapter(model: Any, *, rank: int, alpha: int) -> peft.PeftModel:
    """The model with a LoRA adapter on every linear layer but the LM projection; the adapter starts at zero.

    Raises:
        UserError: the model has no such layers.
    """
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():  # about what peft itself calls in transformers
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(
            f"{model.name_or_path}: {type(model).__name__} cannot have a LoRA adapter: {error}",
            "train heads alone with --method medusa-1",
        ) from error


class Medusa2(torch.nn.Module):
    """The adapter and the heads are trained, everything else is frozen.

    Args:
        backbone: causal LM with an adapter.
        heads, layers: K heads of that many residual blocks; they share the LM projection and start at zero.
    """

    def __init__(self, backbone: peft.PeftModel, *, heads: int, layers: int) -> None:
        super().__init__()
        self.backbone = backbone
        projection = backbone.get_base_model().get_output_embeddings()
        self.heads = MedusaHeads(untrained_heads(heads, projection.weight.shape[1], layers=layers), projection)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        heads_only: bool,
        distilled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and hits summed over labels; entry 0 is the backbone's, entry j+1 head j's.

        Args:
            input_ids, position_ids: [B, L] int64; where positions start anew, so does what a token sees.
            labels: [B, L, 1 + K] int64, IGNORED where there is none.
            heads_only: the backbone computes no gradients.
            distilled: the backbone's loss is the divergence from itself without its adapter.

        Returns:
            Losses [1 + K] float32; top-1 and top-5 hits [1 + K, 2] float32.
        """
        kept = (labels != IGNORED).any(dim=-1)  # [B, L]
        targets = labels[kept]  # [M, 1 + K]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not heads_only):
            teacher = self._teacher(input_ids, position_ids, kept) if distilled else None
            logits, hidden = self._project(input_ids, position_ids, kept)
            if teacher is None:
                losses = [cross_entropy_sum(logits, targets[:, 0])]
            else:
                losses = [divergence_sum(teacher, logits, targets[:, 0])]
        scores = [hits(logits.detach(), targets[:, 0])]
        for head, state in enumerate(self.heads.states(hidden.to(self.heads.residual_weight.dtype))):  # each [M, H]
            guess = self.heads.lm_head(state.to(self.heads.lm_head.weight.dtype))
            losses.append(cross_entropy_sum(guess, targets[:, 1 + head]))
            scores.append(hits(guess.detach(), targets[:, 1 + head]))
        return torch.stack(losses), torch.stack(scores)

    def head_weights(self) -> HeadWeights:
        """The heads as they are now, in float32 on the CPU."""
        weight, bias = self.heads.residual()
        return HeadWeights(weight.cpu(), bias.cpu(), projection=None, trained=True, source="medusa-train")

    def trained_state(self) -> dict[str, torch.Tensor]:
        """The adapter's and the heads' tensors by name."""
        return {name: tensor.detach() for name, tensor in self.named_parameters() if tensor.requires_grad}

    def load_trained_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `trained_state` gave; ValueError where the names or shapes are others."""
        trained = {name: tensor for name, tensor in self.named_parameters() if tensor.requires_grad}
        if {name: t.shape for name, t in trained.items()} != {name: t.shape for name, t in state.items()}:
            raise ValueError("the adapter and heads have other shapes")
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(state[name])

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """As in transformers' models; its Trainer calls this."""
        self.backbone.get_base_model().activation_checkpointing_enable(**options)

    @torch.no_grad()
    def _teacher(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        with self.backbone.disable_adapter():
            return self._project(input_ids, position_ids, kept)[0]

    def _project(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [M, V] of the M kept positions [B, L], and the hidden rows [M, H] they were projected from."""
        with _kept_rows(self.heads.lm_head, kept) as rows:
            # Without a mask, transformers tells conversations apart by where position_ids start anew.
            logits = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits[0], rows[0]


@contextlib.contextmanager
def _kept_rows(projection: torch.nn.Module, kept: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Let the LM projection see the kept rows of the hidden states [B, L, H] only, and note them: [M, H]."""
    rows: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        rows.append(inputs[0][kept])
        return (rows[0][None],)

    handle = projection.register_forward_pre_hook(keep)
    try:
        yield rows
    finally:
        handle.remove()
