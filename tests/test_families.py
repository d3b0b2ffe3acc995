"""Models of every common family answer as transformers does, for any tree, far past their windows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, MORE_FAMILIES, VOCAB, WINDOW, Family, save_family
from tiny_models import export, greedy_ids
from tree_answers import SIZES, check_answers

from medusa_engine.runtime import rounds

TABLE = Path(__file__).parent.parent / "docs" / "families.md"
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 5 * WINDOW).tolist()
ANSWER_TOKENS = 70


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
    exported = export(folder / "model", folder / "bundle", *SIZES, "--max-length", "128")
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


def test_the_table_in_the_docs_has_a_row_for_every_family_that_is_tested() -> None:
    verified = re.findall(r"^\| ([^|]+?) \|[^|]*\| verified", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(verified) == sorted([*FAMILIES, *MORE_FAMILIES])
