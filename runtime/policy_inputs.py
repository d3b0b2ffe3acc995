"""The inputs of a policy's graphs: those that stay the same for a whole answer, and the uniforms of each pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.policy import GREEDY, REJECTION, TYPICAL, AcceptancePolicy
from medusa_engine.runtime.sampling import ACCEPT_STREAM, DRAFT_STREAM, uniforms


def constant_inputs(policy: AcceptancePolicy, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """Inputs by name: those of a policy's graphs that stay the same; none for greedy without penalty.

    `ranks` [C] says by its length how many of the largest logits the graph sorts: top_k of them, all for top_p alone,
    else one. `top_k` beyond that is off.
    """
    inputs: dict[str, npt.NDArray[Any]] = {}
    if policy.penalises:
        inputs["repetition_penalty"] = np.array([policy.repetition_penalty], dtype=np.float32)
    if policy.effective == GREEDY:
        return inputs
    top_k = min(policy.top_k or vocab_size, vocab_size)
    inputs |= {
        "temperature": np.array([policy.temperature], dtype=np.float32),
        "top_k": np.array([top_k], dtype=np.int64),
        "top_p": np.array([policy.top_p], dtype=np.float32),
        "min_p": np.array([policy.min_p], dtype=np.float32),
        "ranks": np.zeros(top_k if top_k < vocab_size or policy.top_p < 1 else 1, dtype=np.int64),
    }
    if policy.effective == TYPICAL:
        inputs |= {
            "posterior_threshold": np.array([policy.posterior_threshold], dtype=np.float32),
            "posterior_alpha": np.array([policy.posterior_alpha], dtype=np.float32),
            "root_drawn": np.array([policy.typical_root == "drawn"]),
        }
    return inputs


def drawn_inputs(
    policy: AcceptancePolicy, kind: str, positions: npt.NDArray[np.int64], heads: int
) -> dict[str, npt.NDArray[Any]]:
    """The uniforms of one pass by name: none for greedy.

    Under `rejection` three of independent streams concern the token behind a position: whether the draft is accepted,
    what is drawn from the target if not, and, for the next tree, the draft. No two draws that count share one: a draft
    that an earlier rejection discards was looked at by nobody.

    Args:
        kind: of the graph, "round" or "step".
        positions: [R] of the rows with logits, the root's first.
        heads: K.
    """
    if policy.effective == GREEDY:
        return {}
    inputs = {"uniforms": uniforms(policy.seed, positions)}
    if policy.effective == REJECTION and kind == "round":
        # The next root stands 1 to K+1 positions behind this one, draft j (from 0) behind position j from there.
        inputs["accept_uniforms"] = uniforms(policy.seed, positions, ACCEPT_STREAM)
        inputs["draft_uniforms"] = uniforms(policy.seed, positions[0] + 1 + np.arange(2 * heads), DRAFT_STREAM)
    return inputs


def plan_inputs(policy: AcceptancePolicy, acceptance: str, vocab_size: int, positions: int) -> dict[str, Any]:
    """Inputs by name of a plan, which has one graph for every policy that it runs; they stay for a whole answer.

    A graph of `sample` or `typical` is greedy at temperature 0. The uniforms are those of every position,
    [positions] fp32: the graph takes the ones of its rows.

    Args:
        acceptance: of the plan's graph.
        positions: S_max.
    """
    if acceptance == GREEDY:
        return {}
    greedy = policy.effective == GREEDY
    inputs = constant_inputs(AcceptancePolicy(acceptance) if greedy else policy, vocab_size)
    del inputs["ranks"]
    inputs["uniforms"] = uniforms(policy.seed, np.arange(positions))
    return inputs | ({"temperature": np.zeros(1, dtype=np.float32)} if greedy else {})
