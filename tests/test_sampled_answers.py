"""Sampled answers are those of plain sampling with the same uniforms; policies are chosen among those exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_checks import Commands
from policy_answers import TREE, check_planted_answer, sampled_ids
from tiny_models import Exported

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import graph_names, read_manifest
from medusa_engine.runtime.policy import AcceptancePolicy

PROMPT = [7, 3, 1]
POLICIES = [
    AcceptancePolicy("sample", seed=5),
    AcceptancePolicy("sample", seed=6, temperature=0.7, top_k=20, top_p=0.95),
    AcceptancePolicy("sample", seed=7, min_p=0.1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_whatever_is_drafted_an_answer_is_that_of_plain_sampling(own_heads: Exported, policy: AcceptancePolicy) -> None:
    expected = sampled_ids(own_heads, PROMPT, 40 + own_heads.engine.limits.depth, policy)
    for tree in (TREE, None):
        check_planted_answer(own_heads, PROMPT, expected, policy, tree)


def answer(exported: Exported, **options: Any) -> list[int]:
    return exported.engine.generate(prompt_ids=PROMPT, max_new_tokens=24, **options).token_ids


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(own_heads: Exported) -> None:
    first = answer(own_heads, acceptance=AcceptancePolicy("sample", seed=1))
    other = own_heads.engine.stream(prompt_ids=[9], max_new_tokens=24, acceptance=AcceptancePolicy("sample", seed=2))
    next(other)  # another answer is under way
    assert answer(own_heads, acceptance=AcceptancePolicy("sample", seed=1)) == first
    assert answer(own_heads, acceptance=AcceptancePolicy("sample", seed=3)) != first
    assert answer(own_heads, acceptance=AcceptancePolicy("sample")) != answer(
        own_heads, acceptance=AcceptancePolicy("sample")
    )


@pytest.mark.parametrize(
    "policy",
    [
        AcceptancePolicy("sample", temperature=0),
        AcceptancePolicy("sample", top_k=1),
        AcceptancePolicy("sample", temperature=1e-5),
        AcceptancePolicy("typical", temperature=0),
        AcceptancePolicy("typical", temperature=1e-5),
    ],
    ids=str,
)
def test_without_temperature_answers_are_greedy(own_heads: Exported, policy: AcceptancePolicy) -> None:
    assert answer(own_heads, acceptance=policy) == answer(own_heads)


# Which policies there are


def test_a_bundle_lists_its_policies_and_their_graphs_share_the_weights(
    own_heads: Exported, shared_heads: Exported
) -> None:
    manifest = read_manifest(own_heads.bundle)
    assert manifest.policies == ("greedy", "sample", "typical")
    assert set(manifest.graphs) == {"round", "step", "round.sample", "step.sample", "round.typical"}
    assert set(manifest.graphs) == set(graph_names(manifest.policies))
    assert [name for name in manifest.files if name.endswith(".bin")] == ["weights.bin"]
    graphs = sum(manifest.files[file]["bytes"] for file in manifest.graphs.values())
    assert graphs < len(manifest.graphs) * 200_000, "a graph file holds weights"
    greedy = read_manifest(shared_heads.bundle)
    assert (greedy.policies, set(greedy.graphs)) == (("greedy",), {"round", "step"})


def test_a_policy_that_was_not_exported_is_refused(shared_heads: Exported, commands: Commands) -> None:
    with pytest.raises(UserError, match="without --acceptance sample") as refused:
        answer(shared_heads, acceptance=AcceptancePolicy("sample"))
    assert refused.value.hint == "choose greedy, or export the model with --acceptance sample"
    ask = ("--engine", shared_heads.bundle, "--prompt-ids", "1")
    commands.run_refuses(*ask, "--acceptance", "typical", named=["exported without --acceptance typical"])


def test_a_policy_that_there_is_not_is_not_exported(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("[[0]]")
    ask = ("--model", tmp_path, "--tree", tmp_path / "tree.json", "--acceptance", "greedy,best")
    commands.export_refuses(*ask, named=["--acceptance", "best"])


def test_typical_acceptance_without_drafts_is_refused(own_heads: Exported) -> None:
    with pytest.raises(UserError, match="without speculation"):
        answer(own_heads, acceptance=AcceptancePolicy("typical"), speculation=False)


# The command


def test_the_command_says_what_it_drew_with_and_compares_with_plain_sampling(
    own_heads: Exported, commands: Commands
) -> None:
    ask = ("--engine", own_heads.bundle, "--prompt-ids", "7,3,1", "--max-new-tokens", "24", "--json")
    sampled = ("--acceptance", "sample", "--top-p", "0.9")
    report = json.loads(commands.run(*ask, *sampled, "--seed", "5", "--compare"))
    assert all(way["same_ids"] for way in report["compared"])
    assert report["acceptance"] == {
        "policy": "sample",
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "seed": 5,
        "preserves_distribution": True,
    }
    drawn = json.loads(commands.run(*ask, *sampled))
    again = json.loads(commands.run(*ask, *sampled, "--seed", str(drawn["acceptance"]["seed"])))
    assert again["token_ids"] == drawn["token_ids"]


def test_typical_says_wherever_it_is_named_that_it_does_not_preserve_the_distribution(
    own_heads: Exported, commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    from medusa_engine.exporter.cli import main as medusa_export
    from medusa_engine.runtime.cli import main as medusa_run

    ask = ["--engine", str(own_heads.bundle), "--prompt-ids", "7,3,1", "--acceptance", "typical"]
    report = json.loads(commands.run(*ask, "--json"))
    assert report["acceptance"]["preserves_distribution"] is False
    capfd.readouterr()
    assert medusa_run([*ask, "--stats"]) == 0
    assert "acceptance         typical" in (stats := capfd.readouterr().err)
    assert "does not preserve the model's distribution" in stats
    for main in (medusa_run, medusa_export):
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "does not preserve the model's distribution" in " ".join(capfd.readouterr().out.split())
    commands.run_refuses(*ask, "--compare", named=["does not preserve"])
