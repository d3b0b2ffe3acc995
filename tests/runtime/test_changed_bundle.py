"""A bundle that is replaced or written to while it is open: right answers, or an error that says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from bundle_edits import edit_manifest

from medusa_engine.exporter.bundle import new_bundle
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import AcceptancePolicy

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPT = [7, 3, 1]


@pytest.fixture
def bundle(own_heads: Exported, tmp_path: Path) -> Path:
    """A copy of a bundle, to be changed."""
    return Path(shutil.copytree(own_heads.bundle, tmp_path / "bundle"))


def answer(engine: Engine, policy: str = "greedy") -> list[int]:
    acceptance = AcceptancePolicy(policy, seed=3) if policy != "greedy" else AcceptancePolicy()  # type: ignore[arg-type]
    return engine.generate(prompt_ids=PROMPT, max_new_tokens=6, acceptance=acceptance).token_ids


def with_other_weights(bundle: Path) -> Path:
    """Change a bundle as another export of it would."""
    weights = np.memmap(bundle / "weights.bin", np.float32, "r+")
    weights[:] = weights[::-1].copy()
    weights.flush()
    del weights
    edit_manifest(bundle)
    return bundle


def replace(bundle: Path) -> None:
    with new_bundle(bundle) as folder:
        shutil.copytree(bundle, folder, dirs_exist_ok=True)
        with_other_weights(folder)


def test_a_replaced_bundle_leaves_an_open_engine_what_it_has_loaded(own_heads: Exported, bundle: Path) -> None:
    engine = Engine.open(bundle, threads=1)
    expected = answer(engine)
    replace(bundle)
    assert answer(engine) == expected == answer(own_heads.engine)
    assert answer(Engine.open(bundle, threads=1)) != expected


@pytest.mark.parametrize("verify", [True, False])
def test_a_graph_is_not_loaded_beside_the_weights_of_another_bundle(verify: bool, bundle: Path) -> None:
    engine = Engine.open(bundle, threads=1, verify=verify)
    expected = answer(engine)
    replace(bundle)
    with pytest.raises(UserError, match="replaced since the bundle was opened") as error:
        answer(engine, "sample")
    assert str(bundle / "weights.bin") in error.value.problem
    assert answer(engine) == expected


def test_a_graph_that_changed_before_it_is_loaded_is_refused(bundle: Path) -> None:
    engine = Engine.open(bundle, threads=1)
    expected = answer(engine)
    graph = bundle / "round.sample.onnx"
    data = bytearray(graph.read_bytes())
    data[-1] ^= 1
    graph.write_bytes(data)
    with pytest.raises(UserError, match="changed since the export") as error:
        answer(engine, "sample")
    assert str(graph) in error.value.problem
    assert answer(engine) == expected


def test_a_copy_that_is_not_complete_is_to_be_made_again_or_exported(bundle: Path) -> None:
    (bundle / "round.onnx").unlink()
    with pytest.raises(UserError, match="lists this file, but it is missing") as error:
        Engine.open(bundle, threads=1)
    assert error.value.hint.startswith("copy the whole folder again, or export the model again with medusa-export")


def test_a_graph_of_another_size_is_refused_without_verification_too(bundle: Path) -> None:
    engine = Engine.open(bundle, threads=1, verify=False)
    os.truncate(bundle / "round.onnx", 100)
    with pytest.raises(UserError, match="cut short"):
        answer(engine)


@pytest.mark.parametrize("name", ["round.onnx", "weights.bin"])
def test_a_file_that_is_gone_before_a_graph_is_loaded_is_named(name: str, bundle: Path) -> None:
    engine = Engine.open(bundle, threads=1)
    (bundle / name).unlink()
    with pytest.raises(UserError) as error:
        answer(engine)
    assert str(bundle / name) in error.value.problem


def emptied(weights: Path) -> None:
    os.truncate(weights, 0)


def written_over(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.write(bytes(4096))
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))  # two writes may fall into one tick of the clock


@pytest.mark.parametrize("change", [emptied, written_over])
def test_weights_that_are_written_to_end_answers_before_the_next_pass(
    change: Callable[[Path], None], bundle: Path
) -> None:
    engine = Engine.open(bundle, threads=1)
    with engine.session() as session:
        stream = session.stream(prompt_ids=PROMPT, max_new_tokens=30)
        next(stream)
        change(bundle / "weights.bin")
        with pytest.raises(UserError, match="changed while the bundle was open") as error:
            list(stream)
        assert str(bundle / "weights.bin") in error.value.problem
        with pytest.raises(UserError, match="changed while the bundle was open"):
            answer(engine)


def test_a_bundle_that_moves_is_answered_from(bundle: Path) -> None:
    engine = Engine.open(bundle, threads=1)
    expected = answer(engine)
    bundle.rename(bundle.with_name("moved"))
    assert answer(engine) == expected
    shutil.rmtree(bundle.with_name("moved"))
    assert answer(engine) == expected
