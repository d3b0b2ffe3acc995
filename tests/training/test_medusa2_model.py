"""The module of backbone and heads: what it computes, and what it never changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from medusa2_cases import HEADS, conversations, new_model, rows_of, save_base, shake, tensors
from transformers import AutoModelForCausalLM

from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.training.example import Example
from medusa_engine.training.labels import IGNORED
from medusa_engine.training.packing import PackedRow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("distilled", [False, True])
def test_packed_conversations_have_the_losses_of_each_alone(base: Path, attention: str, distilled: bool) -> None:
    model = shake(new_model(base, attention=attention))
    examples = [Example(e.tokens, np.ones_like(e.owned)) for e in conversations(3, longest=9)]
    (packed,) = rows_of(examples, sum(len(example.tokens) for example in examples) + 2)
    options = {"heads_only": False, "distilled": distilled}
    with torch.no_grad():
        together, _ = model(**tensors(packed), **options)
        alone = [model(**tensors(rows_of([e], len(e.tokens))[0]), **options)[0] for e in examples]
    assert torch.allclose(together, sum(alone), rtol=1e-5)
    assert together.min() > 0


def test_losses_are_those_of_transformers_and_of_the_heads_on_its_hidden_states(base: Path) -> None:
    model = new_model(base)
    with torch.no_grad():
        for head, tensor in enumerate(model.heads.residual_weight):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(head)))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    (example,) = conversations(1)
    (row,) = rows_of([example], len(example.tokens))
    labels = torch.from_numpy(np.where(row.owned, row.input_ids, IGNORED))[None]
    with torch.no_grad():
        losses, scores = model(**tensors(row), heads_only=False, distilled=False)
        out = plain(torch.from_numpy(row.input_ids)[None], labels=labels, output_hidden_states=True)
        heads = MedusaHeads(model.head_weights(), plain.lm_head)
        states = heads.states(out.hidden_states[-1][0])
        expected, right = [], []
        for offset, state in enumerate([out.hidden_states[-1][0], *states], start=1):
            kept = labels[0, offset:] != IGNORED
            logits, wanted = plain.lm_head(state)[:-offset][kept], labels[0, offset:][kept]
            expected.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            right.append((logits.argmax(dim=-1) == wanted).sum())
    count = (labels[0, 1:] != IGNORED).sum()
    assert torch.allclose(losses[0], out.loss * count, rtol=1e-5)
    assert torch.allclose(losses, torch.stack(expected), rtol=1e-4)
    assert torch.equal(scores[:, 0].long(), torch.stack(right))


def test_divergence_is_zero_at_the_start_and_not_later(base: Path) -> None:
    model, row = new_model(base), tensors(rows_of(conversations(3))[0])
    with torch.no_grad():
        assert model(**row, heads_only=False, distilled=True)[0][0].item() == 0
        assert shake(model)(**row, heads_only=False, distilled=True)[0][0].item() > 0.01


def test_teacher_is_the_base_model(base: Path) -> None:
    model, plain = shake(new_model(base)), AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    (example,) = conversations(1)
    row = tensors(rows_of([example], len(example.tokens))[0])
    kept = torch.ones_like(row["input_ids"], dtype=torch.bool)
    with torch.no_grad():
        teacher = model._teacher(row["input_ids"], row["position_ids"], kept)
        student, _ = model._project(row["input_ids"], row["position_ids"], kept)
        expected = plain(row["input_ids"], position_ids=row["position_ids"]).logits[0]
    assert torch.allclose(teacher, expected, atol=1e-5)
    assert not torch.allclose(student, expected, atol=1e-2)


@pytest.mark.parametrize("distilled", [False, True])
def test_gradients_reach_adapter_and_heads_alone_and_in_the_first_stage_the_heads_only(
    base: Path, distilled: bool
) -> None:
    row = tensors(rows_of(conversations(3))[0])
    for heads_only in (True, False):
        model = shake(new_model(base))
        model(**row, heads_only=heads_only, distilled=distilled)[0].sum().backward()
        with_gradient = {name for name, tensor in model.named_parameters() if tensor.grad is not None}
        heads = {"heads.residual_weight", "heads.residual_bias"}
        adapter = {name for name, _ in model.named_parameters() if "lora_" in name}
        assert len(adapter) == 2 * 2 * 7  # A and B of seven linear layers in each of two blocks
        assert with_gradient == (heads if heads_only else heads | adapter)


def test_row_without_a_label_costs_nothing(base: Path) -> None:
    model = new_model(base)
    empty = PackedRow(*(np.zeros(6, dtype=np.int64) for _ in range(3)), np.zeros(6, dtype=np.bool_))
    losses, scores = model(**tensors(empty), heads_only=False, distilled=False)
    losses.sum().backward()
    assert losses.tolist() == [0.0] * (1 + HEADS) and not scores.any()


def test_gradient_checkpointing_gives_the_same_gradients(base: Path) -> None:
    row = tensors(rows_of(conversations(3))[0])
    gradients = []
    for checkpointing in (False, True):
        model = shake(new_model(base)).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(**row, heads_only=False, distilled=True)[0].sum().backward()
        gradients.append([t.grad for t in model.parameters() if t.requires_grad])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*gradients, strict=True))
