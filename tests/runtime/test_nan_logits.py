"""Logits that are NaN end an answer in an error that names the bundle; engine and session stay usable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from command_checks import Commands
from nan_weights import EMBEDDING, LM_HEAD, with_nan_row

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.tree import parse_tree
from medusa_engine.runtime.tree_buffers import TreeBuffers

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPT = [7, 3, 1]
TOKENS = 6
TREE = parse_tree([[0], [0, 0]], "two drafts")
MESSAGE = "the model's logits behind the last token are NaN or infinite"
WAYS = [("greedy", True), ("sample", True), ("typical", True), ("greedy", False), ("sample", False)]


def options(policy: str, speculation: bool) -> dict[str, Any]:
    seed = {} if policy == "greedy" else {"seed": 3}
    tree = TREE if speculation else None
    return {"acceptance": AcceptancePolicy(policy, **seed), "speculation": speculation, "tree": tree}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def unseen(own_heads: Exported) -> int:
    """A token that none of the answers to PROMPT has, nor any of their drafts."""
    seen = set(PROMPT)
    for way in WAYS:
        with own_heads.engine.session() as session:
            for _ in session.stream(prompt_ids=PROMPT, max_new_tokens=TOKENS, **options(*way)):
                seen.update(session._state.proposed().tolist())
    return min(set(range(own_heads.engine.limits.vocab_size)) - seen)


@pytest.fixture(scope="module")
def bundle(own_heads: Exported, unseen: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose logits are NaN behind one token."""
    return with_nan_row(own_heads.bundle, tmp_path_factory.mktemp("nan") / "bundle", EMBEDDING, unseen)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return Engine.open(bundle, threads=1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_prompt_whose_logits_are_nan_is_refused_and_its_session_goes_on(
    own_heads: Exported, engine: Engine, bundle: Path, unseen: int, way: tuple[str, bool]
) -> None:
    ask: dict[str, Any] = {"max_new_tokens": TOKENS, **options(*way)}
    expected = own_heads.engine.generate(prompt_ids=PROMPT, **ask).token_ids
    with engine.session() as session:
        assert session.generate(prompt_ids=PROMPT, **ask).token_ids == expected
        for bad in ([*session.token_ids, unseen], [unseen], [*PROMPT, unseen, 5]):
            with pytest.raises(UserError) as error:
                session.generate(prompt_ids=bad, **ask)
            assert error.value.problem == f"{bundle}: {MESSAGE}" and error.value.hint
            assert session.token_ids == []  # what is in the cache is not relied on
            assert session.generate(prompt_ids=PROMPT, **ask).token_ids == expected
        assert session.generate(prompt_ids=[*PROMPT, unseen], max_new_tokens=0).token_ids == []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_came_before_is_streamed_and_an_answer_that_is_complete_is_no_error(
    own_heads: Exported, tmp_path: Path, way: tuple[str, bool]
) -> None:
    ask: dict[str, Any] = {"prompt_ids": PROMPT, **options(*way)}
    whole = own_heads.engine.generate(max_new_tokens=12, **ask).token_ids
    index = next(i for i, token in enumerate(whole) if i and whole.index(token) == i and token not in PROMPT)
    engine = Engine.open(with_nan_row(own_heads.bundle, tmp_path / "bundle", EMBEDDING, whole[index]), threads=1)
    stream = engine.stream(max_new_tokens=12, **ask)
    tokens: list[int] = []
    with pytest.raises(UserError, match=MESSAGE):
        tokens.extend(token for piece in stream for token in piece.token_ids)
    with pytest.raises(RuntimeError, match="ended by an error"):
        _ = stream.generation
    assert tokens == whole[: len(tokens)]
    assert len(tokens) == index + 1
    assert engine.generate(max_new_tokens=index + 1, **ask).finish_reason == "length"


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("policy", ["greedy", "sample", "rejection", "typical"])
def test_a_rejected_draft_whose_logits_are_nan_does_no_harm(
    every_graph: Exported, tmp_path: Path, policy: str, value: float
) -> None:
    ask: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": 24, **options(policy, True)}
    drafts: list[int] = []
    with every_graph.engine.session() as session:
        stream = session.stream(**ask)
        for _ in stream:
            drafts += session._state.proposed()[1:].tolist()
        expected = stream.generation
    seen = {*PROMPT, *expected.token_ids}
    in_vain = next(token for token in drafts[: len(drafts) // 2] if token not in seen)
    engine = Engine.open(with_nan_row(every_graph.bundle, tmp_path / "bundle", EMBEDDING, in_vain, value), threads=1)
    answer = engine.generate(**ask)
    assert (answer.token_ids, answer.published_per_round) == (expected.token_ids, expected.published_per_round)
    with pytest.raises(UserError, match=MESSAGE):
        engine.generate(**{**ask, "prompt_ids": [in_vain, *[5] * 300]})  # in another chunk than the last token


def test_an_accepted_draft_whose_logits_are_nan_is_no_part_of_the_next_turn(
    own_heads: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=3).token_ids
    assert whole[2] not in (*PROMPT, *whole[:2])
    engine = Engine.open(with_nan_row(own_heads.bundle, tmp_path / "bundle", EMBEDDING, whole[2]), threads=1)
    with engine.session() as session:
        round_ = session._state.round

        def planted(*trees: TreeBuffers) -> None:
            session._state.slot.input_ids[0, 1:3] = whole[1:]
            round_(*trees)

        monkeypatch.setattr(session._state, "round", planted)
        answer = session.generate(prompt_ids=PROMPT, max_new_tokens=3, tree=TREE)
        assert (answer.token_ids, answer.published_per_round) == (whole, [3])
        monkeypatch.undo()
        with pytest.raises(UserError, match=MESSAGE):
            session.generate(prompt_ids=[*PROMPT, *whole, 5], max_new_tokens=1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_nan_among_the_logits_is_enough(own_heads: Exported, tmp_path: Path, way: tuple[str, bool]) -> None:
    engine = Engine.open(with_nan_row(own_heads.bundle, tmp_path / "bundle", LM_HEAD, 60), threads=1)
    stream = engine.stream(prompt_ids=PROMPT, **options(*way))
    with pytest.raises(UserError, match=MESSAGE):
        next(stream)


def test_the_command_says_so_in_two_lines(bundle: Path, unseen: int, commands: Commands) -> None:
    commands.run_refuses("--engine", bundle, "--prompt-ids", f"1,{unseen}", named=[bundle, "NaN"])
