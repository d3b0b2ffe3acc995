"""JSON that is read can be written again and walked through, and takes no more memory than it has bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.strict_json import parse_json, read_json


def nested(depth: int) -> str:
    return '{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2)


def test_nesting_that_would_fail_later_is_refused_at_once() -> None:
    json.dumps(parse_json(nested(64), source="it", hint=""))
    for depth in (66, 400, 900, 100_000):
        with pytest.raises(UserError, match="it: the JSON is nested too deeply"):
            parse_json(nested(depth), source="it", hint="")


def test_a_small_file_takes_little_memory_whatever_it_might_be(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text('{"a": 1}')
    tracemalloc.start()
    try:
        assert read_json(tmp_path / "small.json", max_bytes=1 << 30, hint="") == {"a": 1}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_without_end_is_not_read_to_it() -> None:
    with pytest.raises(UserError, match="larger than 100000 bytes"):
        read_json(Path("/dev/zero"), max_bytes=100_000, hint="")
