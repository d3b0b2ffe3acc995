"""The inputs of a policy's graphs that stay the same for a whole answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.policy import GREEDY, TYPICAL, AcceptancePolicy


def constant_inputs(policy: AcceptancePolicy, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """Inputs by name: all of a policy's graphs but `uniforms` and `history`; none for greedy without penalty.

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
