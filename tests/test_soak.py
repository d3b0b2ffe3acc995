"""`make soak`: long answers on the demo model with a random tree in every round, several at a time.

Every token is compared with plain greedy decoding, caches with fresh prefills. Where an answer leaves plain decoding's
the reason has to be a near-tie of transformers' own logits, which is counted and reported; it is compared from there on
with plain decoding behind the token that it took.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from demo_model import ROOT
from greedy_check import NEAR_TIE
from soak_rounds import Tally, plain, write_answers

from medusa_engine.runtime.engine import Engine

BATCH = 4  # answers side by side

pytestmark = [pytest.mark.demo, pytest.mark.soak]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        count = metafunc.config.getoption("--soak-prompts")
        metafunc.parametrize("first", range(0, count, BATCH), ids=lambda first: f"from {first}")


@pytest.fixture(scope="module")
def prompts(request: pytest.FixtureRequest, demo_engine: Engine) -> list[list[int]]:
    """Token ids of prompts of many kinds, every other one through the chat template."""
    count = request.config.getoption("--soak-prompts")
    program = ROOT / "benchmarks" / "prompts" / "make_training.py"
    made = subprocess.run([sys.executable, program, str(count)], capture_output=True, text=True, check=True)
    texts = made.stdout.splitlines()[:count]
    assert len(texts) == count
    return [
        demo_engine.encode([{"role": "user", "content": text}] if index % 2 else text)
        for index, text in enumerate(texts)
    ]


def test_every_token_is_that_of_plain_decoding(
    first: int,
    prompts: list[list[int]],
    demo_engine: Engine,
    soak_tally: Tally,
    request: pytest.FixtureRequest,
) -> None:
    batch = prompts[first : first + BATCH]
    for prompt, answer, expected in write_answers(demo_engine, batch, first, soak_tally):
        begin = 0
        while answer[begin:] != expected:
            assert len(answer) == begin + len(expected)
            at = next(i for i, token in enumerate(expected) if answer[begin + i] != token)
            model = request.getfixturevalue("demo_transformers")
            before = [*prompt, *answer[: begin + at]]
            margin = top_two_margin(model, before, answer[begin + at], expected[at])
            where = f"prompt {prompts.index(prompt)}, token {begin + at}: {answer[begin + at]} or {expected[at]}"
            assert margin < NEAR_TIE, f"{where}: the logits are {margin:.2e} apart"
            soak_tally.near_ties.append(f"{where}, the logits are {margin:.2e} apart")
            begin += at + 1
            expected = plain(demo_engine, [*prompt, *answer[:begin]], len(answer) - begin)


def top_two_margin(model: Any, tokens: list[int], one: int, other: int) -> float:
    """How far transformers' largest logit is above that of the lesser of two tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    return float(logits.max() - torch.minimum(logits[one], logits[other]))
