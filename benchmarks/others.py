"""Other runtimes that decode the same checkpoint, for `--against`; each loads its library when it is made."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from medusa_engine.benchmarks.answers import Other
from medusa_engine.benchmarks.settings import LLAMA_CPP, TRANSFORMERS
from medusa_engine.exporter.checkpoint import Source, find_source
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Manifest, file_sha256


def open_other(name: str, model: str, manifest: Manifest, *, threads: int) -> Other:
    """Load a checkpoint into one of `settings.OTHERS`.

    Args:
        model: the checkpoint that the bundle was exported from: folder, hub id or .gguf file.
        threads: at least 1.

    Raises:
        UserError: the library is not installed, or the checkpoint is another one or cannot be loaded.
    """
    source = find_source(model)
    hashes = {file_sha256(file) for file in source.weight_files()}
    known = manifest.model.get("weights_sha256")
    if isinstance(known, dict) and hashes != set(known.values()):
        raise UserError(
            f"{model}: these are not the weights that {manifest.name} was exported from",
            "give that checkpoint with --model: beside other weights, times say nothing",
        )
    if name == TRANSFORMERS:
        return Transformers(source, threads=threads)
    return LlamaCpp(source, context=manifest.limits.max_length, threads=threads)


class Transformers:
    """`transformers.generate`, greedy, fp32, with its own attention."""

    name = TRANSFORMERS

    def __init__(self, source: Source, *, threads: int) -> None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when the library of progress bars is imported
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            from medusa_engine.exporter.adapter import merge_adapter
        except ModuleNotFoundError as error:
            raise UserError(
                f"--against {TRANSFORMERS}: the package {error.name} is not installed",
                "install it: pip install '.[export]' in a clone of medusa-engine",
            ) from error
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(**source.load_options(), dtype=torch.float32)
        except Exception as error:  # whatever the file made the library trip over
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{source.path}: transformers does not load it: {line}", "check the checkpoint") from error
        self._model = (merge_adapter(model, source.adapter) if source.adapter else model).eval()
        self._model.generation_config.eos_token_id = None
        self.version = version("transformers")

    def answer(self, prompt_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        import torch

        prompt = torch.tensor([prompt_ids])  # [1, P]
        clock = _Clock()
        with torch.inference_mode():
            out = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                streamer=clock,
            )
        times = clock.times[1:]  # the first call brings the prompt
        return out[0, len(prompt_ids) :].tolist(), [after - before for before, after in pairwise(times)]


class _Clock:
    """A streamer, as transformers calls it, that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class LlamaCpp:
    """llama.cpp through llama-cpp-python, greedy, on the .gguf file as it is quantized."""

    name = LLAMA_CPP

    def __init__(self, source: Source, *, context: int, threads: int) -> None:
        if source.gguf is None:
            raise UserError(
                f"--against {LLAMA_CPP}: {source.path} is not a .gguf file, which llama.cpp reads",
                "export from a .gguf file and give that one with --model",
            )
        try:
            from llama_cpp import Llama
        except ModuleNotFoundError as error:
            raise UserError(
                f"--against {LLAMA_CPP}: the package llama-cpp-python is not installed",
                "install it: pip install llama-cpp-python (it is compiled then: a C++ compiler and cmake are needed)",
            ) from error
        try:
            self._model = Llama(
                model_path=str(source.path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"{source.path}: llama.cpp does not load it: {error}", "check the file") from error
        self.version = version("llama-cpp-python")

    def answer(self, prompt_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        self._model.reset()
        found, times = [], []
        for token in self._model.generate(prompt_ids, temp=0.0, repeat_penalty=1.0, reset=True):
            found.append(int(token))
            times.append(time.perf_counter())
            if len(found) == tokens:
                break
        return found, [after - before for before, after in pairwise(times)]
