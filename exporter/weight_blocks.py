"""Weight matrices as ONNX Runtime's MatMulNBits reads them: blocks along K that share a scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CONTRIB_DOMAIN = "com.microsoft"
COMPUTE_INT8 = 4  # the accuracy level: rows are quantised to 8 bits, block by block

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def quantised(weight: Floats, bits: int, block: int) -> tuple[Bytes, Floats] | tuple[Bytes, Floats, Bytes]:
    """Inputs of MatMulNBits for a matrix [K, N], of which blocks of K share a scale.

    Returns:
        [N, blocks, block * bits / 8] weights, the last block filled up with what stands for 0; [N * blocks] scales;
        with 4 bits the zero points, those of a column in whole bytes, too. With 8 bits 0 is in the middle.
    """
    k, n = weight.shape
    blocks = np.pad(weight.T, ((0, 0), (0, -k % block))).reshape(n, -1, block)
    if bits == 8:
        scale = _scale(np.abs(blocks).max(axis=-1) / 127)
        return (np.rint(blocks / scale[..., None]) + 128).astype(np.uint8), scale.reshape(-1)
    least, largest = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)  # [N, blocks]
    scale = _scale((largest - least) / 15)
    zero_point = np.rint(-least / scale).clip(0, 15).astype(np.uint8)
    values = (np.rint(blocks / scale[..., None]) + zero_point[..., None]).clip(0, 15).astype(np.uint8)
    pairs = np.pad(zero_point, ((0, 0), (0, zero_point.shape[1] % 2)))
    return _packed(values), scale.reshape(-1), _packed(pairs).reshape(-1)


def _scale(steps: Floats) -> Floats:
    """What a step of each block is; anything where all of it is 0."""
    return np.where(steps == 0, 1, steps).astype(np.float32)


def _packed(nibbles: Bytes) -> Bytes:
    """[..., 2n] values below 16 -> [..., n] bytes, the first of a pair in the low half."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
