"""Other runtimes decode the demo model greedily, token by token."""

from __future__ import annotations

import importlib.util

import demo_model
import pytest

from medusa_engine.benchmarks.others import open_other
from medusa_engine.benchmarks.settings import LLAMA_CPP, TRANSFORMERS
from medusa_engine.runtime.engine import Engine

TOKENS = 8


@pytest.mark.demo
@pytest.mark.parametrize(
    "name",
    [
        TRANSFORMERS,
        pytest.param(
            LLAMA_CPP,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python (pip install it)"
            ),
        ),
    ],
)
def test_answers_are_greedy_and_every_token_but_the_first_is_timed(name: str, demo_engine: Engine) -> None:
    other = open_other(name, str(demo_model.GGUF), demo_engine.manifest, threads=2)
    prompt = demo_engine.encode([{"role": "user", "content": "What is the capital of France?"}])
    first, seconds = other.answer(prompt, TOKENS)
    again, _ = other.answer(prompt, TOKENS)
    assert (other.name, bool(other.version)) == (name, True)
    assert first == again and len(first) == TOKENS
    assert len(seconds) == TOKENS - 1 and min(seconds) > 0
    plain = demo_engine.generate(prompt_ids=prompt, max_new_tokens=TOKENS, speculation=False, ignore_eos=True).token_ids
    if name == TRANSFORMERS:
        assert first == plain
    else:  # llama.cpp computes with the quantized weights themselves, and with quantized activations
        assert demo_engine.tokenizer is not None
        assert "Paris" in demo_engine.tokenizer.decode(first)
