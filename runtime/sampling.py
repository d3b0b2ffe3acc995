"""Draws from the target's processed distribution: the generator of the uniforms, and the draws in numpy.

The runtime hands the uniforms to the engine, whose graph draws with them; the rest is the reference that such a graph
must reproduce.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BITS = 23  # k + 0.5 of a k of 23 bits is exact in fp32: a uniform is neither 0 nor 1
_WORDS = 4  # 64-bit words that Philox gives for one value of its counter: one for each stream
TARGET_STREAM, ACCEPT_STREAM, DRAFT_STREAM = 0, 1, 2


def uniforms(seed: int, positions: Ints, stream: int = TARGET_STREAM) -> npt.NDArray[np.float32]:
    """One uniform of the open interval (0, 1) per position and stream, from a counter-based generator.

    The counter is the position of the row, not its number: rows of one position lie on different paths, and one path
    alone is walked. What a seed gives depends neither on the tree and the batch a token is verified in nor on any
    other answer, and rows with the same tokens before them draw the same token.

    Args:
        seed: 0 … 2**64 - 1, the generator's key.
        positions: [R] int64, at least 0; few more than R apart, for all between are made.
        stream: what is drawn at a position with it: the target's token behind it; whether the draft behind it is
            accepted; that draft itself.

    Returns:
        [R] float32.

    Source: Philox4x64-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    first, count = int(positions.min()), int(np.ptp(positions)) + 1
    generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=first)
    words = generator.random_raw(_WORDS * count).reshape(count, _WORDS)[positions - first, stream]  # [R] uint64
    values: npt.NDArray[np.float32] = ((words >> np.uint64(64 - _BITS)) + 0.5).astype(np.float32)
    return values / np.float32(2**_BITS)


def penalised_logits(logits: npt.NDArray[np.floating[Any]], token_ids: Ints, penalty: float) -> Floats:
    """Logits behind the repetition penalty: those of tokens that are there become less likely, once each.

    Args:
        logits: [V].
        token_ids: [T], every token of prompt, answer and path up to and with the row's own.
        penalty: divides positive logits and multiplies negative ones.

    Returns:
        [V] float64.

    Source: CTRL, arXiv 1909.05858, section 4.1, as in transformers' RepetitionPenaltyLogitsProcessor.
    """
    penalised = logits.astype(np.float64)
    scores = penalised[token_ids]
    penalised[token_ids] = np.where(scores < 0, scores * penalty, scores / penalty)
    return penalised


def processed_probabilities(
    logits: npt.NDArray[np.floating[Any]],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Floats:
    """What `sample` draws from: temperature, then top-k, then top-p, then min-p, as transformers orders them.

    Tokens whose logits equal that of the last token kept by top-k or top-p are kept too.

    Args:
        logits: [..., V].
        temperature: above 0.
        top_k, top_p, min_p: see `AcceptancePolicy`.

    Returns:
        [..., V] float64, probabilities.
    """
    logits = logits.astype(np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    weights = np.exp((logits - largest) / temperature)
    descending = -np.sort(-logits, axis=-1)
    if 0 < top_k < logits.shape[-1]:
        weights = np.where(logits >= descending[..., top_k - 1, None], weights, 0)
    if top_p < 1:
        ranked = -np.sort(-weights, axis=-1)
        before = ranked.cumsum(axis=-1) - ranked  # weight of the tokens ranked before each
        last = (before < top_p * weights.sum(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True) - 1
        weights = np.where(logits >= np.take_along_axis(descending, last, axis=-1), weights, 0)
    weights = np.where(weights >= min_p, weights, 0)  # the largest weight is 1
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def draw(probabilities: Floats, uniform: npt.NDArray[np.floating[Any]]) -> Ints:
    """The first token at which the cumulative probability exceeds the uniform.

    Args:
        probabilities: [..., V]; need not sum to 1.
        uniform: [...], in (0, 1).

    Returns:
        [...] int64 tokens, each of probability above 0.
    """
    cumulative = probabilities.cumsum(axis=-1)
    target = uniform[..., None] * cumulative[..., -1:]
    return np.asarray((cumulative <= target).sum(axis=-1), dtype=np.int64)
