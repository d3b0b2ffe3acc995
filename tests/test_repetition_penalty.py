"""Answers under a repetition penalty are those of transformers, whatever is drafted, and in every kind of session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_checks import Commands
from policy_answers import TREE, check_planted_answer, sampled_ids
from tiny_models import RANDOM_VOCAB, Exported
from transformers import RepetitionPenaltyLogitsProcessor

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import document_sha256, graph_names, read_manifest
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.sampling import penalised_logits, processed_probabilities

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sampling" / "cases.json").read_text())
PROMPT = [7, 3, 1, 3]
TOKENS = 40


def test_the_reference_is_that_of_the_case_and_of_transformers() -> None:
    (case,) = (case for case in CASES["single_step"] if "rep" in case["params"])
    logits = penalised_logits(np.array(case["logits"]), np.array(case["prompt_ids"]), case["params"]["rep"])
    np.testing.assert_allclose(processed_probabilities(logits), case["probs"], atol=1e-6)
    logits, seen = np.random.default_rng(0).normal(0, 2, 30), np.array([4, 9, 4, 0, 29])
    for penalty in (0.5, 1.7):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(seen[None]), torch.tensor(logits[None]))
        np.testing.assert_allclose(penalised_logits(logits, seen, penalty), expected[0], atol=1e-12)


def greedy_ids(exported: Exported, prompt: Sequence[int], count: int, penalty: float) -> list[int]:
    """`count` tokens of transformers.generate."""
    with torch.inference_mode():
        out = exported.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            repetition_penalty=penalty,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("tree", [TREE, None], ids=["tree", "plain"])
@pytest.mark.parametrize(
    "policy",
    [
        AcceptancePolicy(repetition_penalty=1.3),
        AcceptancePolicy(repetition_penalty=0.8),
        AcceptancePolicy("typical", temperature=0, repetition_penalty=1.3),
        AcceptancePolicy("sample", repetition_penalty=1.3, seed=5, temperature=0.8, top_p=0.95),
    ],
    ids=str,
)
def test_whatever_is_drafted_an_answer_is_penalised_as_plain_decoding(
    every_graph: Exported, policy: AcceptancePolicy, tree: Any
) -> None:
    count = TOKENS + every_graph.engine.limits.depth
    if policy.effective == "greedy":
        expected = greedy_ids(every_graph, PROMPT, count, policy.repetition_penalty)
        assert expected != greedy_ids(every_graph, PROMPT, count, 1.0)
    else:
        expected = sampled_ids(every_graph, PROMPT, count, policy)
    check_planted_answer(every_graph, PROMPT, expected, policy, tree)


@pytest.mark.parametrize("speculation", [True, False])
def test_a_prompt_of_several_chunks_is_penalised_as_a_whole(every_graph: Exported, speculation: bool) -> None:
    generator = np.random.default_rng(0)
    first, last = (generator.integers(low, low + 20, 260).tolist() for low in (0, 20))  # a chunk has 256 rows
    policy = AcceptancePolicy(repetition_penalty=4.0)
    for prompt in ([*first, *last[:5]], [*first[:5], *last]):
        answer = every_graph.engine.generate(
            prompt_ids=prompt, max_new_tokens=8, acceptance=policy, speculation=speculation
        )
        assert answer.token_ids == greedy_ids(every_graph, prompt, 8, 4.0)


def test_turns_and_forks_remember_what_was_said_before(every_graph: Exported) -> None:
    engine = every_graph.engine
    generator = np.random.default_rng(3)
    with engine.session() as session:
        for turn in range(12):
            held = session.token_ids
            kept = int(generator.integers(max(len(held) - 12, 0), len(held) + 1))
            prompt = [*held[:kept], *generator.integers(0, RANDOM_VOCAB, 3).tolist()]
            options: Any = {
                "prompt_ids": prompt,
                "max_new_tokens": 10,
                "acceptance": AcceptancePolicy(repetition_penalty=(1.0, 1.4, 2.5)[turn % 3]),
                "speculation": bool(generator.random() < 0.7),
                "tree": None,
            }
            if turn % 2:
                with session.fork() as fork:
                    assert fork.generate(**options).token_ids == engine.generate(**options).token_ids
            answer = session.generate(**options)
            assert answer.token_ids == engine.generate(**options).token_ids
            assert answer.cached_tokens == kept


# What there is to choose


def test_a_bundle_lists_its_penalising_graphs_and_off_is_the_graph_without(every_graph: Exported) -> None:
    manifest = read_manifest(every_graph.bundle)
    assert manifest.repetition_penalty
    assert set(manifest.graphs) == set(graph_names(manifest.policies, repetition_penalty=True))
    assert {"round.penalty", "step.penalty", "round.sample.penalty", "round.typical.penalty"} <= set(manifest.graphs)
    assert "step.typical.penalty" not in manifest.graphs
    assert AcceptancePolicy("sample", repetition_penalty=1.0).graph == "sample"
    assert AcceptancePolicy(repetition_penalty=1.1).graph == "greedy.penalty"


def test_a_manifest_that_lacks_a_penalising_graph_is_refused(every_graph: Exported, tmp_path: Path) -> None:
    for change in ({"repetition_penalty": 1}, {"graphs": {"round": "round.onnx", "step": "step.onnx"}}):
        document = json.loads((every_graph.bundle / "manifest.json").read_text()) | {"policies": ["greedy"]} | change
        del document["sha256"]
        document["sha256"] = document_sha256(document)
        (tmp_path / "manifest.json").write_text(json.dumps(document))
        with pytest.raises(UserError, match=r"repetition_penalty|round\.penalty"):
            read_manifest(tmp_path)


def test_a_bundle_without_penalising_graphs_refuses(shared_heads: Exported, commands: Commands) -> None:
    policy = AcceptancePolicy(repetition_penalty=1.1)
    with pytest.raises(UserError, match="without --repetition-penalty") as refused:
        shared_heads.engine.generate(prompt_ids=PROMPT, acceptance=policy)
    assert "medusa-export --repetition-penalty" in refused.value.hint
    assert "repetition_penalty" not in refused.value.hint  # commands call it otherwise
    ask = ("--engine", shared_heads.bundle, "--prompt-ids", "1", "--repetition-penalty")
    commands.run_refuses(*ask, "1.1", named=["exported without --repetition-penalty"])
    commands.run_refuses(*ask, "0", named=["--repetition-penalty is 0.0"])
    commands.run(*ask, "1")


def test_the_command_penalises_and_says_so(
    every_graph: Exported, commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    from medusa_engine.runtime.cli import main as medusa_run

    ask = ["--engine", str(every_graph.bundle), "--prompt-ids", "7,3,1,3", "--max-new-tokens", "12"]
    report = json.loads(commands.run(*ask, "--repetition-penalty", "1.3", "--json", "--compare"))
    assert report["token_ids"] == greedy_ids(every_graph, PROMPT, 12, 1.3)
    assert all(way["same_ids"] for way in report["compared"])
    assert report["acceptance"] == {"policy": "greedy", "repetition_penalty": 1.3, "preserves_distribution": True}
    assert medusa_run([*ask, "--repetition-penalty", "1.3", "--stats"]) == 0
    assert "acceptance         greedy, repetition_penalty 1.3" in capfd.readouterr().err
