"""Which block quantised weights get, and that the numbers in it are the weights."""

from __future__ import annotations

import numpy as np
import pytest

from medusa_engine.exporter import exact_block as module
from medusa_engine.exporter.exact_block import BLOCKS, exact_block, rows_are_exact
from medusa_engine.exporter.weight_blocks import Floats, quantised

SIZES = [(64, 8), (40, 5), (16, 3), (100, 7)]  # K, N


def dequantised(weight: Floats, bits: int, block: int) -> Floats:
    """[K, N] of what MatMulNBits is told, as its documentation reads it."""
    k, n = weight.shape
    values, scale, *zero_points = quantised(weight, bits, block)
    blocks = -(-k // block)
    if bits == 4:
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(n, blocks, block)
        (packed,) = zero_points
        pairs = packed.reshape(n, -1)
        zero_point = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n, -1)[:, :blocks]
    else:
        assert not zero_points
        zero_point = np.full((n, blocks), 128)
    numbers = (values.astype(np.float32) - zero_point[..., None]) * scale.reshape(n, blocks, 1)
    filled = numbers.reshape(n, -1)
    assert not filled[:, k:].any()
    return filled[:, :k].T


@pytest.mark.parametrize(("bits", "block"), [(bits, block) for bits, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_each_weight_is_near_a_step_of_its_block(bits: int, block: int, k: int, n: int) -> None:
    weight = np.random.default_rng(1).standard_normal((k, n)).astype(np.float32)
    weight[:, 0] = 0
    weight[:, 1] = np.abs(weight[:, 1])
    found = dequantised(weight, bits, block)
    for begin in range(0, k, block):
        part, error = weight[begin : begin + block], np.abs(found - weight)[begin : begin + block]
        spread = np.maximum(part.max(axis=0), 0) - np.minimum(part.min(axis=0), 0)
        step = np.abs(part).max(axis=0) / 127 if bits == 8 else spread / 15
        # With 4 bits the zero point is rounded, too, and up to an eighth of the range may be cut off.
        assert (error <= step * (0.51 if bits == 8 else 1.5)).all()


def test_4_bits_lose_a_tenth_less_than_steps_over_the_whole_range() -> None:
    weight = np.random.default_rng(2).standard_normal((640, 50)).astype(np.float32)
    blocks = weight.T.reshape(-1, 16)
    least, largest = blocks.min(axis=1), blocks.max(axis=1)
    step = ((np.maximum(largest, 0) - np.minimum(least, 0)) / 15)[:, None]
    zero_point = np.rint(-np.minimum(least, 0)[:, None] / step)
    whole = (np.clip(np.rint(blocks / step) + zero_point, 0, 15) - zero_point) * step
    lost = np.square(dequantised(weight, 4, 16) - weight).sum()
    assert lost < 0.9 * np.square(whole - blocks).sum()


@pytest.mark.parametrize("bits", BLOCKS)
@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
def test_equal_weights_are_kept(bits: int, value: float) -> None:
    weight = np.full((32, 4), value, np.float32)
    np.testing.assert_allclose(dequantised(weight, bits, 16), weight, rtol=1e-6)


@pytest.mark.parametrize("bits", BLOCKS)
def test_the_block_of_this_processor_is_exact(bits: int) -> None:
    block = exact_block(bits, {576, 40})
    assert block in BLOCKS[bits]
    assert rows_are_exact(bits, block, 1536)


def test_the_first_exact_block_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def only_32(bits: int, block: int, k: int) -> bool:
        tried.append((block, k))
        return block == 32 or k == 40

    monkeypatch.setattr(module, "rows_are_exact", only_32)
    assert exact_block(8, [40, 64]) == 32
    assert tried == [(64, 40), (64, 64), (32, 40), (32, 64)]
    assert exact_block(4, [64]) == 32  # the last: `check_rows` has the last word
