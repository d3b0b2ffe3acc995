"""Models of every common family answer as transformers does, for any tree, far past their windows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import ObservedState, PlantedDrafts
from families import FAMILIES, MORE_FAMILIES, VOCAB, WINDOW, Family, save_family
from greedy_check import check_greedy
from tiny_models import Exported, export, greedy_ids

from medusa_engine.runtime import rounds
from medusa_engine.runtime.rounds import Decoding, TreePlan
from medusa_engine.runtime.tree import parse_tree

TABLE = Path(__file__).parent.parent / "docs" / "families.md"
SIZES = ("--untrained-heads", "3", "--top-k", "4", "--max-tree-nodes", "16", "--max-length", "128")
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 5 * WINDOW).tolist()
ANSWER_TOKENS = 70
TREES: dict[str, list[list[int]] | None] = {
    "none": None,
    "chain": [[0], [0, 0], [0, 0, 0]],
    "branches": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 3]],
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in several chunks, each with a window that reaches into the one before."""
    monkeypatch.setattr(rounds, "CHUNK_ROWS", 7)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    check_family_row(FAMILIES[name], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_further_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    check_family_row(MORE_FAMILIES[name], tmp_path)


def check_family_row(family: Family, folder: Path) -> None:
    save_family(folder / "model", family.config, seed=family.seed)
    exported = export(folder / "model", folder / "bundle", *SIZES)
    reference = greedy_ids(exported.model, PROMPT, ANSWER_TOKENS)
    assert len(set(reference)) > 8, "the model repeats itself: choose another seed"
    for name, value in family.matters.items():
        assert answer_with(folder, family, {name: value}) != reference, f"{name} makes no difference: choose others"
    check_answers(exported, PROMPT, reference)


def answer_with(folder: Path, family: Family, fields: dict[str, Any]) -> list[int]:
    """What transformers answers with the weights of a saved row and other values of fields."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    other = save_family(folder / "other", family.config | fields, seed=family.seed)
    config = AutoConfig.from_pretrained(other)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", config=config, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return greedy_ids(model.eval(), PROMPT, ANSWER_TOKENS)


def check_answers(exported: Exported, prompt: list[int], reference: list[int]) -> None:
    """With every tree, the heads' own drafts and planted ones, which are accepted at every length from 0 to the depth.

    Args:
        reference: transformers' answer, longer than the one that is asked for by the depth of the trees.
    """
    depth = exported.engine.limits.depth
    count = len(reference) - depth
    accepted = set()
    for name, paths in TREES.items():
        for planted in (False, True) if paths else (False,):
            state = exported.engine.backend.new_state()
            vocab_size = exported.engine.limits.vocab_size
            drafts = PlantedDrafts(len(prompt), reference, vocab_size, np.random.default_rng(1), prefer_long=True)
            decoding = Decoding(
                ObservedState(state, drafts) if planted else state,
                exported.engine.limits,
                prompt,
                plan=TreePlan(parse_tree(paths, name), exported.engine.limits) if paths else None,
                max_new_tokens=count,
                stop_ids=frozenset(),
            )
            published = [round_.token_ids for round_ in decoding]
            check_greedy([token for ids in published for token in ids], reference[:count], prompt, exported.model)
            assert len(published) >= count // (depth + 1)
            if planted:
                accepted |= {len(ids) - 1 for ids in published}
    assert accepted == set(range(depth + 1))


def test_the_table_in_the_docs_has_a_row_for_every_family_that_is_tested() -> None:
    verified = re.findall(r"^\| ([^|]+?) \|[^|]*\| verified", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(verified) == sorted([*FAMILIES, *MORE_FAMILIES])
