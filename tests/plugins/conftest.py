from __future__ import annotations

import pytest
from host_kernel import HostKernel

from medusa_engine.plugins.compact_append_kv import kernel


@pytest.fixture(scope="session")
def host_kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    """The kernel as it ships, on the host."""
    return HostKernel(kernel.source(), tmp_path_factory.mktemp("kernel"))
