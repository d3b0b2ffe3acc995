"""medusa-verify finds no fault in a sound bundle, and names round, row and path of every kind of fault in others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafts import ObservedState
from safetensors.torch import load_file, save_file
from tampering import (
    Tampered,
    causal_mask,
    least_likely,
    nothing_accepted,
    nothing_looked_up,
    other_tokens,
    positions_by_row,
    rows_left_behind,
)
from tiny_models import RANDOM_VOCAB, Exported, Rigged

from medusa_engine.exporter.verify import Subject, Verification, verify
from medusa_engine.exporter.verify_difference import Difference
from medusa_engine.exporter.verify_page import page
from medusa_engine.exporter.verify_report import text
from medusa_engine.exporter.verify_settings import VerifySettings
from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.rounds import Decoding
from medusa_engine.runtime.tree_buffers import TreeBuffers
from medusa_engine.runtime.tree_plan import TreePlan

PROMPTS = [[5, 17, 3, 9, 40, 2], [11, 12, 13]]
ROUNDS = 12
EMBEDDINGS = "model.model.embed_tokens.weight"
PROJECTION = "heads.lm_head.weight"

Edit = Callable[[Any, Any], None]


def run(exported: Exported, bundle: Path, folder: Path, **options: Any) -> Verification:
    """Verify a bundle on PROMPTS."""
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    options = {"model": str(exported.checkpoint), "prompts": prompts, "rounds": ROUNDS, "threads": 1, **options}
    return verify(VerifySettings(engine=bundle, **options), lambda _: None)


def first_fault(subject: Subject) -> tuple[int, Difference]:
    return subject.faults[0]


def place(difference: Difference) -> tuple[int, int, tuple[int, ...], int]:
    return difference.round, difference.row, difference.path, difference.position


# A sound bundle


def test_a_sound_bundle_is_the_same_token_for_token(own_heads: Exported, tmp_path: Path) -> None:
    found = run(own_heads, own_heads.bundle, tmp_path)
    assert (found.verdict, found.fault, found.layers, found.drafts_compared) == ("same", False, 2, True)
    assert found.notes == []
    rounds, steps = found.subjects
    assert (rounds.name, steps.name) == ("bundle, rounds", "bundle, plain steps")
    for subject in found.subjects:
        assert list(map(len, subject.published)) == [ROUNDS] * 2
        assert subject.passes == 2 * (ROUNDS + 1)
        assert subject.relative is not None and 0 < subject.relative < 1e-5
        assert subject.absolute is not None and 0 < subject.absolute < 1e-4
        assert 0 < subject.cache < 1e-5
    assert rounds.rows == 2 * (1 + 4 * ROUNDS) and steps.rows == 2 * (1 + ROUNDS)
    assert rounds.answers[0][: len(steps.answers[0])] == steps.answers[0][: len(rounds.answers[0])]


def test_answers_and_accepted_lengths_are_those_of_the_rigged_model(
    rigged_64: Exported, rigged_heads: Rigged, tmp_path: Path
) -> None:
    found = run(rigged_64, rigged_64.bundle, tmp_path, rounds=100)
    assert found.verdict == "same"
    rounds = found.subjects[0]
    for prompt, answer, published in zip(PROMPTS, rounds.answers, rounds.published, strict=True):
        room = 64 - len(prompt)  # the end of the cache cuts the last round
        assert answer == rigged_heads.answer(prompt, room)
        assert sum(published) == room
        assert max(published) > 1


def test_rounds_take_several_trees_in_turn(own_heads: Exported, tmp_path: Path) -> None:
    trees = []
    for name, paths in {"flat": [[0], [1], [2]], "line": [[0], [0, 0], [0, 0, 0]], "root": []}.items():
        trees.append(tmp_path / f"{name}.json")
        trees[-1].write_text(json.dumps(paths))
    found = run(own_heads, own_heads.bundle, tmp_path, trees=tuple(trees), rounds=6)
    assert found.verdict == "same"
    assert found.subjects[0].rows == 2 * (1 + 2 * (4 + 4 + 1))


def test_a_tolerance_below_rounding_is_a_fault_and_explained(own_heads: Exported, tmp_path: Path) -> None:
    found = run(own_heads, own_heads.bundle, tmp_path, tolerance=1e-9)
    assert found.verdict == "fault"
    number, difference = first_fault(found.subjects[0])
    assert (number, difference.kind, difference.round) == (1, "logits", 0)
    assert [len(answer) for answer in found.subjects[0].published] == [0, 0], "a prompt ends behind its fault"


# Faults


def test_a_changed_weight_is_seen_in_the_first_row_that_reads_it(own_heads: Exported, tmp_path: Path) -> None:
    number, row, token = first_new_draft(own_heads)
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").weight(EMBEDDINGS, bump(token)).seal()
    found = run(own_heads, bundle, tmp_path)
    prompt, difference = first_fault(found.subjects[0])
    path = ((), (0,), (1,), (0, 0))[row]
    emitted = sum(found.subjects[0].published[0][: number - 1])
    assert (prompt, difference.kind) == (1, "logits")
    assert place(difference) == (number, row, path, len(PROMPTS[0]) + emitted + len(path))
    assert difference.engine_logits is not None and difference.reference_logits is not None
    assert difference.margin == pytest.approx(difference.reference_logits[1] - difference.reference_logits[0])
    assert f"wrong rows: {row}" in difference.reason


def first_new_draft(exported: Exported) -> tuple[int, int, int]:
    """Round, row and token of a draft that neither prompt nor an earlier pass of the first answer has."""
    seen: list[list[int]] = []

    def before_round(state: Any, tree: TreeBuffers) -> None:
        seen.append(state.proposed()[: len(tree.tree_indices)].tolist())

    engine = exported.engine
    state: Any = ObservedState(engine.backend.new_state(), before_round)  # type: ignore[arg-type]
    plan = TreePlan(engine.tree, engine.limits)
    decoding = Decoding(state, engine.limits, PROMPTS[0], plan=plan, max_new_tokens=40, stop_ids=frozenset())
    list(decoding)
    known = set(PROMPTS[0])
    for number, tokens in enumerate(seen[:ROUNDS], 1):
        new = [row for row, token in enumerate(tokens) if row > 0 and token not in known]
        if number > 2 and new and tokens[0] in known:
            return number, new[0], tokens[new[0]]
        known |= set(tokens)
    raise AssertionError("choose another prompt")


def bump(token: int) -> Callable[[Any], None]:
    def edit(weights: Any) -> None:
        weights[token, 7] += 0.05

    return edit


@pytest.mark.parametrize("edit", [positions_by_row, causal_mask])
def test_siblings_at_other_positions_or_that_see_each_other_are_found(
    own_heads: Exported, tmp_path: Path, edit: Edit
) -> None:
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").graph(edit).seal()
    found = run(own_heads, bundle, tmp_path)
    rounds, steps = found.subjects
    for number, difference in rounds.faults:
        assert difference.kind == "logits"
        assert place(difference) == (1, 2, (1,), len(PROMPTS[number - 1]) + 1)
    assert len(rounds.faults) == len(PROMPTS)
    assert steps.faults == []


def test_drafts_that_are_right_but_not_accepted_are_found(
    rigged_64: Exported, rigged_heads: Rigged, tmp_path: Path
) -> None:
    bundle = Tampered(rigged_64.bundle, tmp_path / "bundle").graph(nothing_accepted).seal()
    number, difference = first_fault(run(rigged_64, bundle, tmp_path).subjects[0])
    expected = rigged_heads.published_per_round(PROMPTS[number - 1], rigged_64.engine.tree, 50)
    accepted = next(index for index, count in enumerate(expected) if count > 1)
    assert (difference.kind, difference.row, difference.path) == ("acceptance", 0, ())
    assert f"1 token published instead of {expected[accepted]}" in difference.reason
    assert difference.round <= accepted + 1  # round 1 verifies the tree behind the prompt, not behind a root


def test_tokens_that_are_not_those_of_the_accepted_rows_are_found(own_heads: Exported, tmp_path: Path) -> None:
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").graph(other_tokens).seal()
    rounds = run(own_heads, bundle, tmp_path).subjects[0]
    assert [(number, one.kind, one.round) for number, one in rounds.faults] == [
        (1, "acceptance", 0),
        (2, "acceptance", 0),
    ]
    assert rounds.faults[0][1].reason == f"rows [0] carry [{PROMPTS[0][-1]}], but [{PROMPTS[0][-1] + 1}] is published"


@pytest.mark.parametrize("fault", ["none", "token", "cache"])
def test_an_engine_that_gives_no_logits_is_judged_by_its_choices_and_its_cache(
    own_heads: Exported, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_engine.exporter.verify.OnnxRuntimeBackend", type("PlanBackend", (), {}))
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle")
    if fault == "token":
        bundle.graph(least_likely)
    if fault == "cache":
        bundle.weight(EMBEDDINGS, bump(PROMPTS[0][2]))
    found = run(own_heads, bundle.seal(), tmp_path)
    rounds = found.subjects[0]
    assert (rounds.rows, rounds.absolute, rounds.relative) == (0, None, None)
    assert "not given by this engine" in text(found) and page(found)
    if fault == "none":
        assert found.verdict == "same" and rounds.cache > 0
    else:
        number, difference = first_fault(rounds)
        assert (number, difference.kind, difference.round) == (1, fault, 0)
        assert difference.engine_logits is None
        assert difference.position == (2 if fault == "cache" else len(PROMPTS[0]) - 1)


def test_a_token_that_is_not_the_argmax_is_a_fault(own_heads: Exported, tmp_path: Path) -> None:
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").graph(least_likely).seal()
    _, difference = first_fault(run(own_heads, bundle, tmp_path).subjects[0])
    with torch.inference_mode():
        logits = own_heads.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert (difference.kind, difference.round) == ("token", 0)
    assert (difference.engine_token, difference.reference_token) == (int(logits.argmin()), int(logits.argmax()))
    assert difference.margin == pytest.approx(float(logits.max() - logits.min()), rel=1e-4)


def test_a_near_tie_is_reported_and_no_fault(own_heads: Exported, tmp_path: Path) -> None:
    with torch.inference_mode():
        best = int(own_heads.model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())
    twin = (best + 1) % RANDOM_VOCAB
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(own_heads.checkpoint, checkpoint, ignore=shutil.ignore_patterns("bundle"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"][twin] = tensors["lm_head.weight"][best] * (1 - 1e-5)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})

    def swap(weights: Any) -> None:
        weights[twin] = weights[best] * (1 + 1e-5)

    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").weight(PROJECTION, swap).seal()
    found = run(own_heads, bundle, tmp_path, model=str(checkpoint))
    assert (found.verdict, found.fault) == ("near-ties", False)
    for subject in found.subjects:
        number, difference = subject.near_ties[0]
        assert (number, difference.kind, difference.round) == (1, "token", 0)
        assert (difference.engine_token, difference.reference_token) == (twin, best)
        assert difference.margin is not None and difference.near_tie_margin is not None
        assert 0 < difference.margin <= difference.near_tie_margin
        assert len(subject.published[0]) == ROUNDS, "a near-tie does not end the prompt"
    assert any("checkpoint's files" in note for note in found.notes)


def test_rows_of_the_cache_that_were_not_moved_are_found(rigged_64: Exported, tmp_path: Path) -> None:
    bundle = Tampered(rigged_64.bundle, tmp_path / "bundle").graph(rows_left_behind).seal()
    found = run(rigged_64, bundle, tmp_path, rounds=40)
    _, difference = first_fault(found.subjects[0])
    assert difference.kind in ("cache", "logits")
    assert "key of layer 0 in cache row" in difference.reason
    assert found.subjects[1].faults == []


def test_a_head_that_lists_other_tokens_is_found(own_heads: Exported, tmp_path: Path) -> None:
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").weight("heads.projections.1", negate).seal()
    found = run(own_heads, bundle, tmp_path)
    _, difference = first_fault(found.subjects[0])
    assert (difference.kind, difference.round) == ("draft", 0)
    assert "head 1 lists token" in difference.reason and "path [0, 0], of the next tree" in difference.reason
    assert found.subjects[1].faults == [], "plain steps have no heads"


@pytest.mark.parametrize("bundle", ["own_heads", "no_heads"])
def test_tokens_that_were_not_looked_up_where_they_are_are_found(
    request: pytest.FixtureRequest, bundle: str, tmp_path: Path
) -> None:
    exported = request.getfixturevalue(bundle)
    tree, prompts = tmp_path / "chain.json", tmp_path / "repetitive.json"
    tree.write_text('[["L"], ["L", "L"]]')
    prompts.write_text("[[5, 6, 7, 8, 5, 6, 7, 8, 5]]")
    options = {"model": str(exported.checkpoint), "prompts": prompts, "trees": (tree,), "rounds": 6, "threads": 1}
    sound = verify(VerifySettings(engine=exported.bundle, **options), lambda _: None)
    assert sound.verdict == "same" and sound.drafts_compared
    tampered = Tampered(exported.bundle, tmp_path / "bundle").graph(nothing_looked_up).seal()
    rounds, steps = verify(VerifySettings(engine=tampered, **options), lambda _: None).subjects
    number, difference = first_fault(rounds)
    answer = sound.subjects[0].answers[0]
    context = [5, 6, 7, 8, 5, 6, 7, 8, 5, *answer]
    before = sum(rounds.published[0][: difference.round])
    assert (number, difference.kind) == (1, "draft")
    expected = lookup_tokens(context[: 9 + before + 1], 1)[0]
    assert f"at depth 1 instead of {expected}, for row 1 of the next tree" in difference.reason
    assert steps.faults == []


def negate(weights: Any) -> None:
    weights *= -1


def test_logits_that_are_not_numbers_are_a_fault(own_heads: Exported, tmp_path: Path) -> None:
    def spoil(weights: Any) -> None:
        weights[PROMPTS[0][-1]] = np.nan

    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").weight(EMBEDDINGS, spoil).seal()
    found = run(own_heads, bundle, tmp_path)
    rounds = found.subjects[0]
    number, difference = first_fault(rounds)
    assert (number, difference.kind, difference.round) == (1, "logits", 0)
    assert rounds.relative is not None and np.isnan(rounds.relative), "the largest error is that of no number"


def test_a_fault_of_the_step_graph_is_told_apart(own_heads: Exported, tmp_path: Path) -> None:
    bundle = Tampered(own_heads.bundle, tmp_path / "bundle").graph(least_likely, "step").seal()
    rounds, steps = run(own_heads, bundle, tmp_path).subjects
    assert rounds.faults == [] and steps.faults[0][1].kind == "token"
