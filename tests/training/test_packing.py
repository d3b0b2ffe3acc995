"""Packed conversations neither see nor learn from one another, and padding is told by length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_llama
from transformers import AutoModelForCausalLM

from medusa_engine.runtime.errors import UserError
from medusa_engine.training.chat_data import read_chat_data
from medusa_engine.training.example import Example
from medusa_engine.training.labels import IGNORED, head_labels
from medusa_engine.training.packing import PADDING, PackedRow, causal_mask, pack, packed_labels, segment_lengths

CASES = Path(__file__).parents[1] / "data" / "training"
PAD = EOS = 2


def example(*tokens: int, owned: list[bool] | None = None) -> Example:
    return Example(np.array(tokens), np.array(owned if owned is not None else [True] * len(tokens)))


def as_lists(rows: list[PackedRow]) -> list[list[list[int]]]:
    return [[part.tolist() for part in row] for row in rows]


def examples_of(name: str) -> list[Example]:
    return [row for row in read_chat_data(CASES / name).rows if isinstance(row, Example)]


def test_a_row_by_hand() -> None:
    rows = list(pack([example(5, 6, 7), example(8, 9, owned=[False, True]), example(4, 4)], 6, PAD))
    assert as_lists(rows) == [
        [[5, 6, 7, 8, 9, 2], [0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, -1], [True, True, True, False, True, False]],
        [[4, 4, 2, 2, 2, 2], [0, 1, 0, 1, 2, 3], [0, 0, -1, -1, -1, -1], [True, True, *[False] * 4]],
    ]
    for row in rows:
        assert [part.dtype for part in row] == ["int64", "int64", "int64", "bool"]
    assert [segment_lengths(row).tolist() for row in rows] == [[3, 2, 1], [2, 4]]


def test_mask_by_hand() -> None:
    assert causal_mask(np.array([0, 0, 1, 1, -1, -1])).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_padding_that_is_the_stop_token_does_not_swallow_the_real_one() -> None:
    examples = examples_of("pad_is_eos.jsonl")
    rows = list(pack(examples, 12, PAD))
    assert [row.input_ids.tolist().count(EOS) for row in rows] == [4, 4, 3], "the real ones and the padding"
    for row in rows:
        assert (row.owned == (row.segment_ids != PADDING)).all()
    labels = np.concatenate([packed_labels(row, 1)[:, 0] for row in rows])
    assert (labels == EOS).sum() == len(examples)
    assert labels[labels != IGNORED].tolist() == [token for row in examples for token in row.tokens[2:].tolist()]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", [7, 48, 49, 96, 200])
def test_labels_of_packed_rows_are_those_of_each_conversation_alone(length: int, heads: int) -> None:
    examples = [Example(row.tokens[: 5 + 9 * place % 44], row.owned[: 5 + 9 * place % 44])
                for place, row in enumerate(examples_of("cycle7.jsonl"))]  # fmt: skip
    alone = [
        head_labels(tokens[:length], owned[:length], np.array([len(tokens[:length])]), heads)
        for tokens, owned in examples
    ]
    packed = [packed_labels(row, heads)[row.segment_ids != PADDING] for row in pack(examples, length, PAD)]
    assert np.concatenate(packed).tolist() == np.concatenate(alone).tolist()
    for row in pack(examples, length, PAD):
        assert (packed_labels(row, heads)[row.segment_ids == PADDING] == IGNORED).all()


def test_what_nobody_owns_is_left_out() -> None:
    masked, other = example(3, 4, 5, owned=[False] * 3), example(3, 4, 5, 6)
    late = example(1, 1, 1, 1, 1, 9, owned=[False] * 5 + [True])  # owned behind the cut only
    alone = as_lists(list(pack([other], 5, PAD)))
    assert as_lists(list(pack([masked, other, late, masked], 5, PAD))) == alone
    assert list(pack([masked], 5, PAD)) == []


def test_a_row_is_at_most_full() -> None:
    rows = list(pack([example(1, 1, 1), example(3, 3), example(4, 4, 4, 4, 4, 4, 4), example(5)], 5, PAD))
    assert [row.input_ids.tolist() for row in rows] == [[1, 1, 1, 3, 3], [4] * 5, [5, *[PAD] * 4]]


@pytest.mark.parametrize("length", [0, -3])
def test_a_row_without_places_is_refused(length: int) -> None:
    with pytest.raises(UserError, match="packed row"):
        list(pack([example(1)], length, PAD))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_sees_each_packed_conversation_as_if_it_were_alone(tmp_path: Path, implementation: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        save_llama(tmp_path / "llama"), dtype=torch.float32, attn_implementation=implementation
    ).eval()
    generator = np.random.default_rng(1)
    examples = [example(*generator.integers(3, 128, count).tolist()) for count in (9, 1, 4, 12, 7)]
    (row,) = pack(examples, 40, PAD)
    mask = torch.from_numpy(causal_mask(row.segment_ids))[None, None]  # [1, 1, L, L]
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        packed = model(
            input_ids=torch.from_numpy(row.input_ids)[None],
            position_ids=torch.from_numpy(row.position_ids)[None],
            attention_mask=mask if implementation == "sdpa" else additive,
        ).logits[0]
        assert packed.isfinite().all()
        for segment, (tokens, _) in enumerate(examples):
            alone = model(torch.from_numpy(tokens)[None]).logits[0]
            torch.testing.assert_close(packed[row.segment_ids == segment], alone, rtol=1e-4, atol=1e-4)
