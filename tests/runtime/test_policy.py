"""Parameters of acceptance are checked where they enter, and reach the graph as the contract says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import make_plan
from tiny_models import Exported

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.policy_inputs import constant_inputs
from medusa_engine.runtime.policy_options import add_policy_options, policy_of

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "sampling" / "cases.json").read_text())
ERRORS = [case["params"] for case in CASES["errors"]]
REFUSED = [
    *(params for params in ERRORS if params != {"temperature": "nan"}),
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": 1e-6},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_p": float("nan")},
    {"top_p": float("nan")},
    {"repetition_penalty": -1.3},
    {"repetition_penalty": float("nan")},
    {"repetition_penalty": float("inf")},
    {"seed": -1},
    {"seed": 1 << 64},
    {"posterior_threshold": 1.1},
    {"posterior_threshold": float("nan")},
    {"posterior_alpha": -1.0},
    {"posterior_alpha": float("inf")},
    {"typical_root": "sampled"},
    {"name": "best"},
    {"name": "best" * 1000},
    {"seed": 10**300},
    {"top_k": -(10**5000)},
    {"temperature": 10**5000},
    {"posterior_alpha": 10**400},
    {"min_p": [0.1] * 1000},
]
IDLE = [
    ("greedy", {"temperature": 0.7}),
    ("greedy", {"top_k": 5}),
    ("greedy", {"top_p": 0.9}),
    ("greedy", {"min_p": 0.1}),
    ("greedy", {"posterior_alpha": 0.2}),
    ("sample", {"posterior_threshold": 0.2}),
    ("sample", {"typical_root": "drawn"}),
    ("rejection", {"posterior_alpha": 0.2}),
]


@pytest.mark.parametrize("parameters", REFUSED, ids=lambda parameters: next(iter(parameters)))
def test_a_parameter_out_of_range_is_refused_by_name(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(UserError, match=f"^{'acceptance' if name == 'name' else name} is ") as refused:
        AcceptancePolicy(**{"name": "sample"} | parameters)
    assert len(refused.value.problem) < 80


@pytest.mark.parametrize(("policy", "parameters"), IDLE, ids=str)
def test_a_parameter_that_the_policy_does_not_take_is_refused_by_name(policy: str, parameters: dict[str, Any]) -> None:
    (name,) = parameters
    with pytest.raises(UserError, match=f"^{name} is .*acceptance {policy} has no such parameter") as refused:
        AcceptancePolicy(policy, **parameters)
    assert "typical" in refused.value.hint
    assert AcceptancePolicy(policy, **{name: getattr(AcceptancePolicy, name)}) is not None  # its default
    assert AcceptancePolicy("typical", **parameters) is not None


def test_a_temperature_of_0_and_a_seed_go_with_every_policy() -> None:
    for policy in ("greedy", "sample", "rejection", "typical"):
        assert AcceptancePolicy(policy, temperature=0, seed=3).effective == "greedy"
    assert parse("--temperature", "0").effective == "greedy"


def test_only_the_logits_that_a_filter_needs_are_sorted() -> None:
    def sorted_of(**parameters: Any) -> tuple[int, int]:
        inputs = constant_inputs(AcceptancePolicy("sample", **parameters), 50)
        return len(inputs["ranks"]), int(inputs["top_k"][0])

    assert sorted_of() == (1, 50)  # top_k beyond the ranks: off
    assert sorted_of(min_p=0.5, temperature=2) == (1, 50)
    assert sorted_of(top_k=7, top_p=0.5) == (7, 7)
    assert sorted_of(top_p=0.5) == (50, 50)
    assert sorted_of(top_k=50) == sorted_of(top_k=1000) == (1, 50)
    assert constant_inputs(AcceptancePolicy(repetition_penalty=1), 50) == {}


def parse(*arguments: str | Path) -> AcceptancePolicy:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", type=Path)
    add_policy_options(parser)
    return policy_of(parser.parse_args([str(argument) for argument in arguments]))


def test_options_choose_the_policy() -> None:
    assert parse().name == "greedy"
    assert parse("--repetition-penalty", "1.2").repetition_penalty == 1.2
    chosen = parse("--acceptance", "typical", "--posterior-alpha", "0.2", "--typical-root", "drawn", "--seed", "3")
    assert chosen == AcceptancePolicy("typical", posterior_alpha=0.2, typical_root="drawn", seed=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--acceptance", "best"), 'acceptance is "best"'),
        (("--acceptance", "sample", "--top-p", "0"), "top_p is 0.0"),
        (("--acceptance", "typical", "--seed", "3"), "--seed is given, but --acceptance typical draws nothing"),
        (("--acceptance", "typical", "--top-p", "0.5"), "--top-p is given"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(*arguments)


def test_a_parameter_of_other_policies_is_refused_with_those_that_the_engine_has(
    own_heads: Exported, shared_heads: Exported, tmp_path: Path
) -> None:
    greedy_plan = make_plan(own_heads.bundle, tmp_path / "a.plan", acceptance="greedy")
    drawn, likely = ("--temperature", "0.5"), ("--acceptance", "sample", "--posterior-alpha", "1")
    build = "build a plan with medusa-build --acceptance sample or typical"
    for engine, arguments, words in (
        (own_heads.bundle, drawn, "give --acceptance sample or typical"),
        (own_heads.bundle, likely, "give --acceptance typical"),
        (shared_heads.bundle, likely, "export the model with medusa-export --acceptance typical"),
        (shared_heads.bundle, drawn, "export the model with medusa-export --acceptance sample or rejection or typical"),
        (greedy_plan, drawn, build),
        (make_plan(own_heads.bundle, tmp_path / "b.plan", acceptance="sample"), drawn, "give --acceptance sample"),
    ):
        with pytest.raises(UserError, match=f"^{arguments[-2]} is given, but --acceptance ") as refused:
            parse("--engine", engine, *arguments)
        assert refused.value.hint == f"drop it, or {words}"
    with pytest.raises(UserError, match="there is no such folder"):
        parse("--engine", tmp_path / "missing", *drawn)
