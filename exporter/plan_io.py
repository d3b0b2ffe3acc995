"""The inputs and outputs that a plan has by its bundle's manifest."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_engine.runtime.manifest import Manifest
from medusa_engine.runtime.plan import Tensor
from medusa_engine.runtime.policy import GREEDY, TYPICAL

FREE = -1  # N, and R of `logit_rows`: bounded by the optimization profiles


def plan_io(manifest: Manifest, acceptance: str, stop_count: int) -> tuple[Tensor, ...]:
    """Every input, then every output, of the round of an acceptance policy.

    Args:
        stop_count: of the bundle's stop ids.
    """
    limits = manifest.limits
    nodes, path = limits.max_tree_nodes, limits.depth + 1
    cache = (1, limits.kv_heads, limits.cache_rows, limits.head_dim)
    layers = range(limits.layers)
    history = ("int64", (limits.cache_rows,))
    inputs = {
        "input_ids": ("int64", (1, FREE)),
        "position_ids": ("int64", (1, FREE)),
        "tree_mask": ("bool", (FREE, FREE)),
        "logit_rows": ("int64", (FREE,)),
        "retrieve_indices": ("int64", (nodes, path)),
        "tree_indices": ("int64", (nodes,)),
        "past_length": ("int64", (1,)),
        "pending_rows": ("int64", (path,)),
        "pending_count": ("int64", (1,)),
        "stop_ids": ("int64", (max(stop_count, 1),)),
        "token_budget": ("int64", (1,)),
        "finished": ("bool", (1,)),
        **_policy_inputs(acceptance, limits.cache_rows),
        **({"history": history} if limits.lookup else {}),
        **{f"past_{kind}.{layer}": (manifest.dtype, cache) for kind in ("key", "value") for layer in layers},
    }
    outputs = {
        "accepted_tokens": ("int64", (path,)),
        "accepted_count": ("int64", (1,)),
        "next_token_budget": ("int64", (1,)),
        "next_finished": ("bool", (1,)),
        "next_input_ids": ("int64", (1, nodes)),
        "next_position_ids": ("int64", (1, nodes)),
        "next_past_length": ("int64", (1,)),
        "next_pending_rows": ("int64", (path,)),
        "next_pending_count": ("int64", (1,)),
        **({"next_history": history} if limits.lookup else {}),
        **{f"present_{kind}.{layer}": (manifest.dtype, cache) for kind in ("key", "value") for layer in layers},
    }
    return tuple(
        Tensor(name, mode, dtype, shape)
        for mode, table in (("input", inputs), ("output", outputs))
        for name, (dtype, shape) in table.items()
    )


def differences(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[str]:
    """What differs between two tables, a phrase for each tensor; the order counts for nothing."""
    wanted, present = ({tensor.name: tensor for tensor in table} for table in (expected, found))
    phrases = [f"the {tensor.mode} {name} is missing" for name, tensor in wanted.items() if name not in present]
    phrases += [f"there is an {tensor.mode} {name}" for name, tensor in present.items() if name not in wanted]
    for name, tensor in wanted.items():
        other = present.get(name, tensor)
        if other != tensor:
            phrases.append(f"{_described(other)} should be {_described(tensor)}")
    return phrases


def _described(tensor: Tensor) -> str:
    return f"{tensor.mode} {tensor.name} {tensor.dtype} {list(tensor.shape)}"


def _policy_inputs(acceptance: str, cache_rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    if acceptance == GREEDY:
        return {}
    inputs: dict[str, tuple[str, tuple[int, ...]]] = {
        "uniforms": ("float32", (cache_rows,)),
        "temperature": ("float32", (1,)),
        "top_k": ("int64", (1,)),
        "top_p": ("float32", (1,)),
        "min_p": ("float32", (1,)),
    }
    if acceptance == TYPICAL:
        inputs |= {
            "posterior_threshold": ("float32", (1,)),
            "posterior_alpha": ("float32", (1,)),
            "root_drawn": ("bool", (1,)),
        }
    return inputs
