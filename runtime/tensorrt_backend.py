"""A plan as a `Backend`: rounds run ahead of the host on the GPU, and are read behind events."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.backend import Published, SessionState
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.cuda import Cuda, open_cuda
from medusa_engine.runtime.device_state import RING_SLOTS, DeviceState, Result
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import Plan
from medusa_engine.runtime.plan_fit import check_device
from medusa_engine.runtime.policy import GREEDY, AcceptancePolicy
from medusa_engine.runtime.policy_inputs import plan_inputs
from medusa_engine.runtime.tensorrt_library import TensorRtLibrary
from medusa_engine.runtime.tree_buffers import TreeBuffers

Int64Array = npt.NDArray[np.int64]

ROUND, STEP = "", "step"
_NO_BUDGET = 1 << 62
_ROOT_ALONE = np.zeros(1, dtype=np.int64)  # `tree_indices`


class TensorRtBackend:
    """`Backend` over a plan on one GPU.

    A session's memory, contexts and captured graphs are costly to make: those of the session that was closed last are
    kept for the next one.

    Args:
        path: of a plan whose files were checked.
        plan: its sidecar.

    Raises:
        UserError: the library or the GPU is missing or another than the plan was built for, or refuses it.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        library = TensorRtLibrary(path, plan)
        self._cuda: Cuda = open_cuda()
        check_device(path, plan, compute_capability=self._cuda.compute_capability, device=self._cuda.name)
        self._engine = library.deserialize()
        self._idle: deque[DeviceState] = deque(maxlen=1)  # no lock: a collection of garbage may append to it

    def load(self, *, speculation: bool, policy: str = GREEDY) -> None:
        """The plan is loaded already, with the one graph that it has for every policy and for plain steps."""

    def new_state(self) -> TensorRtState:
        """An empty cache and its buffers on the GPU."""
        try:
            device = self._idle.pop()
        except IndexError:
            device = DeviceState(self.path, self.plan, self._engine, self._cuda)
        state = TensorRtState(self.path, self.plan, device)
        weakref.finalize(state, self._idle.append, device).atexit = False
        return state


class _Launched(NamedTuple):
    """A pass whose result was not read yet: its ring slot, and whether `read` is to return it."""

    slot: int
    wanted: bool
    decodes: bool


class TensorRtState:
    """`SessionState` of a plan: the host launches passes, up to `ahead` more than it has read.

    A pass may have been launched that the answer turns out not to need. It changed nothing that counts: what it
    published stands behind what was read, and `wind_back` or `keep_pending` leave it out.

    Args:
        path, plan: of the backend.
        device: what it has on the GPU, for itself.
    """

    ahead = RING_SLOTS - 1

    def __init__(self, path: Path, plan: Plan, device: DeviceState) -> None:
        self._path, self._plan, self._device = path, plan, device
        self._limits = plan.bundle.limits
        self._launched: deque[_Launched] = deque()
        self._next_slot = 0
        self._last = _nothing_yet(self._limits.depth, self._limits.max_tree_nodes)  # behind the last pass waited for
        self._read = self._last  # what `read` returned
        self._rows_ready = 0
        self._tree: TreeBuffers | None = None  # those that the device holds
        self._next_indices: Int64Array | None = None
        self._commit(0, 0)
        self.use(AcceptancePolicy())
        self.limit(frozenset(), _NO_BUDGET)

    def use(self, policy: AcceptancePolicy) -> None:
        assert policy.effective in self._plan.policies and not policy.penalises
        positions = self._device.size("uniforms") if self._device.has("uniforms") else 0
        values = plan_inputs(policy, self._plan.acceptance, self._limits.vocab_size, positions)
        self._device.write({name: value for name, value in values.items() if self._device.has(name)})

    def limit(self, stop_ids: Set[int], token_budget: int) -> None:
        ids = np.full(self._device.size("stop_ids"), -1)
        if len(stop_ids) > len(ids):
            raise UserError(
                f"{self._path}: {counted(len(stop_ids), 'stop token')}, but the plan has room for {len(ids)}",
                "give fewer, or build a plan of a model with as many",
            )
        ids[: len(stop_ids)] = sorted(stop_ids)
        self._device.write({"stop_ids": ids})
        self._token_budget = token_budget

    @property
    def rows_ready(self) -> int:
        return self._rows_ready

    def prefill(self, token_ids: Int64Array, start: int, next_tree: TreeBuffers | None) -> None:
        most = self._plan.max_prefill_chunk
        for begin in range(0, len(token_ids), most):
            self._prefill(token_ids[begin : begin + most], start + begin, next_tree)

    def round(self, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        self._propose(next_tree)
        if len(tree.tree_indices) == 1:  # one row costs as much as a plain step there
            self._decode(STEP)
            return
        if self._tree is not tree:
            mask = np.eye(self._limits.max_tree_nodes, dtype=np.bool_)  # rows of padding see themselves alone
            mask[: len(tree.tree_mask), : len(tree.tree_mask)] = tree.tree_mask
            paths = np.full((self._limits.max_tree_nodes, self._limits.depth + 1), -1)
            paths[: len(tree.retrieve_indices)] = tree.retrieve_indices
            self._device.write({"tree_mask": mask, "retrieve_indices": paths})
            self._tree = tree
        self._decode(ROUND)

    def step(self) -> None:
        self._propose(None)
        self._decode(STEP)

    def read(self) -> Published:
        """Wait for the oldest pass that was not read; behind a prompt for the last chunk, and for no later pass."""
        while self._launched:
            launched = self._launched[0]
            if launched.decodes and launched.wanted:
                self._refuse_undecided()
            self._wait()
            if launched.wanted:
                break
        self._read = self._last
        return Published(
            self._last.tokens,
            self._last.past_length,
            self._last.token_budget,
            self._last.finished,
            not self._last.undecided,
            self._last.seconds,
        )

    def proposed(self) -> Int64Array:
        self._drain()
        return self._last.proposed[: self._rows_ready].copy()

    def keep_proposed(self, rows: Int64Array) -> None:
        raise AssertionError("passes are launched ahead of those that were read")

    @property
    def pending_rows(self) -> Int64Array:
        """[D+1] packed rows that the pass read last accepted; only its first G count."""
        return self._read.pending_rows

    def cache_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """`key.L` and `value.L` -> [1, H_kv, S_max, head_dim], copied; no pass is in flight then."""
        self._drain()
        return self._device.read_cache()

    def keep_pending(self, count: int) -> None:
        read = self._read
        self._drain()
        if self._last is read:
            self._commit(read.past_length, count)
        else:  # passes behind it have committed what it published
            self._commit(read.past_length + count, 0)

    def wind_back(self, tokens: int) -> None:
        self._drain()
        past_length = self._last.past_length
        pending = max(tokens - past_length, 0)
        assert pending <= self._last.pending_count, "the cache holds fewer tokens"
        if self._device.tainted:
            self._device.copy_cache_rows(self._device, self._moves(past_length, pending))
            self._device.clear_cache(tokens)
            past_length, pending = tokens, 0
        self._commit(min(tokens, past_length), pending)

    def copy_from(self, source: SessionState) -> None:
        assert isinstance(source, TensorRtState)
        source._drain()
        last = source._last
        moves = [(0, 0, last.past_length), *source._moves(last.past_length, last.pending_count)]
        self._device.copy_cache_rows(source._device, [move for move in moves if move[2]])
        self._device.tainted = source._device.tainted
        self._commit(last.past_length + last.pending_count, 0)

    def _moves(self, past_length: int, pending: int) -> list[tuple[int, int, int]]:
        """The copies that compact the first `pending` accepted rows, which stand where their tree had them."""
        rows = self._last.pending_rows[:pending].tolist()
        return [(past_length + row, past_length + index, 1) for index, row in enumerate(rows)]

    def _prefill(self, token_ids: Int64Array, start: int, next_tree: TreeBuffers | None) -> None:
        rows = len(token_ids)
        self._launched = deque(launched._replace(wanted=False) for launched in self._launched)
        self._propose(next_tree)
        path = np.full(self._limits.depth + 1, -1)
        path[0] = rows - 1  # a tree of one node: the last row is the root, the rows before it are committed
        self._device.write(
            {
                "chunk.input_ids": token_ids,
                "chunk.position_ids": np.arange(start, start + rows),
                "chunk.tree_mask": np.tri(rows, dtype=np.bool_),
                "chunk.logit_rows": np.array([rows - 1]),
                "chunk.retrieve_indices": self._root_path(path),
                "chunk.token_budget": np.array([self._token_budget + 1]),
            }
        )
        slot = self._free_slot()
        self._device.launch_chunk(rows, slot)
        self._launched.append(_Launched(slot, wanted=True, decodes=False))

    def _root_path(self, path: Int64Array) -> Int64Array:
        paths = np.full((self._limits.max_tree_nodes, self._limits.depth + 1), -1)
        paths[0] = path
        return paths

    def _propose(self, next_tree: TreeBuffers | None) -> None:
        """Let the next pass propose a tree, padded with roots, or the root alone."""
        indices = _ROOT_ALONE if next_tree is None else next_tree.tree_indices
        if self._next_indices is not indices:
            padded = np.zeros(self._limits.max_tree_nodes, dtype=np.int64)
            padded[: len(indices)] = indices
            self._device.write({"tree_indices": padded})
            self._next_indices = indices
        self._rows_ready = len(indices)

    def _decode(self, kind: str) -> None:
        if not self._launched:
            self._refuse_undecided()
        slot = self._free_slot()
        self._device.launch(kind, slot)
        self._launched.append(_Launched(slot, wanted=True, decodes=True))

    def _free_slot(self) -> int:
        """The ring's next slot; what was written there is waited for."""
        while len(self._launched) >= RING_SLOTS:
            self._wait()
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % RING_SLOTS
        return slot

    def _wait(self) -> None:
        self._last = self._device.result(self._launched[0].slot)
        self._device.tainted |= self._last.undecided
        self._launched.popleft()

    def _drain(self) -> None:
        while self._launched:
            self._wait()

    def _commit(self, past_length: int, pending_count: int) -> None:
        """Let the cache hold these rows only; no pass is in flight."""
        self._last = self._last._replace(past_length=past_length, pending_count=pending_count)
        self._device.write({"past_length": np.array([past_length]), "pending_count": np.array([pending_count])})

    def _refuse_undecided(self) -> None:
        """Raise an error where the logits behind the last token that was waited for decided no other."""
        if self._last.undecided:
            raise UserError(
                f"{self._path}: the model's logits behind the last token are NaN or infinite",
                "decode without speculation, in case a draft caused it, or export a checkpoint whose weights are right",
            )


def _nothing_yet(depth: int, nodes: int) -> Result:
    def zeros(size: int) -> Int64Array:
        return np.zeros(size, dtype=np.int64)

    return Result(zeros(0), 0, zeros(depth + 1), 0, _NO_BUDGET, False, zeros(nodes), 0.0)
