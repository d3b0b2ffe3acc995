"""A pass of a session as CUDA graphs: captured once behind a warm-up, replayed from then on.

A captured copy has its destination fixed, so there is one graph for each slot of the ring that passes write their
results to. The alternative, one graph whose copy node gets another destination before each launch
(cudaGraphExecMemcpyNodeSetParams1D), needs the node found among those that the engine captured; a ring of two slots
costs one more capture instead. Policy parameters, trees and uniforms are memory the graph reads, so one set of graphs
serves every policy of a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from medusa_engine.runtime.cuda import Cuda, Graph, Stream
from medusa_engine.runtime.errors import UserError

_log = logging.getLogger(__name__)


class CapturedPass:
    """Launches a pass: plainly the first time, which is the warm-up, then as one graph per ring slot.

    Where the capture fails, passes go on being enqueued plainly, and a warning says why.

    Args:
        cuda, stream: where it runs.
        enqueue: puts the pass for a ring slot into the stream: the engine, the feedback of its outputs into the next
            pass's inputs, and the copy of its results to the slot. It allocates nothing behind the first call.
        slots: of the ring.
        name: of the pass, for the warning.
    """

    def __init__(self, cuda: Cuda, stream: Stream, enqueue: Callable[[int], None], *, slots: int, name: str) -> None:
        self._cuda = cuda
        self._stream = stream
        self._enqueue = enqueue
        self._name = name
        self._graphs: list[Graph | None] = [None] * slots
        self._warm = False
        self._capturable = True

    @property
    def captured(self) -> int:
        """How many slots have a graph."""
        return sum(graph is not None for graph in self._graphs)

    def launch(self, slot: int) -> None:
        """Put one pass into the stream whose results go to ring slot `slot`.

        Raises:
            UserError: the engine or CUDA refuses it.
        """
        if self._warm and self._capturable and self._graphs[slot] is None:
            self._capture(slot)
        graph = self._graphs[slot]
        if graph is None:
            self._enqueue(slot)
            self._warm = True
        else:
            self._cuda.launch(graph, self._stream)

    def close(self) -> None:
        """Release the graphs; no pass of them runs any more."""
        for slot, graph in enumerate(self._graphs):
            if graph is not None:
                self._cuda.destroy_graph(graph)
            self._graphs[slot] = None

    def _capture(self, slot: int) -> None:
        try:
            self._graphs[slot] = self._cuda.capture(lambda: self._enqueue(slot), self._stream)
        except UserError as error:
            self._capturable = False
            _log.warning("%s: not captured as a CUDA graph, enqueued pass by pass: %s", self._name, error.problem)
