"""medusa-verify of a plan: its rounds are judged as a bundle's, by what they choose and leave in the cache.

CUDA and TensorRT are stand-ins, see `fake_tensorrt`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_checks import check_refused
from fake_cuda import FakeCudart
from fake_tensorrt import make_plan, tensorrt_module
from tampering import Tampered, causal_mask, least_likely, nothing_accepted, rows_left_behind
from tiny_models import Exported

from medusa_engine.exporter.verify import Verification, verify
from medusa_engine.exporter.verify_cli import main
from medusa_engine.exporter.verify_page import page
from medusa_engine.exporter.verify_report import text
from medusa_engine.exporter.verify_settings import VerifySettings

PROMPTS = [[5, 17, 3, 9, 40, 2], [11, 12, 13]]


@pytest.fixture
def asked(rigged_96: Exported, tmp_path: Path) -> dict[str, Any]:
    """A plan of the rigged bundle, to be verified on PROMPTS."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    plan = make_plan(rigged_96.bundle, tmp_path / "a.plan")
    return {"model": str(rigged_96.checkpoint), "engine": plan, "prompts": prompts, "rounds": 12, "threads": 1}


def run(asked: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch) -> Verification:
    """Verify, with a library whose plan does what the graphs of the bundle `runs` say."""
    cudart = FakeCudart()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt_module(runs, cudart, []))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cudart)
    return verify(VerifySettings(**asked), lambda _: None)


def test_a_plan_is_compared_beside_its_bundle(
    rigged_96: Exported, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(asked | {"engine": rigged_96.bundle, "plan": asked["engine"]}, rigged_96.bundle, monkeypatch)
    assert found.verdict == "same"
    assert [subject.name for subject in found.subjects] == ["bundle, rounds", "bundle, plain steps", "plan, rounds"]
    rounds, _, plan = found.subjects
    assert (plan.answers, plan.published) == (rounds.answers, rounds.published)
    assert (plan.rows, plan.relative) == (0, None) and 0 < plan.cache < 1e-5
    assert max(map(max, plan.published)) > 1
    assert "not given by this engine" in text(found) and page(found)


@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (least_likely, {"token"}),
        (nothing_accepted, {"acceptance"}),
        (causal_mask, {"cache"}),
        (rows_left_behind, {"cache"}),
    ],
)
def test_a_fault_of_a_plan_is_found(
    rigged_96: Exported, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Any, kinds: Any
) -> None:
    faulty = Tampered(rigged_96.bundle, tmp_path / "faulty").graph(edit).seal()
    found = run(asked, faulty, monkeypatch)
    (subject,) = found.subjects
    assert subject.name == "plan, rounds" and found.verdict == "fault"
    assert {difference.kind for _, difference in subject.faults} <= kinds


def test_a_plan_without_its_library_is_refused(
    asked: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    status = main(["--model", asked["model"], "--engine", str(asked["engine"])])
    check_refused(status, capfd.readouterr().err, "medusa-verify", asked["engine"], "tensorrt_rtx")
