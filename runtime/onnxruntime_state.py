"""A session's state with ONNX Runtime: cache and slots, bound once and fed back without copies."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from medusa_engine.runtime.backend import Published, SessionState
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.graph_binding import GraphBinding
from medusa_engine.runtime.manifest import Limits, graph_name
from medusa_engine.runtime.onnxruntime_errors import refusal
from medusa_engine.runtime.policy import REJECTION, AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs, drawn_inputs
from medusa_engine.runtime.providers import CPU
from medusa_engine.runtime.tree_buffers import TreeBuffers

if TYPE_CHECKING:
    from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend

Int64Array = npt.NDArray[np.int64]

_ROOT_ALONE = np.ones((1, 1), dtype=np.bool_)
_NO_STOP_IDS = np.array([-1])
_NO_BUDGET = 1 << 62


@dataclass(frozen=True)
class Slot:
    """State that one pass leaves for the next.

    Attributes:
        input_ids, position_ids: [1, rows] int64, tokens of the next tree and where they stand.
        past_length, pending_count: [1] int64.
        pending_rows: [D+1] int64.
        accepted_tokens: [D+1] int64, published by the pass that wrote this slot; -1 behind the count.
        accepted_count: [1] int64, G.
        token_budget: [1] int64, tokens that may still be published.
        finished: [1] bool, no later pass publishes anything.
    """

    input_ids: Int64Array
    position_ids: Int64Array
    past_length: Int64Array
    pending_rows: Int64Array
    pending_count: Int64Array
    accepted_tokens: Int64Array
    accepted_count: Int64Array
    token_budget: Int64Array
    finished: npt.NDArray[np.bool_]

    @classmethod
    def allocate(cls, rows: int, depth: int) -> Slot:
        shapes = ((1, rows), (1, rows), (1,), (depth + 1,), (1,), (depth + 1,), (1,), (1,))
        arrays: list[Any] = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        return cls(*(*arrays, np.zeros(1, dtype=np.bool_)))


class OnnxRuntimeState:
    """`SessionState` whose passes read one slot, write the other, and update the cache where it lies."""

    ahead = 0

    def __init__(self, backend: OnnxRuntimeBackend) -> None:
        self._backend = backend
        limits = backend.limits
        rows = max(limits.max_tree_nodes, 1 + limits.heads * limits.topk + limits.lookup)  # all candidates have room
        self._slots = tuple(Slot.allocate(rows, limits.depth) for _ in range(2))
        self._current = 0  # the slot that the next pass reads
        self._rows_ready = 0
        self._bindings: dict[tuple[str, int], GraphBinding] = {}  # by graph, and the slot that it reads
        self._all_rows: dict[int, Int64Array] = {}  # N -> [N]: every row has logits
        self._first_rows: dict[tuple[int, int], tuple[Int64Array, Int64Array]] = {}
        self._proposals: list[npt.NDArray[np.float32]] = []  # [K, V] beside each slot, once `rejection` is used
        self.cache = _allocate_cache(limits, backend.provider)
        self.history = np.zeros(limits.cache_rows, dtype=np.int64)
        self.use(AcceptancePolicy())
        self.limit(frozenset(), _NO_BUDGET)

    def use(self, policy: AcceptancePolicy) -> None:
        self._policy = policy
        if policy.effective == REJECTION and not self._proposals:
            shape = (self._backend.limits.heads, self._backend.limits.vocab_size)
            self._proposals = [np.zeros(shape, dtype=np.float32) for _ in self._slots]
        self._policy_inputs = constant_inputs(policy, self._backend.limits.vocab_size)

    def limit(self, stop_ids: Set[int], token_budget: int) -> None:
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int64) if stop_ids else _NO_STOP_IDS  # [S]
        self._token_budget = token_budget

    @property
    def slot(self) -> Slot:
        """What the last pass left."""
        return self._slots[self._current]

    @property
    def rows_ready(self) -> int:
        return self._rows_ready

    def prefill(self, token_ids: Int64Array, start: int, next_tree: TreeBuffers | None) -> None:
        rows = len(token_ids)
        self.history[start : start + rows] = token_ids
        inputs = {
            "input_ids": token_ids[None],  # [1, N]
            "position_ids": np.arange(start, start + rows)[None],  # [1, N]
            "tree_mask": np.tri(rows, dtype=np.bool_),  # [N, N]
            "logit_rows": np.array([rows - 1]),
            # The root of a chunk is a token of the prompt: it ends nothing, and is not counted.
            "stop_ids": _NO_STOP_IDS,
            "token_budget": np.array([self._token_budget + 1]),
            "finished": np.zeros(1, dtype=np.bool_),
        }
        if next_tree is None:
            self._run("step", inputs, next_rows=1)
        else:
            # A chunk is a tree of one node: its last row is the root, the rows before it are committed.
            inputs["retrieve_indices"] = np.full((1, self._backend.limits.depth + 1), -1)
            inputs["retrieve_indices"][0, 0] = rows - 1
            self._run_round(inputs, next_tree)

    def round(self, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        inputs = self._verify(len(tree.tree_indices), tree.tree_mask)
        inputs["retrieve_indices"] = tree.retrieve_indices
        self._run_round(inputs, next_tree)

    def step(self) -> None:
        self._run("step", self._verify(1, _ROOT_ALONE), next_rows=1)

    def read(self) -> Published:
        slot = self.slot
        return Published(
            slot.accepted_tokens[: slot.accepted_count[0]].copy(),
            int(slot.past_length[0]),
            int(slot.token_budget[0]),
            bool(slot.finished[0]),
            bool(slot.input_ids[0, 0] >= 0),
        )

    def proposed(self) -> Int64Array:
        return self.slot.input_ids[0, : self._rows_ready].copy()

    def keep_proposed(self, rows: Int64Array) -> None:
        self._rows_ready = len(rows)
        if len(rows) > 1 or rows[0]:
            for array in (self.slot.input_ids, self.slot.position_ids):
                array[0, : len(rows)] = array[0, rows]

    def keep_pending(self, count: int) -> None:
        self.slot.pending_count[0] = count

    def wind_back(self, tokens: int) -> None:
        # Tokens behind the P committed rows are still staged where their tree had them, and stay pending.
        past_length = int(self.slot.past_length[0])
        pending = max(tokens - past_length, 0)
        assert pending <= self.slot.pending_count[0], "the cache holds fewer tokens"
        self.slot.past_length[0] = min(tokens, past_length)
        self.keep_pending(pending)

    def copy_from(self, source: SessionState) -> None:
        assert isinstance(source, OnnxRuntimeState)
        past_length, pending = int(source.slot.past_length[0]), int(source.slot.pending_count[0])
        rows = np.concatenate([np.arange(past_length), past_length + source.slot.pending_rows[:pending]])
        for name, buffer in source.cache.items():
            array = self.cache[name].numpy()  # the buffer itself on the CPU, else a copy
            array[:, :, : len(rows)] = buffer.numpy()[:, :, rows]
            if self._backend.provider != CPU:
                self.cache[name].update_inplace(array)
        self.history[: len(rows)] = source.history[: len(rows)]
        self.slot.past_length[0] = len(rows)

    @property
    def pending_rows(self) -> Int64Array:
        """[D+1] packed rows that the last pass accepted; only its first G count."""
        return self.slot.pending_rows

    def cache_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """`key.L` and `value.L` -> [1, H_kv, S_max, head_dim]; where the cache lies, or copied from the GPU."""
        return {name: buffer.numpy() for name, buffer in self.cache.items()}

    def _verify(self, rows: int, mask: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """Inputs of a pass over the first `rows` packed rows that the last pass proposed."""
        if self.slot.input_ids[0, 0] < 0:
            raise UserError(
                "the model's logits behind the last token are NaN or infinite",
                "export a checkpoint whose weights are right",
                file=self._backend.folder,
            )
        if rows not in self._all_rows:
            self._all_rows[rows] = np.arange(rows)
        input_ids, position_ids = self._tokens(self._current, rows)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "tree_mask": mask,
            "logit_rows": self._all_rows[rows],
            "stop_ids": self._stop_ids,
            "token_budget": self.slot.token_budget,
            "finished": self.slot.finished,
        }

    def _tokens(self, slot: int, rows: int) -> tuple[Int64Array, Int64Array]:
        """Tokens and positions [1, rows] of a slot's first rows; the same arrays each time, which are bound once."""
        if (slot, rows) not in self._first_rows:
            arrays = self._slots[slot]
            self._first_rows[slot, rows] = arrays.input_ids[:, :rows], arrays.position_ids[:, :rows]
        return self._first_rows[slot, rows]

    def _run_round(self, inputs: dict[str, npt.NDArray[Any]], next_tree: TreeBuffers) -> None:
        inputs["tree_indices"] = next_tree.tree_indices
        self._run("round", inputs, next_rows=len(next_tree.tree_indices))

    def _run(self, kind: str, inputs: dict[str, npt.NDArray[Any]], *, next_rows: int) -> None:
        graph = graph_name(kind, self._policy.graph)
        session = self._backend.session(graph)
        self._backend.files.check_weights()
        try:
            self._bind_and_run(graph, session, kind, inputs, next_rows)
        except (RuntimeError, ValueError, MemoryError) as error:  # a graph that is not what its manifest says
            path = self._backend.files.path(graph)
            raise refusal(path, "a pass of the graph fails", error) from error
        self._current = 1 - self._current
        self._rows_ready = next_rows

    def _bind_and_run(
        self,
        graph: str,
        session: ort.InferenceSession,
        kind: str,
        inputs: dict[str, npt.NDArray[Any]],
        next_rows: int,
    ) -> None:
        """Read one slot and the cache, write the other slot and the cache."""
        key = graph, self._current
        if key not in self._bindings:
            self._bindings[key] = GraphBinding(session, self.cache, self._backend.provider)
        other = 1 - self._current
        before, after = self.slot, self._slots[other]
        inputs["past_length"] = before.past_length
        inputs["pending_rows"] = before.pending_rows
        inputs["pending_count"] = before.pending_count
        inputs |= self._policy_inputs
        positions = inputs["position_ids"][0, inputs["logit_rows"]]  # [R], the root's first
        if self._policy.penalises or (kind == "round" and self._backend.limits.lookup):
            inputs["history"] = self.history[: positions[0]]  # [T], before the root
        inputs |= drawn_inputs(self._policy, kind, positions, self._backend.limits.heads)
        next_ids, next_positions = self._tokens(other, next_rows)
        outputs: dict[str, npt.NDArray[Any]] = {
            "accepted_tokens": after.accepted_tokens,
            "accepted_count": after.accepted_count,
            "next_token_budget": after.token_budget,
            "next_finished": after.finished,
            "next_input_ids": next_ids,
            "next_position_ids": next_positions,
            "next_past_length": after.past_length,
            "next_pending_rows": after.pending_rows,
            "next_pending_count": after.pending_count,
        }
        if kind == "round" and self._policy.effective == REJECTION:
            inputs["proposal"] = self._proposals[self._current]
            outputs["next_proposal"] = self._proposals[other]
        self._bindings[key].run(inputs, outputs)
        published, count = after.past_length[0], after.accepted_count[0]
        self.history[published : published + count] = after.accepted_tokens[:count]


def _allocate_cache(limits: Limits, device: str) -> dict[str, ort.OrtValue]:
    """`key.L` and `value.L` -> [1, H_kv, S_max, head_dim] zeros: rows never written must stay finite."""
    shape = (1, limits.kv_heads, limits.cache_rows, limits.head_dim)
    return {
        f"{kind}.{layer}": ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype=np.float32), device, 0)
        for kind in ("key", "value")
        for layer in range(limits.layers)
    }
