"""The Python API: open a bundle, generate or stream answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from medusa_engine.runtime.adaptive_plans import AdaptivePlans
from medusa_engine.runtime.answer_options import AnswerOptions, Message
from medusa_engine.runtime.async_stream import AsyncGenerationStream
from medusa_engine.runtime.backend import Backend
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import Generation, GenerationStream
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.manifest import (
    GENERATION_NAME,
    Manifest,
    read_manifest,
    verify_files,
)
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.policy import GREEDY, REJECTION, SAMPLE, TYPICAL, AcceptancePolicy
from medusa_engine.runtime.rounds import Plans, TreePlan
from medusa_engine.runtime.session import Session
from medusa_engine.runtime.text import TOKENIZER_FILE, Tokenizer
from medusa_engine.runtime.tree import Tree, chain, load_tree

MOST_THREADS = 1024

_log = logging.getLogger(__name__)


class Engine:
    """An exported model, shared by any number of sessions.

    Use `Engine.open`. Answers on several threads are independent: each has its own cache of
    `limits.cache_bytes` bytes, or that of its `session`. Loggers below `medusa_engine` tell what is done; they are
    silent unless the program sets their level.

    Attributes:
        manifest: what the bundle says of itself.
        trees: those of the bundle, which answers change between.
        tree: the first of them.
        tokenizer: None if the bundle was exported without one.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int, verify: bool = True) -> None:
        self.manifest = manifest
        self.limits = manifest.limits
        self.trees = tuple(load_tree(folder / name) for name in manifest.trees)
        self.tree = self.trees[0]
        self.tokenizer: Tokenizer | None = None
        if TOKENIZER_FILE in manifest.files:
            self.tokenizer = Tokenizer.open(folder)
        self.stop_token_ids = frozenset(read_stop_token_ids(folder / GENERATION_NAME))
        self.backend: Backend = OnnxRuntimeBackend(folder, manifest, threads=threads, verify=verify)
        self._adaptive: dict[str, AdaptivePlans] = {}  # by the policy's graph: what it publishes differs
        self._lock = threading.Lock()
        self._unreported_seconds = 0.0  # loading that no answer has been charged with

    @classmethod
    def open(cls, path: str | Path, *, threads: int = 0, verify: bool = True) -> Engine:
        """Open a bundle folder.

        Args:
            threads: of ONNX Runtime; 0 lets it take one per physical core.
            verify: read every file and compare its sha256 with the manifest, a graph's again when it is loaded; sizes
                are always compared.

        Raises:
            UserError: not a bundle, a newer format, or a file that is missing, cut short or changed.
        """
        started = time.perf_counter()
        folder = Path(path)
        if folder.suffix == ".plan":
            raise UserError(
                f"{folder}: this version does not run TensorRT plans",
                "give the bundle folder that medusa-export wrote, engines/NAME",
            )
        if not 0 <= threads <= MOST_THREADS:
            raise UserError(f"threads is {threads}", f"give 0 (one per physical core) to {MOST_THREADS}")
        try:
            manifest = read_manifest(folder)
            verify_files(folder, manifest, hashes=verify)
            engine = cls(folder, manifest, threads=threads, verify=verify)
        except MemoryError as error:
            raise UserError(f"{folder}: not enough memory to open the bundle", "free memory") from error
        engine._unreported_seconds = time.perf_counter() - started
        _log.info("%s: opened in %.2f s", folder, engine._unreported_seconds)
        return engine

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a prompt text, or of a conversation through the model's chat template.

        Raises:
            UserError: the bundle has no tokenizer, or the tokenizer or template refuses the input.
        """
        if self.tokenizer is None:
            raise UserError(
                f"{self.manifest.name}: this bundle has no tokenizer",
                "give the prompt as token ids (--prompt-ids, prompt_ids=...)",
            )
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.encode_chat(prompt)

    def session(self) -> Session:
        """A conversation with a cache of its own, which later turns reuse; close it, or use `with`."""
        return Session(self)

    def stream(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[AnswerOptions]
    ) -> GenerationStream:
        """Start an answer in a session of its own; arguments and errors as in `Session.stream`."""
        return self.session().stream(prompt, **options)

    def generate(self, prompt: str | Sequence[Message] | None = None, **options: Unpack[AnswerOptions]) -> Generation:
        """Write a whole answer in a session of its own; arguments and errors as in `Session.stream`."""
        return self.stream(prompt, **options).generation

    def astream(
        self, prompt: str | Sequence[Message] | None = None, **options: Unpack[AnswerOptions]
    ) -> AsyncGenerationStream:
        """Start an answer in a session of its own for `async for`; arguments and errors as in `Session.stream`."""
        return self.session().astream(prompt, **options)

    def load(self, *, speculation: bool, policy: str = GREEDY) -> float:
        """Load what rounds (or plain steps) of a policy need, if it is not loaded yet: an answer does so by itself.

        Returns:
            Seconds of loading, of the bundle too, that no call has returned before.
        """
        with self._lock:
            started = time.perf_counter()
            self.backend.load(speculation=speculation, policy=policy)
            seconds = self._unreported_seconds + time.perf_counter() - started
            self._unreported_seconds = 0.0
        _log.debug("%s: loaded, speculation %s", self.manifest.name, speculation)
        return seconds

    def plans(self, policy: AcceptancePolicy, *, tree: Tree | None = None, adaptive: bool = True) -> Plans:
        """What says which tree each round of an answer verifies; arguments as in `Session.stream`.

        Raises:
            UserError: the engine or the policy cannot run the tree.
        """
        if tree is not None or not adaptive or not policy.reproduces_plain:
            return TreePlan(self._tree_for(policy, tree), self.limits)
        with self._lock:
            if policy.graph not in self._adaptive:
                self._adaptive[policy.graph] = AdaptivePlans(self.trees, self.limits)
            return self._adaptive[policy.graph]

    def check_policy(self, policy: AcceptancePolicy, *, speculation: bool) -> None:
        """Refuse what this bundle cannot do.

        Raises:
            UserError: the policy was not exported, or does not go with plain decoding.
        """
        if policy.name not in self.manifest.policies:
            raise UserError(
                f"{self.manifest.name}: the bundle was exported without --acceptance {policy.name}",
                f"choose of {', '.join(self.manifest.policies)}, or export the model with --acceptance {policy.name}",
            )
        if policy.penalises and not self.manifest.repetition_penalty:
            raise UserError(
                f"{self.manifest.name}: the bundle was exported without --repetition-penalty",
                "leave repetition_penalty at 1, or export the model again with medusa-export --repetition-penalty",
            )
        if policy.name == TYPICAL and not speculation:
            raise UserError(
                "typical acceptance is chosen without speculation: it judges drafts, and there are none",
                "choose greedy or sample, or decode with speculation",
            )

    def _tree_for(self, policy: AcceptancePolicy, tree: Tree | None) -> Tree:
        """The tree of an answer: the user's or the bundle's; under `rejection` the user's chain or the longest one.

        Raises:
            UserError: the policy takes a chain, and the user's tree branches.
        """
        if policy.effective != REJECTION:
            return tree or self.tree
        if tree is None:
            return chain(min(self.limits.heads, self.limits.max_tree_nodes - 1))
        if tree.widest_rank > 0:
            raise UserError(
                f"tree {tree.name} has rank {tree.widest_rank}, but rejection accepts a chain: rank 0 alone",
                f"leave out the tree, give a chain as [[0], [0, 0]], or choose --acceptance {SAMPLE}",
            )
        return tree
