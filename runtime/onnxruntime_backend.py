"""The embedded default: a bundle's graphs on ONNX Runtime."""

from __future__ import annotations

import threading
from pathlib import Path

import onnxruntime as ort

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Manifest, graph_name
from medusa_engine.runtime.onnxruntime_errors import refusal
from medusa_engine.runtime.onnxruntime_state import OnnxRuntimeState
from medusa_engine.runtime.open_bundle import OpenBundle
from medusa_engine.runtime.policy import GREEDY
from medusa_engine.runtime.providers import CPU, PROVIDERS

_LOG_FATAL = 4  # ONNX Runtime's severity; errors are raised


class OnnxRuntimeBackend:
    """`Backend` over ONNX Runtime's CPU or CUDA provider.

    A graph is loaded when it is first needed: plain decoding never loads the round; rounds, which take prompt
    chunks too, never load the step. With CUDA the cache lies on the GPU and is bound there; the small inputs and
    outputs are copied. Its CUDA graphs want shapes that stay the same, but attention here reads the live rows alone.

    Args:
        folder: a verified bundle.
        manifest: its manifest.
        threads: intra-op threads; 0 leaves the choice to ONNX Runtime.
        provider: one of PROVIDERS.
        verify: compare the sha256 of what is loaded later, too; its size otherwise.

    Raises:
        UserError: ONNX Runtime here has no such provider.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, *, threads: int = 0, provider: str = CPU, verify: bool = True
    ) -> None:
        if provider not in PROVIDERS:
            raise UserError(f"provider is {provider!r}", f"give one of {', '.join(PROVIDERS)}")
        if PROVIDERS[provider] not in ort.get_available_providers():
            raise UserError(
                f"onnxruntime {ort.__version__} here has no {PROVIDERS[provider]}",
                "install onnxruntime-gpu in place of onnxruntime, which fills the same folder, or use the CPU",
            )
        self.provider = provider
        self.folder = folder
        self.limits = manifest.limits
        self.cache_bytes = manifest.cache_bytes
        self.files = OpenBundle(folder, manifest, hashes=verify)
        self._options = ort.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.log_severity_level = _LOG_FATAL
        # Threads of one graph that wait, spinning, would take the cores from the graph that runs next: half its speed.
        self._options.add_session_config_entry("session.force_spinning_stop", "1")
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._lock = threading.Lock()

    def load(self, *, speculation: bool, policy: str = GREEDY) -> None:
        """Load the round or the step graph of an acceptance policy, one of the manifest's.

        Raises:
            UserError: ONNX Runtime refuses the file.
        """
        self.session(graph_name("round" if speculation else "step", policy))

    def new_state(self) -> OnnxRuntimeState:
        """An empty cache of `manifest.cache_bytes` bytes; the system gives memory as rows are written.

        Raises:
            UserError: the system does not give that much.
        """
        try:
            return OnnxRuntimeState(self)
        except (MemoryError, RuntimeError) as error:  # of numpy, or of ONNX Runtime
            raise UserError(
                f"{self.folder}: not enough memory for a cache of {self.cache_bytes} bytes",
                "free memory, or export the model again with a smaller --max-length",
            ) from error

    def session(self, graph: str) -> ort.InferenceSession:
        """The session of a graph, loaded once.

        Raises:
            UserError: the file, or that of the weights, changed since the bundle was opened; ONNX Runtime refuses it.
        """
        with self._lock:
            if graph not in self._sessions:
                path = self.files.graph(graph)
                try:
                    self._sessions[graph] = ort.InferenceSession(
                        str(path), self._options, providers=list({PROVIDERS[self.provider]: {}, PROVIDERS[CPU]: {}})
                    )
                except Exception as error:
                    raise refusal(path, f"ONNX Runtime {ort.__version__} does not load it", error) from error
            return self._sessions[graph]
