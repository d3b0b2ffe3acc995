"""Passes of an engine at a fixed context: the same round or step again and again, the cache as long each time."""

from __future__ import annotations

import time
from dataclasses import fields
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.benchmarks.measure import milliseconds
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState, Slot
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.rounds import CHUNK_ROWS
from medusa_engine.runtime.tree import Tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan

BURST = 3  # timed passes per sample, behind one that is not: alone, a pass would find its threads asleep


def context_ids(vocab_size: int, rows: int) -> npt.NDArray[np.int64]:
    """A fixed prompt of `rows` token ids."""
    return np.random.default_rng(0).integers(vocab_size, size=rows)


class FixedContext:
    """A state of an engine that is put back to the same context before every pass.

    Args:
        engine: an open engine.
        context: prompt tokens in the cache, at least 1.
        tree: of the rounds; None for plain steps.
        policy: of acceptance; default: greedy.

    Raises:
        UserError: the engine cannot run the tree.
    """

    def __init__(
        self, engine: Engine, context: int, tree: Tree | None = None, policy: AcceptancePolicy | None = None
    ) -> None:
        backend = engine.backend
        assert isinstance(backend, OnnxRuntimeBackend)
        policy = policy or AcceptancePolicy()
        backend.load(speculation=tree is not None, policy=policy.graph)
        self._tree: TreeBuffers | None = None if tree is None else TreePlan(tree, engine.limits).full
        self.state: OnnxRuntimeState = backend.new_state()
        self.state.use(policy)
        self._prompt = context_ids(engine.limits.vocab_size, context)
        self._empty = self._kept()
        self.prefill()
        self._slot = self._kept()

    def prefill(self) -> float:
        """Milliseconds of running the whole context once more."""
        self._put_back(self._empty)
        return milliseconds(self._prefill)

    def rewind(self) -> None:
        """Forget what was appended: rows behind the context are written anew by the next pass."""
        self._put_back(self._slot)

    def run(self) -> None:
        """One pass, launched and read."""
        if self._tree is None:
            self.state.step()
        else:
            self.state.round(self._tree, self._tree)
        self.state.read()

    def sample(self) -> float:
        """Milliseconds of one pass at the context: the median of a burst."""
        times = []
        for _ in range(1 + BURST):
            self.rewind()
            times.append(milliseconds(self.run))
        return median(times[1:])

    def _prefill(self) -> None:
        for start in range(0, len(self._prompt), CHUNK_ROWS):
            self.state.prefill(self._prompt[start : start + CHUNK_ROWS], start, self._tree)
        self.state.read()

    def _kept(self) -> dict[str, npt.NDArray[Any]]:
        return {field.name: getattr(self.state.slot, field.name).copy() for field in fields(Slot)}

    def _put_back(self, kept: dict[str, npt.NDArray[Any]]) -> None:
        for name, value in kept.items():
            getattr(self.state.slot, name)[...] = value


def host_overhead(engine: Engine, *, context: int, passes: int, speculation: bool) -> tuple[list[float], list[float]]:
    """What the loop spends outside the engine call: reading, text, binding the next pass.

    Returns:
        Per pass, milliseconds outside `run_with_iobinding` and inside it, from one piece of an answer to the next.
    """
    backend = engine.backend
    assert isinstance(backend, OnnxRuntimeBackend)
    session: Any = backend.session("round" if speculation else "step")
    run = session.run_with_iobinding
    inside = 0.0

    def timed_run(*arguments: Any) -> None:
        nonlocal inside
        inside += milliseconds(lambda: run(*arguments))

    session.run_with_iobinding = timed_run
    try:
        stream = engine.stream(
            prompt_ids=context_ids(engine.limits.vocab_size, context).tolist(),
            max_new_tokens=engine.limits.max_length - context,
            ignore_eos=True,
            speculation=speculation,
            adaptive=False,
        )
        next(stream)  # the prompt and the first pass
        outside_times, inside_times = [], []
        for _ in range(passes):
            inside = 0.0
            started = time.perf_counter()
            next(stream)
            outside_times.append(1000 * (time.perf_counter() - started) - inside)
            inside_times.append(inside)
    finally:
        session.run_with_iobinding = run
    return outside_times, inside_times
