"""What calibrate counts is what the heads list in transformers, and rounds replayed on it are those of the engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import Exported, Rigged, greedy_ids

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.training.calibrate import calibrate, candidate_trees
from medusa_engine.training.calibration import Calibration, check_calibrated, load_calibration
from medusa_engine.training.tree_search import END, MISS, Ranks, best_first, joint_mass, replay

PROMPTS = [[3, 1, 4], [15], [9, 2, 6, 5, 3], [5, 8]]
TOKENS = 14


def calibrated(engine: Engine, prompts: list[list[int]], tokens: int = TOKENS) -> Calibration:
    return calibrate(
        engine,
        prompts,
        max_new_tokens=tokens,
        provenance={"model": dict(engine.manifest.model), "heads": dict(engine.manifest.heads)},
        progress=lambda done, tokens: None,
    )


def ranks_in_transformers(exported: Exported, prompt: list[int], tokens: int) -> Ranks:
    """Every head's logits from the hidden states of one pass over prompt and answer, sorted, and looked up."""
    heads, topk = exported.engine.limits.heads, exported.engine.limits.topk
    sequence = prompt + greedy_ids(exported.model, prompt, tokens + heads)
    with torch.no_grad():
        hidden = exported.model.model(torch.tensor([sequence])).last_hidden_state[0]
    weights = exported.heads
    vectors = np.full((tokens, heads), MISS)
    for head in range(heads):
        state = hidden
        for layer in range(weights.layers):
            weight, bias = weights.residual_weight[head, layer].float(), weights.residual_bias[head, layer].float()
            state = state + torch.nn.functional.silu(state @ weight.T + bias)
        projection = exported.model.lm_head.weight if weights.projection is None else weights.projection[head].float()
        best = (state @ projection.T).topk(topk).indices.tolist()
        for position in range(tokens):
            before = len(prompt) + position - 1  # the token whose state the heads read; its own next is the root
            label = sequence[before + 2 + head]
            if label in best[before]:
                vectors[position, head] = best[before].index(label)
    return vectors


@pytest.mark.parametrize("bundle", ["own_heads", "shared_heads"])
def test_ranks_are_those_of_transformers(bundle: str, request: pytest.FixtureRequest) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    answers = calibrated(exported.engine, PROMPTS).answers
    assert [answer.prompt_ids for answer in answers] == PROMPTS
    for answer in answers:
        assert answer.ranks.tolist() == ranks_in_transformers(exported, answer.prompt_ids, TOKENS).tolist()
    everything = np.concatenate([answer.ranks for answer in answers])
    assert len(np.unique(everything)) > 2, "the example is too easy"


def test_ranks_are_those_the_heads_were_rigged_with(rigged_64: Exported, rigged_heads: Rigged) -> None:
    for answer in calibrated(rigged_64.engine, [[0], [7, 11]]).answers:
        read = [answer.prompt_ids[-1], *rigged_heads.answer(answer.prompt_ids, TOKENS - 1)]
        for vector, token in zip(answer.ranks.tolist(), read, strict=True):
            for rank, rigged in zip(vector, rigged_heads.correct_rank[token].tolist(), strict=True):
                assert rank == rigged  # MISS is -1, as in the rigged table


def test_nothing_is_counted_behind_a_stop_token(rigged_32: Exported, rigged_heads: Rigged) -> None:
    (answer,) = calibrated(rigged_32.engine, [[0]]).answers  # the tenth token of this answer stops it
    assert len(answer.ranks) == 10
    ended = [[position + 1 + head >= 10 for head in range(4)] for position in range(10)]
    assert ((answer.ranks == END) == np.array(ended)).all()


def test_engine_of_few_nodes_is_calibrated_as_any(own_heads: Exported) -> None:
    """All 16 candidate rows do not fit a round of 6: several passes over the answer see them in parts."""
    whole = calibrated(own_heads.engine, PROMPTS[:2])
    engine = Engine.open(own_heads.bundle, threads=1)
    engine.limits = dataclasses.replace(engine.limits, max_tree_nodes=6)
    assert len(candidate_trees(engine.limits)) > 1 == len(candidate_trees(own_heads.engine.limits))
    for answer, expected in zip(calibrated(engine, PROMPTS[:2]).answers, whole.answers, strict=True):
        assert answer.ranks.tolist() == expected.ranks.tolist()


def test_heads_deeper_than_any_tree_are_left_out(own_heads: Exported) -> None:
    engine = Engine.open(own_heads.bundle, threads=1)
    engine.limits = dataclasses.replace(engine.limits, max_tree_nodes=3)
    assert calibrated(engine, PROMPTS[:1]).heads == 2


def test_replayed_rounds_are_those_the_engine_takes(any_bundle: Exported) -> None:
    engine = any_bundle.engine
    prompts = [*PROMPTS, [1], [2, 2]]
    calibration = calibrated(engine, prompts)
    looked_up = [["L"] * depth for depth in range(1, engine.limits.lookup + 1)]
    trees = [parse_tree([[0], [1], [0, 0]], "three"), parse_tree([[0]], "chain"), engine.tree]
    trees += [parse_tree(looked_up, "lookup"), parse_tree([[0], [1], [0, 0], *looked_up], "heads and lookup")]
    searched = best_first(joint_mass(calibration.ranks), nodes=12, heads=calibration.heads, topk=calibration.topk)
    published = 0
    for tree in [*trees, searched]:
        for answer in calibration.answers:
            real = engine.generate(prompt_ids=answer.prompt_ids, max_new_tokens=TOKENS, tree=tree)
            assert replay(tree, [answer.hits]) == real.published_per_round
            published += max(real.published_per_round) - 1
    assert published, "no round published more than its root"


def test_engine_without_heads_is_calibrated_by_its_answers(no_heads: Exported, tmp_path: Path) -> None:
    engine = no_heads.engine
    calibration = calibrated(engine, PROMPTS, tokens=40)
    assert (calibration.heads, calibration.lookup) == (0, 4)
    chain = parse_tree([["L"] * depth for depth in range(1, 5)], "chain")
    published = []
    for answer in calibration.answers:
        assert answer.token_ids == greedy_ids(no_heads.model, answer.prompt_ids, 40)
        real = engine.generate(prompt_ids=answer.prompt_ids, max_new_tokens=40, tree=chain)
        assert replay(chain, [answer.hits]) == real.published_per_round
        published += real.published_per_round
    assert {1, 5} <= set(published)
    calibration.save(tmp_path / "c.json")
    loaded = load_calibration(tmp_path / "c.json")
    check_calibrated(loaded, engine, tmp_path)
    assert (loaded.heads, loaded.lookup, loaded.lookup_counts()) == (0, 4, calibration.lookup_counts())


def test_file_from_before_lookup_is_read_without_it(own_heads: Exported, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration = calibrated(own_heads.engine, PROMPTS)
    calibration.save(path)
    document = json.loads(path.read_text())
    del document["lookup"]
    for answer in document["answers"]:
        del answer["token_ids"]
    path.write_text(json.dumps(document))
    old = load_calibration(path)
    assert (old.lookup, old.lookup_counts(), calibration.lookup) == (None, None, 3)
    assert [answer.ranks.tolist() for answer in old.answers] == [
        answer.ranks.tolist() for answer in calibration.answers
    ]
    assert not any(hits.runs.any() for hits in old.sequences) and any(hits.runs.any() for hits in calibration.sequences)


def test_replayed_rounds_end_at_a_stop_token_as_the_engine_does(rigged_32: Exported) -> None:
    engine = rigged_32.engine
    tree = parse_tree([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]], "two deep")
    for prompt in range(40):
        (answer,) = calibrated(engine, [[prompt]], tokens=12).answers
        real = engine.generate(prompt_ids=[prompt], max_new_tokens=12, tree=tree)
        assert replay(tree, [answer.hits]) == real.published_per_round


def test_file_gives_back_what_was_written(own_heads: Exported, tmp_path: Path) -> None:
    calibration = calibrated(own_heads.engine, PROMPTS)
    calibration.save(tmp_path / "c.json")
    loaded = load_calibration(tmp_path / "c.json")
    assert loaded.provenance == calibration.provenance
    assert (loaded.heads, loaded.topk, loaded.max_tree_nodes) == (3, 5, 24)
    assert [answer.prompt_ids for answer in loaded.answers] == PROMPTS
    pairs = zip(loaded.sequences, calibration.sequences, strict=True)
    assert all((a.ranks == b.ranks).all() and (a.runs == b.runs).all() for a, b in pairs)


def test_file_counts_each_head_and_rank_over_the_positions_that_have_a_label(
    rigged_32: Exported, tmp_path: Path
) -> None:
    calibration = calibrated(rigged_32.engine, [[0], [5]])
    calibration.save(tmp_path / "c.json")
    document = json.loads((tmp_path / "c.json").read_text())
    vectors = [vector for answer in document["answers"] for vector in answer["ranks"]]
    assert any(END in vector for vector in vectors)
    for head in range(4):
        column = [vector[head] for vector in vectors]
        assert document["positions"][head] == sum(rank != END for rank in column)
        assert document["counts"][head] == [column.count(rank) for rank in range(calibration.topk)]


@pytest.mark.parametrize(
    ("prompts", "tokens", "problem"),
    [([[]], 4, "empty"), ([[1] * 32], 4, "32 tokens"), ([[1]], 0, "max_new_tokens is 0"), ([[99]], 4, "99")],
)
def test_prompts_that_cannot_be_answered(
    rigged_32: Exported, prompts: list[list[int]], tokens: int, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        calibrated(rigged_32.engine, prompts, tokens)


def remove(*keys: Any) -> Callable[[Any], None]:
    """An edit that removes what these keys lead to."""

    def edit(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return edit


def put(value: object, *keys: Any) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return edit


def nothing_at_all(document: Any) -> None:
    """Neither heads nor lookup."""
    del document["lookup"]
    document |= {"heads": 0, "counts": [], "positions": []}
    for answer in document["answers"]:
        answer["ranks"] = [[] for _ in answer["ranks"]]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (put("medusa-bundle", "format"), "not a calibration"),
        (put(2, "format_version"), "format version 2"),
        (remove("provenance"), "damaged"),
        (put("five", "topk"), "damaged"),
        (put(True, "heads"), "damaged"),
        (put([], "answers"), "no answers"),
        (put(3, "answers"), "no answers"),
        (remove("answers", 1, "prompt_ids"), "answer 1"),
        (put([1.5], "answers", 0, "prompt_ids"), "answer 0"),
        (put([], "answers", 2, "ranks"), "answer 2"),
        (remove("answers", 0, "ranks", 3, 0), "answer 0"),
        (put(5, "answers", 0, "ranks", 3, 0), "answer 0"),
        (put("1", "answers", 0, "ranks", 3, 0), "answer 0"),
        (put(-3, "answers", 0, "ranks", 3, 0), "answer 0"),
        (remove("answers", 0, "ranks", 0), "answer 0"),
        (put(99, "counts", 0, 0), "counts"),
        (remove("counts"), "counts"),
        (put(0, "heads"), "rank vector"),
        (put(-1, "topk"), "damaged"),
        (put([], "lookup"), "lookup"),
        (put(65, "lookup", "offered"), "lookup"),
        (put(99, "lookup", "hits", 0, 1), "counts of lookup"),
        (remove("lookup", "positions"), "counts of lookup"),
        (remove("answers", 1, "token_ids"), "answer 1 has no token_ids"),
        (put([1, 2], "answers", 1, "token_ids"), "answer 1 has no token_ids"),
        (put([1] * 99, "answers", 1, "token_ids"), "answer 1 has no token_ids"),
        (nothing_at_all, "damaged: 0 heads"),
        (put(1.0, "answers", 1, "token_ids", 2), "answer 1 has no token_ids"),
        (put(-1, "answers", 1, "token_ids", 2), "answer 1 has no token_ids"),
    ],
)
def test_damaged_file_is_refused(
    own_heads: Exported, tmp_path: Path, edit: Callable[[Any], None], problem: str
) -> None:
    path = tmp_path / "c.json"
    calibrated(own_heads.engine, PROMPTS).save(path)
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=problem) as caught:
        load_calibration(path)
    assert str(path) in caught.value.problem and "medusa-tree calibrate" in caught.value.hint


def test_calibration_belongs_to_model_and_heads(
    own_heads: Exported, rigged_64: Exported, rigged_32: Exported, tmp_path: Path
) -> None:
    calibration = calibrated(rigged_64.engine, [[0]])
    check_calibrated(calibration, rigged_64.engine, tmp_path)
    with pytest.raises(UserError, match="another model"):
        check_calibrated(calibration, own_heads.engine, tmp_path)

    def with_provenance(**changes: object) -> Calibration:
        return dataclasses.replace(calibration, provenance=calibration.provenance | changes)

    renamed = {"source": "elsewhere", "sha256": {"other.safetensors": next(iter(_hashes(rigged_64)))}}
    check_calibrated(with_provenance(heads=calibration.provenance["heads"] | renamed), rigged_64.engine, tmp_path)
    fewer_facts = {"sha256": calibration.provenance["heads"]["sha256"]}  # as of an export that told less
    check_calibrated(with_provenance(heads=fewer_facts), rigged_64.engine, tmp_path)
    for facts in ({}, {"sha256": {}}, None):
        with pytest.raises(UserError, match="other heads"):
            check_calibrated(with_provenance(heads=facts), rigged_64.engine, tmp_path)
    other = {"sha256": {"medusa_lm_head.safetensors": "0" * 64}}
    with pytest.raises(UserError, match="other heads"):
        check_calibrated(with_provenance(heads=calibration.provenance["heads"] | other), rigged_64.engine, tmp_path)
    with pytest.raises(UserError, match="7 ranks"):
        check_calibrated(dataclasses.replace(calibration, topk=7), rigged_64.engine, tmp_path)
    fewer = [dataclasses.replace(answer, ranks=answer.ranks[:, :2]) for answer in calibration.answers]
    with pytest.raises(UserError, match="2 heads"):
        check_calibrated(dataclasses.replace(calibration, answers=fewer), rigged_64.engine, tmp_path)


def _hashes(exported: Exported) -> list[str]:
    return list(exported.engine.manifest.heads["sha256"].values())
