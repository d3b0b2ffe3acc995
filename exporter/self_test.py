"""Run a new plan beside its graph on ONNX Runtime, before the plan is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from medusa_engine.exporter.plan_io import FREE
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.plan import Plan, Tensor
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import plan_inputs
from medusa_engine.runtime.tree import Tree
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan

PROMPTS = 8
ROUNDS = 3  # behind each prompt
# fp16 sums in another order: now and then two tokens are so near that the other one comes first. What is wrong in a
# plan shows in nearly every prompt.
LEAST_EQUAL = 6
_PROMPT_TOKENS = 24
_NO_BUDGET = 1 << 62

Tokens = list[int]
Int64Array = npt.NDArray[np.int64]


class Rounds(Protocol):
    """What is compared: a state that runs a prompt, then rounds of one tree."""

    def answer(self, prompt: Int64Array) -> list[Tokens]:
        """Tokens that each of ROUNDS rounds behind a prompt publishes."""


@dataclass(frozen=True)
class PlanRounds:
    """The plan itself, through the runtime.

    Attributes:
        new_state: of the runtime's backend.
        tree: of every round.
    """

    new_state: Callable[[], Any]
    tree: TreeBuffers

    def answer(self, prompt: Int64Array) -> list[Tokens]:
        state = self.new_state()
        state.prefill(prompt, 0, self.tree)
        state.read()
        published = []
        for _ in range(ROUNDS):
            state.round(self.tree, self.tree)
            published.append(state.read().tokens.tolist())
        return published


class GraphRounds:
    """The plan's graph on ONNX Runtime's CPU, with the same fixed shapes.

    Args:
        graph: file of the bundle.
        io: the plan's tensors.
        limits: of the bundle.
        tree: of every round.
        constants: inputs that stay the same, as `policy_inputs.plan_inputs` gives them.

    Raises:
        NotImplementedError: ONNX Runtime has no kernel for an operator in the graph's dtype.
    """

    def __init__(
        self,
        graph: Path,
        io: Sequence[Tensor],
        limits: Limits,
        tree: TreeBuffers,
        constants: dict[str, npt.NDArray[Any]],
    ) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors only: it would warn that these runs copy the cache
        try:
            self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            if "NOT_IMPLEMENTED" in str(error):
                raise NotImplementedError(str(error).splitlines()[0]) from error
            raise
        self._names = [value.name for value in self._session.get_outputs()]
        self._limits = limits
        self._tree = tree
        self._inputs = [tensor for tensor in io if tensor.mode == "input"]
        indices = np.zeros(limits.max_tree_nodes, dtype=np.int64)  # padded with roots
        indices[: len(tree.tree_indices)] = tree.tree_indices
        self._constants = constants | {"tree_indices": indices, "token_budget": np.array([_NO_BUDGET])}
        self._constants["stop_ids"] = np.full(self._shape("stop_ids"), -1)

    def answer(self, prompt: Int64Array) -> list[Tokens]:
        nodes, rows = self._limits.max_tree_nodes, len(prompt)
        zeros = {
            tensor.name: np.zeros(tensor.shape, dtype=tensor.dtype)
            for tensor in self._inputs
            if FREE not in tensor.shape
        }
        paths = np.full(self._shape("retrieve_indices"), -1)
        paths[0, 0] = rows - 1  # a tree of one node: the last row is the root, the rows before it are committed
        chunk = {
            "input_ids": prompt[None],
            "position_ids": np.arange(rows)[None],
            "tree_mask": np.tri(rows, dtype=np.bool_),
            "logit_rows": np.array([rows - 1]),
            "retrieve_indices": paths,
        }
        after = self._run(zeros | self._constants | chunk)

        mask = np.eye(nodes, dtype=np.bool_)  # rows of padding see themselves alone
        mask[: len(self._tree.tree_mask), : len(self._tree.tree_mask)] = self._tree.tree_mask
        paths = np.full(self._shape("retrieve_indices"), -1)
        paths[: len(self._tree.retrieve_indices)] = self._tree.retrieve_indices
        tree = {"tree_mask": mask, "logit_rows": np.arange(nodes), "retrieve_indices": paths}
        published = []
        for _ in range(ROUNDS):
            state = {name.removeprefix("next_"): value for name, value in after.items() if name.startswith("next_")}
            state |= {name.replace("present_", "past_"): after[name] for name in after if name.startswith("present_")}
            after = self._run(zeros | state | self._constants | tree)
            published.append(after["accepted_tokens"][: after["accepted_count"][0]].tolist())
        return published

    def _run(self, feed: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        named = {tensor.name: feed[tensor.name] for tensor in self._inputs}
        return dict(zip(self._names, self._session.run(None, named), strict=True))

    def _shape(self, name: str) -> tuple[int, ...]:
        return next(tensor.shape for tensor in self._inputs if tensor.name == name)


def self_test(path: Path, plan: Plan, graph: Path, tree: Tree) -> str:
    """Compare a plan that the GPU here can run with its graph; returns the result in a few words.

    Args:
        path: of the plan, its sidecar and its files.
        graph: the file that it was built from.
        tree: one of the bundle's.

    Raises:
        UserError: the plan does not run, or publishes other tokens.
    """
    from medusa_engine.runtime.tensorrt_backend import TensorRtBackend

    limits = plan.bundle.limits
    backend = TensorRtBackend(path, plan)
    buffers = TreePlan(tree, limits).full
    shapes = {tensor.name: tensor.shape for tensor in plan.io}
    positions = shapes["uniforms"][0] if "uniforms" in shapes else 0
    constants = plan_inputs(AcceptancePolicy(), plan.acceptance, limits.vocab_size, positions)
    constants = {name: value for name, value in constants.items() if name in shapes}
    try:
        reference = GraphRounds(graph, plan.io, limits, buffers, constants)
    except NotImplementedError as error:
        return f"not run: {error}"
    return compare(PlanRounds(backend.new_state, buffers), reference, limits, path)


def compare(plan: Rounds, reference: Rounds, limits: Limits, path: Path) -> str:
    """Compare the rounds behind PROMPTS random prompts.

    Raises:
        UserError: fewer than LEAST_EQUAL of them agree in every token.
    """
    generator = np.random.default_rng(0)
    room = limits.max_length - ROUNDS * (limits.depth + 1)
    equal = 0
    first = ""
    for _ in range(PROMPTS):
        length = int(generator.integers(1, max(2, min(_PROMPT_TOKENS, room) + 1)))
        prompt = generator.integers(0, limits.vocab_size, length)
        got, expected = plan.answer(prompt), reference.answer(prompt)
        equal += got == expected
        if got != expected:
            first = first or f"{got} instead of {expected} behind {prompt.tolist()[-4:]}"
    result = f"{equal} of {PROMPTS} prompts, {ROUNDS} rounds each, as on ONNX Runtime"
    if equal < LEAST_EQUAL:
        raise UserError(
            f"{path.name}: the plan does not compute what its graph does: {result}; {first}",
            "it is not kept; build with --no-plugin or another version of the library, and report it with this line",
        )
    return result
