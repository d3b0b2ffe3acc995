"""Whatever a file or a request holds, its parser takes it or refuses it as a user's mistake."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsers import PARSERS, check, manifest_document, seeds

EXAMPLES = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1 << 31, 1 << 63, 10**400, 1e308, -0.0])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


@pytest.mark.parametrize("name", PARSERS)
def test_the_seeds(name: str) -> None:
    taken = [check(PARSERS[name], data) for data in seeds(name)]
    assert any(taken) or name == "graph"  # those of the graphs are the hostile ones


@pytest.mark.parametrize("name", PARSERS)
@EXAMPLES
@given(data=st.binary(max_size=200))
def test_any_bytes(name: str, data: bytes) -> None:
    check(PARSERS[name], data)


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_seeds(name: str) -> None:
    """Bits turned, pieces cut out, doubled and put elsewhere."""
    generator = random.Random(0)
    small = [data for data in seeds(name) if data and len(data) < 8000]
    for _ in range(400):
        data = bytearray(generator.choice(small))
        for _ in range(generator.randint(1, 4)):
            begin = generator.randrange(len(data) + 1)
            end = min(len(data), begin + generator.choice([1, 1, 4, 8, 30]))
            kind = generator.randrange(4)
            if kind == 0 and begin < len(data):
                data[begin] ^= 1 << generator.randrange(8)
            elif kind == 1:
                del data[begin:end]
            elif kind == 2:
                data[begin:begin] = data[begin:end]
            else:
                data[begin:end] = generator.choice([b"\xff" * (end - begin), b"[" * 5, b"1e999", b'"', b"-1", b"{}"])
        check(PARSERS[name], bytes(data))


@pytest.mark.parametrize("name", ["tree", "manifest", "completion", "chat", "chat_data"])
@EXAMPLES
@given(value=VALUES)
def test_any_json(name: str, value: object) -> None:
    check(PARSERS[name], json.dumps(value).encode())


PATHS = st.lists(st.lists(st.integers(-1, 20) | SCALARS, max_size=6) | VALUES, max_size=6)
KEYS = st.sampled_from(["paths", "name", "description", "heads", "topk", "probabilities", "metadata", "other"])


@EXAMPLES
@given(paths=PATHS, fields=st.dictionaries(KEYS, VALUES, max_size=3))
def test_anything_like_a_tree(paths: list[Any], fields: dict[str, Any]) -> None:
    check(PARSERS["tree"], json.dumps({"paths": paths, **fields}).encode())


@EXAMPLES
@given(data=st.data())
def test_anything_like_a_manifest(data: st.DataObject) -> None:
    document = manifest_document()
    place: Any = document
    key = data.draw(st.sampled_from([*sorted(document), "another"]))
    while key in place and isinstance(place[key], dict) and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from([*sorted(place), "another"]))
    place[key] = data.draw(VALUES)
    check(PARSERS["manifest"], json.dumps(document).encode())


FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "acceptance",
        "typical_root",
        "posterior_alpha",
        "posterior_threshold",
        "repetition_penalty",
        "ignore_eos",
        "deadline_ms",
        "n",
        "model",
        "logit_bias",
        "tools",
        "return_token_ids",
    ]
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), VALUES | st.just("user"), max_size=4)
)


@pytest.mark.parametrize("name", ["completion", "chat"])
@EXAMPLES
@given(fields=st.dictionaries(FIELDS, VALUES, max_size=4), messages=MESSAGES | VALUES)
def test_anything_like_a_request(name: str, fields: dict[str, Any], messages: object) -> None:
    request: dict[str, Any] = {"messages": messages} if name == "chat" else {"prompt": "a"}
    check(PARSERS[name], json.dumps(request | fields).encode())
