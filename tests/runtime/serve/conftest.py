"""One server for each of two bundles, with default options; what a test needs otherwise it starts itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from serving import Serving, serving

from medusa_engine.runtime.engine import Engine

if TYPE_CHECKING:
    from tiny_models import Exported


@pytest.fixture(scope="session")
def ids_server(own_heads: Exported) -> Iterator[Serving]:
    """Serves `own_heads`: no tokenizer, every policy, a cache of 600 rows, 61 tokens."""
    with serving(own_heads.engine) as server:
        yield server


@pytest.fixture(scope="session")
def chat_engine(chat_bundle: Path) -> Engine:
    return Engine.open(chat_bundle, threads=1)


@pytest.fixture(scope="session")
def chat_server(chat_engine: Engine) -> Iterator[Serving]:
    """Serves `chat_bundle`: a tokenizer and a chat template, greedy only, a cache of 64 rows."""
    with serving(chat_engine) as server:
        yield server
