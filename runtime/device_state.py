"""What a session has on the GPU: one stream, its memory, the contexts of its passes, and the ring they report to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from medusa_engine.runtime.cuda import Cuda, Event, Stream
from medusa_engine.runtime.device_buffers import lay_out
from medusa_engine.runtime.graph import CapturedPass
from medusa_engine.runtime.plan import DECODE, DTYPES, PREFILL, PROFILES, Plan
from medusa_engine.runtime.tensorrt_library import PlanContext, PlanEngine

RING_SLOTS = 2  # passes whose results may be unread

Int64Array = npt.NDArray[np.int64]


class Result(NamedTuple):
    """What the host knows behind a pass: that is all of the state it left, but for the cache.

    Attributes:
        tokens: [G] int64, published.
        past_length, pending_count: P and G.
        pending_rows: [D+1] int64.
        token_budget, finished: as in `Published`.
        proposed: [N_max] int64, tokens of the next tree; the root is negative where no logits decided it.
        seconds: device time of the pass.
    """

    tokens: Int64Array
    past_length: int
    pending_rows: Int64Array
    pending_count: int
    token_budget: int
    finished: bool
    proposed: Int64Array
    seconds: float

    @property
    def undecided(self) -> bool:
        return bool(self.proposed[0] < 0)


class DeviceState:
    """Launches passes into its stream and reads their results behind events; never waits for the whole stream.

    Every pass is followed by one copy of its outputs to the inputs of the next, and one to its slot of the ring. Tree
    rounds and plain steps are captured as CUDA graphs, each from a context of its own: their shapes never change.

    Args:
        path: of the plan.
        plan: its sidecar.
        engine: the plan.
        cuda: its device.

    Attributes:
        tainted: a row of the cache may hold NaN, which would reach every other through a mask.

    Raises:
        UserError: the memory does not suffice, or the library refuses.
    """

    def __init__(self, path: Path, plan: Plan, engine: PlanEngine, cuda: Cuda) -> None:
        self._path, self._plan, self._engine, self._cuda = path, plan, engine, cuda
        self._held = _Held(cuda)
        weakref.finalize(self, self._held.release).atexit = False  # the end of the process frees everything
        self.stream = self._held.stream
        layout = lay_out(path, plan, engine.scratch_bytes)
        self.buffers = replace(layout, base=self._held.allocate(layout.size))
        cuda.clear(self.buffers.base, layout.size, self.stream)  # cache rows that were never written must be finite
        self._staging = self._held.allocate_pinned(layout.staged)
        self._ring = [self._held.allocate_pinned(self.buffers.results[1]) for _ in range(RING_SLOTS)]
        self._begun = [self._held.event() for _ in self._ring]
        self._done = [self._held.event() for _ in self._ring]
        self._uploaded = self._held.event()  # staging is free again
        self._copied = self._held.event()
        self._chunk_context: PlanContext | None = None
        self._passes: dict[str, CapturedPass] = {}
        self.tainted = False
        self._write_constants()

    # What the host writes

    def write(self, values: dict[str, npt.ArrayLike]) -> None:
        """Put new contents into buffers, for the passes behind this; shorter arrays fill a beginning."""
        self._cuda.wait(self._uploaded)  # of what was written last, which lies before the passes in flight
        for name, value in values.items():
            place = self.buffers.places[name]
            array = np.ascontiguousarray(value, dtype=place.dtype).reshape(-1)
            self.buffers.staging(self._staging, name).reshape(-1)[: array.size] = array
            source = self._staging.ctypes.data + place.offset
            self._cuda.copy(self.buffers.address(name), source, array.nbytes, self.stream)
        self._cuda.record(self._uploaded, self.stream)

    def size(self, name: str) -> int:
        """Elements of a buffer."""
        return int(np.prod(self.buffers.places[name].shape))

    def has(self, name: str) -> bool:
        return name in self.buffers.places

    # Passes

    def launch(self, kind: str, slot: int) -> None:
        """Launch a tree round ("") or a plain step ("step"), which work on what the pass before left."""
        captured = self._passes.get(kind)
        if captured is None:
            context = self._context(PREFILL if kind else DECODE, kind, fixed_shapes=True)
            nodes = self._plan.bundle.limits.max_tree_nodes
            self._shape(context, rows=1 if kind else nodes, logit_rows=1 if kind else nodes)
            captured = CapturedPass(
                self._cuda,
                self.stream,
                self._pass_of(context),
                slots=RING_SLOTS,
                name=f"{self._path}, {'plain step' if kind else 'round'}",
            )
            self._passes[kind] = captured
            self._held.passes.append(captured)
        self._cuda.record(self._begun[slot], self.stream)
        captured.launch(slot)
        self._cuda.record(self._done[slot], self.stream)

    def launch_chunk(self, rows: int, slot: int) -> None:
        """Launch the prompt chunk that was written."""
        if self._chunk_context is None:
            self._chunk_context = self._context(PREFILL, "chunk", fixed_shapes=False)
        self._shape(self._chunk_context, rows=rows, logit_rows=1)
        self._cuda.record(self._begun[slot], self.stream)
        self._pass_of(self._chunk_context)(slot)
        self._cuda.record(self._done[slot], self.stream)

    def result(self, slot: int) -> Result:
        """Wait for the pass of a ring slot, and for no later one, and copy what it left out of the slot."""
        self._cuda.wait(self._done[slot])
        seconds = self._cuda.seconds(self._begun[slot], self._done[slot])

        def of(name: str) -> npt.NDArray[Any]:
            return self.buffers.result(self._ring[slot], name)

        count = int(of("accepted_count")[0])
        return Result(
            tokens=of("accepted_tokens")[:count].copy(),
            past_length=int(of("next_past_length")[0]),
            pending_rows=of("next_pending_rows").copy(),
            pending_count=int(of("next_pending_count")[0]),
            token_budget=int(of("next_token_budget")[0]),
            finished=bool(of("next_finished")[0]),
            proposed=of("next_input_ids")[0].copy(),
            seconds=seconds,
        )

    # The cache between answers

    def copy_cache_rows(self, source: DeviceState, moves: Iterable[tuple[int, int, int]]) -> None:
        """Copy rows of another state's cache, with its history, or of this one's, in order: each (from, to, rows).

        What the other does later waits for it on the device.
        """
        if source is not self:
            self._cuda.record(source._copied, source.stream)
            self._cuda.let_wait(self.stream, source._copied)
        for begin, end, rows in moves:
            for name in self.buffers.cache:
                place = self.buffers.places[name]
                _, heads, cache_rows, head_dim = place.shape
                row = head_dim * DTYPES[place.dtype]
                self._cuda.copy_rows(
                    self.buffers.address(name) + end * row,
                    cache_rows * row,
                    source.buffers.address(name) + begin * row,
                    cache_rows * row,
                    rows * row,
                    heads,
                    self.stream,
                )
        if source is not self:
            if self.has("history"):  # the tokens of those rows, for lookup
                count = self.buffers.places["history"].count
                self._cuda.copy(self.buffers.address("history"), source.buffers.address("history"), count, self.stream)
            self._cuda.record(self._copied, self.stream)
            self._cuda.let_wait(source.stream, self._copied)

    def read_cache(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of the whole cache behind what is in the stream: `key.L`, `value.L` -> [1, H_kv, S_max, head_dim]."""
        places = {name: self.buffers.places[name] for name in self.buffers.cache}
        copies = {}
        staging = self._cuda.allocate_pinned(max(place.count for place in places.values()))
        try:
            for name, place in places.items():
                self._cuda.copy(staging.ctypes.data, self.buffers.address(name), place.count, self.stream)
                self._cuda.synchronize(self.stream)
                values = staging[: place.count].copy()
                if place.dtype == "bfloat16":  # the upper half of fp32
                    copies[name] = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                else:
                    copies[name] = values.view(place.dtype)
                copies[name] = copies[name].reshape(place.shape)
        finally:
            self._cuda.free_pinned(staging)
        return copies

    def clear_cache(self, start: int) -> None:
        """Zero every row from `start` on, behind which nothing is tainted any more."""
        for name in self.buffers.cache:
            place = self.buffers.places[name]
            _, heads, rows, head_dim = place.shape
            row = head_dim * DTYPES[place.dtype]
            address = self.buffers.address(name) + start * row
            self._cuda.clear_rows(address, rows * row, (rows - start) * row, heads, self.stream)
        self.tainted = False

    def _context(self, profile: str, kind: str, *, fixed_shapes: bool) -> PlanContext:
        scratch = self.buffers.base + self.buffers.scratch
        context = self._engine.context(PROFILES.index(profile), scratch, self.stream, fixed_shapes=fixed_shapes)
        for name, address in self.buffers.bindings(self._plan, kind).items():
            context.bind(name, address)
        return context

    def _shape(self, context: PlanContext, *, rows: int, logit_rows: int) -> None:
        for tensor in self._plan.io:
            if tensor.mode == "input" and -1 in tensor.shape:
                size = logit_rows if tensor.name == "logit_rows" else rows
                context.shape(tensor.name, tuple(size if length < 0 else length for length in tensor.shape))

    def _pass_of(self, context: PlanContext) -> Callable[[int], None]:
        """What enqueues a pass for a ring slot; it does not keep this state alive."""
        cuda, stream, ring = self._cuda, self.stream, [array.ctypes.data for array in self._ring]
        feedback, (results, count) = self.buffers.feedback, self.buffers.results

        def enqueue(slot: int) -> None:
            context.enqueue(stream)
            cuda.copy(*feedback, stream)
            cuda.copy(ring[slot], results, count, stream)

        return enqueue

    def _write_constants(self) -> None:
        limits = self._plan.bundle.limits
        root = np.full(self.buffers.places["retrieve_indices"].shape, -1)  # the path of a tree of one row
        root[0, 0] = 0
        self.write(
            {
                "logit_rows": np.arange(limits.max_tree_nodes),
                "stop_ids": np.full(self.size("stop_ids"), -1),
                "step.tree_mask": np.ones(1),
                "step.logit_rows": np.zeros(1),
                "step.retrieve_indices": root,
                # The root of a chunk is a token of the prompt: it ends nothing.
                "chunk.stop_ids": np.full(self.size("chunk.stop_ids"), -1),
                "chunk.finished": np.zeros(1),
            }
        )


class _Held:
    """What has to be given back to CUDA, when nothing runs any more."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.stream: Stream = cuda.stream()
        self.passes: list[CapturedPass] = []
        self._addresses: list[int] = []
        self._pinned: list[npt.NDArray[np.uint8]] = []
        self._events: list[Event] = []

    def allocate(self, count: int) -> int:
        self._addresses.append(self._cuda.allocate(count))
        return self._addresses[-1]

    def allocate_pinned(self, count: int) -> npt.NDArray[np.uint8]:
        self._pinned.append(self._cuda.allocate_pinned(count))
        return self._pinned[-1]

    def event(self) -> Event:
        self._events.append(self._cuda.event())
        return self._events[-1]

    def release(self) -> None:
        self._cuda.synchronize(self.stream)
        for captured in self.passes:
            captured.close()
        for event in self._events:
            self._cuda.destroy_event(event)
        for address in self._addresses:
            self._cuda.free(address)
        for array in self._pinned:
            self._cuda.free_pinned(array)
        self._cuda.destroy_stream(self.stream)
