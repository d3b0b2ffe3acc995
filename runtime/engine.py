"""The Python API: open a bundle, generate or stream answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_engine.runtime.backend import Backend
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation import Generation, GenerationStream
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.manifest import (
    GENERATION_NAME,
    TREE_NAME,
    Manifest,
    read_manifest,
    verify_files,
)
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend
from medusa_engine.runtime.policy import TYPICAL, AcceptancePolicy
from medusa_engine.runtime.rounds import Decoding, TreePlan
from medusa_engine.runtime.text import TOKENIZER_FILE, Tokenizer
from medusa_engine.runtime.tree import Tree, load_tree

DEFAULT_MAX_NEW_TOKENS = 256
MOST_THREADS = 1024

Message = Mapping[str, str]


class Engine:
    """An exported model, shared by any number of answers.

    Use `Engine.open`. Answers on several threads are independent: each has its own cache of
    `limits.cache_bytes` bytes.

    Attributes:
        manifest: what the bundle says of itself.
        tree: the tree of the bundle, the default of every answer.
        tokenizer: None if the bundle was exported without one.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int) -> None:
        self.manifest = manifest
        self.limits = manifest.limits
        self.tree = load_tree(folder / TREE_NAME)
        self.tokenizer: Tokenizer | None = None
        if TOKENIZER_FILE in manifest.files:
            self.tokenizer = Tokenizer.open(folder)
        self.stop_token_ids = frozenset(read_stop_token_ids(folder / GENERATION_NAME))
        self.backend: Backend = OnnxRuntimeBackend(folder, manifest, threads=threads)
        self._unreported_seconds = 0.0  # loading that no answer has been charged with

    @classmethod
    def open(cls, path: str | Path, *, threads: int = 0, verify: bool = True) -> Engine:
        """Open a bundle folder.

        Args:
            threads: of ONNX Runtime; 0 lets it take one per physical core.
            verify: read every file and compare its sha256 with the manifest; sizes are always compared.

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
        manifest = read_manifest(folder)
        verify_files(folder, manifest, hashes=verify)
        engine = cls(folder, manifest, threads=threads)
        engine._unreported_seconds = time.perf_counter() - started
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

    def stream(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        speculation: bool = True,
        tree: Tree | None = None,
        acceptance: AcceptancePolicy | None = None,
    ) -> GenerationStream:
        """Start an answer; iterate over the result for its pieces.

        Args:
            prompt: text, or a conversation as `{"role": ..., "content": ...}` messages.
            prompt_ids: token ids instead of `prompt`.
            max_new_tokens: at most this many tokens.
            ignore_eos: do not stop at stop tokens.
            speculation: False decodes plainly, one token per pass, without the heads.
            tree: another tree than the bundle's, for this answer.
            acceptance: another policy than greedy, one of those the bundle was exported with. `typical` does not
                preserve the model's distribution.

        Raises:
            UserError: the prompt is empty or too long, or the engine cannot run the tree or the policy.
        """
        if (prompt is None) == (prompt_ids is None):
            raise UserError("give one of prompt and prompt_ids", "pass the other one as None")
        policy = acceptance or AcceptancePolicy()
        self._check_policy(policy, speculation=speculation)
        self._load(speculation=speculation, policy=policy.graph)
        load_seconds, self._unreported_seconds = self._unreported_seconds, 0.0
        ids = list(prompt_ids) if prompt is None else self.encode(prompt)  # type: ignore[arg-type]
        state = self.backend.new_state()
        state.use(policy)
        decoding = Decoding(
            state,
            self.limits,
            ids,
            plan=TreePlan(tree or self.tree, self.limits) if speculation else None,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset() if ignore_eos else self.stop_token_ids,
        )
        decoder = self.tokenizer.stream_decoder(prompt_ids=ids) if self.tokenizer else None
        return GenerationStream(decoding, decoder, prompt_tokens=len(ids), load_seconds=load_seconds)

    def generate(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        ignore_eos: bool = False,
        speculation: bool = True,
        tree: Tree | None = None,
        acceptance: AcceptancePolicy | None = None,
    ) -> Generation:
        """Write a whole answer; arguments and errors as in `stream`."""
        return self.stream(
            prompt,
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            speculation=speculation,
            tree=tree,
            acceptance=acceptance,
        ).generation

    def _check_policy(self, policy: AcceptancePolicy, *, speculation: bool) -> None:
        if policy.name not in self.manifest.policies:
            raise UserError(
                f"{self.manifest.name}: the bundle was exported without --acceptance {policy.name}",
                f"choose of {', '.join(self.manifest.policies)}, or export the model with --acceptance {policy.name}",
            )
        if policy.name == TYPICAL and not speculation:
            raise UserError(
                "typical acceptance is chosen without speculation: it judges drafts, and there are none",
                "choose greedy or sample, or decode with speculation",
            )

    def _load(self, *, speculation: bool, policy: str) -> None:
        started = time.perf_counter()
        self.backend.load(speculation=speculation, policy=policy)
        self._unreported_seconds += time.perf_counter() - started
