"""Where everything that a session has on the GPU lies: laid out once, in one allocation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import DTYPES, Plan, build_command

# What a pass leaves for the next, in the order of both blocks of memory: one copy feeds all of it back.
FEEDBACK = {
    "next_input_ids": "input_ids",
    "next_position_ids": "position_ids",
    "next_past_length": "past_length",
    "next_pending_rows": "pending_rows",
    "next_pending_count": "pending_count",
    "next_token_budget": "token_budget",
    "next_finished": "finished",
}
HISTORY = {"next_history": "history"}  # of plans with lookup: fed back too, but never read by the host
PUBLISHED = ("accepted_tokens", "accepted_count")
TREE_INPUTS = ("tree_mask", "logit_rows", "retrieve_indices", "tree_indices", "stop_ids")
POLICY_INPUTS = {
    "uniforms",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "posterior_threshold",
    "posterior_alpha",
    "root_drawn",
}
# Inputs that a plain step and a prompt chunk have for themselves; every other is that of the tree round.
STEP_INPUTS = ("tree_mask", "logit_rows", "retrieve_indices")
CHUNK_INPUTS = (
    "input_ids",
    "position_ids",
    "tree_mask",
    "logit_rows",
    "retrieve_indices",
    "stop_ids",
    "token_budget",
    "finished",
)

_ALIGNMENT = 256  # what TensorRT asks of an address


@dataclass(frozen=True)
class Buffer:
    """One tensor's place: bytes from the start of the allocation, its full shape, its dtype, one of plan.DTYPES."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True)
class DeviceBuffers:
    """Every device address of a session; none ever changes.

    In this order: what a pass hands to the next, inputs that the host writes, what a pass leaves, memory the passes
    work in, the cache.

    Attributes:
        base: address of the allocation.
        size: of it, in bytes.
        places: name -> buffer. Inputs and outputs have the plan's names, `step.NAME` and `chunk.NAME` those that the
            other passes have for themselves, `key.L` and `value.L` are the cache, past and present.
        staged: bytes at the start that the host has a copy of.
        scratch: offset of the memory that the passes work in.
    """

    base: int
    size: int
    places: Mapping[str, Buffer]
    staged: int
    scratch: int

    def address(self, name: str) -> int:
        return self.base + self.places[name].offset

    def bindings(self, plan: Plan, kind: str) -> dict[str, int]:
        """Address of every input and output for a pass: a tree round (""), "step" or "chunk"."""
        return {tensor.name: self.address(self._place(tensor.name, kind)) for tensor in plan.io}

    def _place(self, name: str, kind: str) -> str:
        if name.startswith(("past_key.", "past_value.", "present_key.", "present_value.")):
            return name.split("_", 1)[1]
        return f"{kind}.{name}" if f"{kind}.{name}" in self.places else name

    @property
    def feedback(self) -> tuple[int, int, int]:
        """The copy that hands a pass's state to the next: target, source, bytes."""
        first, last = next(iter(FEEDBACK)), [name for name in (*FEEDBACK, *HISTORY) if name in self.places][-1]
        source = self.address(first)
        return self.address(FEEDBACK[first]), source, self.address(last) + self.places[last].count - source

    @property
    def results(self) -> tuple[int, int]:
        """What the host reads of a pass: address and bytes."""
        last = list(FEEDBACK)[-1]
        source = self.address(PUBLISHED[0])
        return source, self.address(last) + self.places[last].count - source

    def result(self, memory: npt.NDArray[np.uint8], name: str) -> npt.NDArray[Any]:
        """An output in a copy of `results`, as a view."""
        place = self.places[name]
        begin = place.offset - self.places[PUBLISHED[0]].offset
        return memory[begin : begin + place.count].view(place.dtype).reshape(place.shape)

    def staging(self, memory: npt.NDArray[np.uint8], name: str) -> npt.NDArray[Any]:
        """A buffer of the host in its copy of the first `staged` bytes, as a view."""
        place = self.places[name]
        return memory[place.offset : place.offset + place.count].view(place.dtype).reshape(place.shape)

    @property
    def cache(self) -> list[str]:
        """Names of the cache's buffers."""
        return [name for name in self.places if name.startswith(("key.", "value."))]


def lay_out(path: Path, plan: Plan, scratch_bytes: int) -> DeviceBuffers:
    """Places relative to address 0; give them their base with `dataclasses.replace`.

    Raises:
        UserError: the plan has other inputs or outputs than this runtime knows.
    """
    tensors = {tensor.name: tensor for tensor in plan.io}
    _check_names(path, plan, tensors)
    nodes, chunk = plan.bundle.limits.max_tree_nodes, plan.max_prefill_chunk
    places: dict[str, Buffer] = {}
    end = 0

    def place(names: Iterable[str], *, kind: str = "", rows: int = nodes) -> None:
        nonlocal end
        for name in names:
            shape = tuple(rows if size < 0 else size for size in tensors[name].shape)
            if kind and name == "logit_rows":
                shape = (1,)
            stored = name.split("_", 1)[1] if name.startswith(("past_k", "past_v")) else name
            buffer = Buffer(end, shape, tensors[name].dtype)
            places[f"{kind}.{stored}" if kind else stored] = buffer
            end += -(-buffer.count // _ALIGNMENT) * _ALIGNMENT

    place(FEEDBACK.values())
    place(name for name in HISTORY.values() if name in tensors)
    place(TREE_INPUTS)
    place(name for name in tensors if name in POLICY_INPUTS)
    place(STEP_INPUTS, kind="step", rows=1)
    place(CHUNK_INPUTS, kind="chunk", rows=chunk)
    staged = end
    place((*PUBLISHED, *FEEDBACK))
    place(name for name in HISTORY if name in tensors)
    scratch = end
    end += -(-scratch_bytes // _ALIGNMENT) * _ALIGNMENT
    place(name for name in tensors if name.startswith(("past_key.", "past_value.")))
    return DeviceBuffers(0, end, places, staged, scratch)


def _check_names(path: Path, plan: Plan, names: Iterable[str]) -> None:
    layers = range(plan.bundle.limits.layers)
    cache = [f"{time}_{kind}.{layer}" for time in ("past", "present") for kind in ("key", "value") for layer in layers]
    needed = {*FEEDBACK, *FEEDBACK.values(), *PUBLISHED, *TREE_INPUTS, *cache}
    if plan.bundle.limits.lookup:
        needed |= {*HISTORY, *HISTORY.values()}
    missing, strange = needed - set(names), set(names) - needed - POLICY_INPUTS
    if missing or strange:
        what = f"has no {min(missing)}" if missing else f"has an input or output {min(strange)}"
        raise UserError(
            f"{path}: the plan {what}: this version of medusa-engine does not run it",
            f"export the model with this version and build it again: {build_command(path, plan)}",
        )
