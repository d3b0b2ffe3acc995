"""One run of medusa-bench on a small bundle, which several tests look at."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from bench_run import CHAIN, CHAIN_NAME, CONTEXTS, MAX_NEW_TOKENS, PROMPTS, REPEATS, SWEEP, Benched
from tiny_models import Exported

from medusa_engine.benchmarks.cli import main


@pytest.fixture(scope="session")
def benched(rigged_64: Exported, tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Of the rigged model, which has no tokenizer: with everything that the command can do."""
    folder = tmp_path_factory.mktemp("bench")
    prompts, tree = folder / "prompts.json", folder / "chain.json"
    prompts.write_text(json.dumps(PROMPTS))
    tree.write_text(json.dumps({"name": CHAIN_NAME, "paths": CHAIN}))
    options: list[str | Path] = ["--engine", rigged_64.bundle, "--prompts", prompts, "--tree", tree, "--ledger"]
    options += ["--context", ",".join(map(str, CONTEXTS)), "--sweep", ",".join(map(str, SWEEP))]
    options += ["--repeats", str(REPEATS), "--threads", "1", "--max-new-tokens", str(MAX_NEW_TOKENS)]
    options += ["--against", "transformers", "--model", rigged_64.checkpoint]
    options += ["--json", folder / "out.json", "--report", folder / "out.html", "--figures", folder / "figures"]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        assert main(list(map(str, options))) == 0
    document = json.loads((folder / "out.json").read_text())
    return Benched(out.getvalue(), errors.getvalue(), document, folder / "out.html", folder / "figures")
