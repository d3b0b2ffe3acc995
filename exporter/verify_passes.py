"""The passes of an engine's own round loop: what each verified, chose, proposed, and left in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from medusa_engine.exporter.graphs import LOGITS_OUTPUT
from medusa_engine.runtime.backend import Published
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Limits, Manifest
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree import LOOKUP_TEXT
from medusa_engine.runtime.tree_buffers import TreeBuffers, compile_tree
from medusa_engine.runtime.tree_plan import PLAIN, Plans

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass: the prompt's last chunk, or a round.

    Attributes:
        number: 0 for the prompt, then 1, 2, ...
        tree: what was verified; of the prompt, its last token alone.
        tokens: [N] packed tokens.
        next_tree: what was proposed; None for the root alone without heads.
        proposed: [N'] tokens of the next tree, root first.
        published: tokens [G], and the rows committed before them; of the prompt, its last token.
        pending_rows: [G] packed rows of the published tokens.
        logits: [N, V], where the graph gives them.
        cache: `key.L` and `value.L` -> [1, H_kv, S_max, head_dim]; views of the live cache, read at once.
    """

    number: int
    tree: TreeBuffers
    tokens: Ints
    next_tree: TreeBuffers | None
    proposed: Ints
    published: Published
    pending_rows: Ints
    logits: Floats | None
    cache: Mapping[str, npt.NDArray[Any]]


def path_of(tree: TreeBuffers, row: int, *, topk: int, heads: int) -> tuple[int | str, ...]:
    """Ranks from the root to a packed row, "L" where it was looked up."""
    above = np.flatnonzero(tree.tree_mask[row])  # ancestors and the row itself: packed order sorts by depth
    slots = [int(slot) for slot in tree.tree_indices[above] if slot > 0]
    return tuple((slot - 1) % topk if slot <= heads * topk else LOOKUP_TEXT for slot in slots)


def run_passes(
    backend: Any,
    limits: Limits,
    prompt_ids: Sequence[int],
    *,
    plan: Plans | None,
    rounds: int,
    observe: Callable[[Pass], bool],
) -> None:
    """Decode greedily with the runtime's own loop; stop tokens end nothing.

    Args:
        plan: the trees; None for plain steps.
        rounds: at most; the end of the cache comes before.
        observe: called behind the prompt and behind each round; says whether to go on.

    Raises:
        UserError: as the round loop does.
    """
    state = _ObservedState(backend, limits, observe)
    decoding = Decoding(
        state,
        limits,
        prompt_ids,
        plan=plan,
        max_new_tokens=limits.max_length,
        stop_ids=frozenset(),
    )
    try:
        for count, _ in enumerate(decoding, 1):
            if count >= rounds or state.ended:
                return
    except UserError:
        if not state.ended:  # what the observer saw in the pass before is the reason
            raise


class _ObservedState:
    """A `DecodeState` that hands each pass to an observer when its result is read, before the next one is launched."""

    ahead = 0

    def __init__(self, backend: Any, limits: Limits, observe: Callable[[Pass], bool]) -> None:
        self._backend = backend
        self._state: Any = backend.new_state()
        self._observe = observe
        self._root = compile_tree(PLAIN, topk=1, depth=limits.depth)
        self._number = 0
        self._last: tuple[TreeBuffers, Ints, TreeBuffers | None] = (self._root, np.zeros(0, np.int64), None)
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def prefill(self, token_ids: Ints, start: int, next_tree: TreeBuffers | None) -> None:
        self._last = (self._root, token_ids[-1:], next_tree)
        self._state.prefill(token_ids, start, next_tree)

    def round(self, tree: TreeBuffers, next_tree: TreeBuffers) -> None:
        self._last = (tree, self._state.proposed()[: len(tree.tree_indices)], next_tree)
        self._state.round(tree, next_tree)

    def step(self) -> None:
        self._last = (self._root, self._state.proposed()[:1], None)
        self._state.step()

    def read(self) -> Published:
        published = self._state.read()
        if not self.ended:
            tree, tokens, next_tree = self._last
            seen = Pass(
                number=self._number,
                tree=tree,
                tokens=tokens,
                next_tree=next_tree,
                proposed=self._state.proposed(),
                published=published,
                pending_rows=self._state.pending_rows[: len(published.tokens)].copy(),
                logits=getattr(self._backend, "logits", None),
                cache=self._state.cache_arrays(),
            )
            self._number += 1
            self.ended = not self._observe(seen)
        return published


class LogitsBackend(OnnxRuntimeBackend):
    """A bundle on ONNX Runtime, as the runtime runs it, whose graphs also give the target logits.

    The files stay as they are: the output is added to the graph in memory.

    Attributes:
        logits: [R, V] of the last pass.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int = 0) -> None:
        super().__init__(folder, manifest, threads=threads)
        self.logits: Floats | None = None
        self._with_logits: dict[str, _LogitsSession] = {}

    def session(self, graph: str) -> Any:
        """The session of a graph, loaded once.

        Raises:
            UserError: the graph has no value called `logits`, or ONNX Runtime refuses it.
        """
        if graph not in self._with_logits:
            self._with_logits[graph] = _LogitsSession(self, self.files.graph(graph), self._options)
        return self._with_logits[graph]


class _LogitsSession:
    """What the runtime's state asks of a session, with one more output."""

    def __init__(self, backend: LogitsBackend, path: Path, options: ort.SessionOptions) -> None:
        self._backend = backend
        model = onnx.load(path, load_external_data=False)
        if not any(LOGITS_OUTPUT in node.output for node in model.graph.node):
            raise UserError(
                f"{path}: the graph has no value called {LOGITS_OUTPUT}", "export the model again with medusa-export"
            )
        logits = helper.make_tensor_value_info(LOGITS_OUTPUT, onnx.TensorProto.FLOAT, ["R", backend.limits.vocab_size])
        model.graph.output.append(logits)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"{path}: ONNX Runtime {ort.__version__} does not load it: {reason}",
                "export the model again with medusa-export --force",
            ) from error

    def io_binding(self) -> ort.IOBinding:
        binding = self._session.io_binding()
        binding.bind_output(LOGITS_OUTPUT, "cpu")  # the first that is bound is the first of `get_outputs`
        return binding

    def run_with_iobinding(self, binding: ort.IOBinding) -> None:
        binding.bind_output(LOGITS_OUTPUT, "cpu")  # anew: the buffer of the last pass has another size
        self._session.run_with_iobinding(binding)
        self._backend.logits = binding.get_outputs()[0].numpy().copy()
