"""Weight matrices as ONNX Runtime's MatMulNBits reads them: blocks along K that share a scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CONTRIB_DOMAIN = "com.microsoft"
COMPUTE_INT8 = 4  # the accuracy level: rows are quantised to 8 bits, block by block

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]

_WIDTHS = (1.06, 1, 0.94, 0.88)  # of 4-bit steps, in fifteenths of the range: what lies outside is clipped


def quantised(weight: Floats, bits: int, block: int) -> tuple[Bytes, Floats] | tuple[Bytes, Floats, Bytes]:
    """Inputs of MatMulNBits for a matrix [K, N], of which blocks of K share a scale.

    Returns:
        [N, blocks, block * bits / 8] weights, the last block filled up with what stands for 0; [N * blocks] scales;
        with 4 bits the zero points, those of a column in whole bytes, too. With 8 bits 0 is in the middle.
    """
    k, n = weight.shape
    blocks = np.pad(weight.T, ((0, 0), (0, -k % block))).reshape(n, -1, block)
    if bits == 8:
        scale = _not_zero(np.abs(blocks).max(axis=-1) / 127)
        return (np.rint(blocks / scale[..., None]) + 128).astype(np.uint8), scale.reshape(-1)
    steps, scale, zero_point = _in_16_steps(blocks)
    pairs = np.pad(zero_point, ((0, 0), (0, zero_point.shape[1] % 2)))
    return _packed(steps + zero_point[..., None]), scale.reshape(-1), _packed(pairs).reshape(-1)


def _in_16_steps(blocks: Floats) -> tuple[Integers, Floats, Integers]:
    """Steps from 0 that stand for the weights [N, blocks, block], the size [N, blocks] of one, and where 0 lies.

    Of several widths of the steps that with the least squared error is taken, and the size that fits the steps best.
    Of normal weights it is a seventh less than with 15 steps from the least weight to the largest.
    """
    least, largest = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    whole = _not_zero((largest - least) / 15)
    zero_point = np.rint(-least / whole).clip(0, 15)[..., None]
    best, steps, scale = np.full(whole.shape, -1, np.float32), np.zeros_like(blocks), np.ones_like(whole)
    for width in _WIDTHS:
        tried = np.rint(blocks / (width * whole)[..., None]).clip(-zero_point, 15 - zero_point)
        products, squares = (np.einsum("nbk,nbk->nb", tried, other) for other in (blocks, tried))
        size = products / np.maximum(squares, 1)  # of least squares
        better = (gain := products * size) > best  # by so much less than without any steps is the error
        best[better], steps[better], scale[better] = gain[better], tried[better], size[better]
    return steps.astype(np.int8), _not_zero(scale), zero_point[..., 0].astype(np.int8)


def _not_zero(steps: Floats) -> Floats:
    """What a step of each block is; anything where all of it is 0."""
    return np.where(steps == 0, 1, steps).astype(np.float32)


def _packed(nibbles: Integers) -> Bytes:
    """[..., 2n] values below 16 -> [..., n] bytes, the first of a pair in the low half."""
    low, high = nibbles[..., 0::2].astype(np.uint8), nibbles[..., 1::2].astype(np.uint8)
    return low | (high << 4)
