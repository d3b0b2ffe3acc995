"""The Python API: open a bundle or a plan, generate or stream answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from medusa_engine.runtime.adaptive_plans import AdaptivePlans, AdaptiveTrees
from medusa_engine.runtime.answer_options import AnswerOptions, Message
from medusa_engine.runtime.async_stream import AsyncGenerationStream
from medusa_engine.runtime.backend import Backend
from medusa_engine.runtime.bundle_files import verify_files
from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.generation import Generation, GenerationStream
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.manifest import GENERATION_NAME, ONNXRUNTIME, Manifest, read_manifest
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.policy import GREEDY, REJECTION, SAMPLE, TYPICAL, AcceptancePolicy
from medusa_engine.runtime.providers import CPU
from medusa_engine.runtime.session import Session
from medusa_engine.runtime.strict_json import shown
from medusa_engine.runtime.text import TOKENIZER_FILE, Tokenizer
from medusa_engine.runtime.tree import Tree, chain, load_tree
from medusa_engine.runtime.tree_plan import Plans, TreePlan

MOST_THREADS = 1024
PLAN_SUFFIX = ".plan"

_log = logging.getLogger(__name__)


class Engine:
    """An exported model, shared by any number of sessions.

    Use `Engine.open`. Answers on several threads are independent: each has its own cache of
    `manifest.cache_bytes` bytes, or that of its `session`. Loggers below `medusa_engine` tell what is done; they are
    silent unless the program sets their level.

    Attributes:
        manifest: what the bundle says of itself; of a plan, its bundle's, with what the plan runs.
        trees: those of the bundle or plan, which answers change between.
        tree: the first of them.
        tokenizer: None if the bundle was exported without one.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, folder: Path, manifest: Manifest, backend: Backend, *, plan: Path | None = None) -> None:
        self.manifest = manifest
        self.backend = backend
        self.limits = manifest.limits
        self.trees = tuple(load_tree(folder / name) for name in manifest.trees)
        self.tree = self.trees[0]
        self.tokenizer: Tokenizer | None = None
        if TOKENIZER_FILE in manifest.files:
            self.tokenizer = Tokenizer.open(folder)
        self.stop_token_ids = frozenset(read_stop_token_ids(folder / GENERATION_NAME))
        self._plan = plan  # where it was opened from one
        self._adaptive: dict[str, AdaptiveTrees] = {}  # by the policy's graph: what it publishes differs
        self._lock = threading.Lock()
        self._unreported_seconds = 0.0  # loading that no answer has been charged with

    @classmethod
    def open(cls, path: str | Path, *, threads: int = 0, verify: bool = True, provider: str | None = None) -> Engine:
        """Open a bundle folder, or a plan: NAME.plan, with NAME.plan.json and NAME.plan.files beside it.

        Args:
            threads: of ONNX Runtime, which runs bundles; 0 lets it take one per physical core.
            verify: read every file and compare its sha256 with the manifest, a graph's again when it is loaded; sizes
                are always compared.
            provider: what runs a bundle, one of PROVIDERS; default: cpu. A plan runs on the GPU.

        Raises:
            UserError: not a bundle or plan, a newer format, a file that is missing, cut short or changed, or a
                library or GPU that is missing or is not that of the plan.
        """
        started = time.perf_counter()
        source = Path(path)
        if not 0 <= threads <= MOST_THREADS:
            raise WrongValueError("threads", shown(threads), f"give 0 (one per physical core) to {MOST_THREADS}")
        try:
            if source.suffix == PLAN_SUFFIX and not source.is_dir():
                if provider is not None:
                    raise UserError(
                        f"{source}: provider {provider} is given with a plan", "leave it out: TensorRT runs it"
                    )
                engine = cls._of_plan(source, verify=verify)
            else:
                manifest = read_manifest(source)
                if manifest.target != ONNXRUNTIME:
                    raise UserError(
                        f"{source}: a bundle for {manifest.target}, which ONNX Runtime does not run",
                        f"for a GPU build a plan: medusa-build {source} -o {source}.plan;"
                        " for the CPU export without --target",
                    )
                verify_files(source, manifest, hashes=verify)
                backend = OnnxRuntimeBackend(source, manifest, threads=threads, provider=provider or CPU, verify=verify)
                engine = cls(source, manifest, backend)
        except MemoryError as error:
            raise UserError(f"{source}: not enough memory to open the engine", "free memory") from error
        engine._unreported_seconds = time.perf_counter() - started
        _log.info("%s: opened in %.2f s", source, engine._unreported_seconds)
        return engine

    @classmethod
    def _of_plan(cls, path: Path, *, verify: bool) -> Engine:
        # Bundles run where no TensorRT is: it is imported for a plan alone.
        from medusa_engine.runtime.plan import check_plan_files, files_folder, read_plan
        from medusa_engine.runtime.tensorrt_backend import TensorRtBackend

        plan = read_plan(path)
        check_plan_files(path, plan, hashes=verify)
        manifest = replace(plan.bundle, policies=plan.policies, repetition_penalty=False, files=plan.files)
        return cls(files_folder(path), manifest, TensorRtBackend(path, plan), plan=path)

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

    def plans(
        self,
        policy: AcceptancePolicy,
        *,
        tree: Tree | None = None,
        adaptive: bool = True,
        known: dict[str, AdaptivePlans] | None = None,
    ) -> Plans:
        """What says which tree each round of an answer verifies; arguments as in `Session.stream`.

        Args:
            known: plans that change, of a session, by the policy's graph: taken from there, or added.

        Raises:
            UserError: the engine or the policy cannot run the tree.
        """
        if tree is not None or not adaptive or not policy.reproduces_plain:
            return TreePlan(self._tree_for(policy, tree), self.limits)
        known = {} if known is None else known
        if policy.graph not in known:
            with self._lock:
                if policy.graph not in self._adaptive:
                    self._adaptive[policy.graph] = AdaptiveTrees(self.trees, self.limits, late=self._plan is None)
                known[policy.graph] = self._adaptive[policy.graph].session()
        return known[policy.graph]

    def check_policy(self, policy: AcceptancePolicy, *, speculation: bool) -> None:
        """Refuse what this bundle or plan cannot do.

        Raises:
            UserError: the policy was not exported, is not the plan's, or does not go with plain decoding.
        """
        if self._plan is not None and (policy.name not in self.manifest.policies or policy.penalises):
            asked = "a repetition penalty" if policy.penalises else f"--acceptance {policy.name}"
            raise UserError(
                f"{self._plan}: the plan runs {' and '.join(self.manifest.policies)}, not {asked}",
                "leave it out: no plan has it, but a bundle of medusa-export without --target may"
                if policy.penalises or policy.name == REJECTION
                else f"leave it out, or build another plan with medusa-build --acceptance {policy.name}",
            )
        if policy.name not in self.manifest.policies:
            raise UserError(
                f"{self.manifest.name}: the bundle was exported without --acceptance {policy.name}",
                f"choose {' or '.join(self.manifest.policies)}, or export the model with --acceptance {policy.name}",
            )
        if policy.penalises and not self.manifest.repetition_penalty:
            raise UserError(
                f"{self.manifest.name}: the bundle was exported without --repetition-penalty",
                "leave the penalty out, or export the model again with medusa-export --repetition-penalty",
            )
        if policy.name == TYPICAL and not speculation:
            others = " or ".join(name for name in self.manifest.policies if name != TYPICAL)
            raise UserError(
                "typical acceptance is chosen without speculation: it judges drafts, and there are none",
                f"choose {others}, or decode with speculation",
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
        sample = f", or choose --acceptance {SAMPLE}" if SAMPLE in self.manifest.policies else ""
        hint = f"leave out the tree, or give a chain as [[0], [0, 0]]{sample}"
        if tree.lookup:
            raise UserError(
                f"tree {tree.name} has lookup nodes, but rejection accepts a chain of drafts that the heads drew",
                hint,
            )
        if tree.widest_rank > 0:
            raise UserError(
                f"tree {tree.name} has rank {tree.widest_rank}, but rejection accepts a chain: rank 0 alone",
                hint,
            )
        return tree
