"""Rounds and plain steps in turn: the threads of the graph that waits leave the cores to the one that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.onnxruntime_backend import OnnxRuntimeBackend

if TYPE_CHECKING:
    from tiny_models import Exported


@pytest.mark.parametrize("graph", ["round", "step"])
def test_threads_do_not_spin_between_passes(own_heads: Exported, graph: str) -> None:
    backend = Engine.open(own_heads.bundle, threads=2).backend
    assert isinstance(backend, OnnxRuntimeBackend)
    options = backend.session(graph).get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
