"""Heads with a draft vocabulary propose tokens of it only; verification keeps the whole one, so answers stay exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import HEADS_FILE, RANDOM_HIDDEN, RANDOM_VOCAB, Exported, export, greedy_ids, random_llama

from medusa_engine.exporter.cli import main
from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.sampling import DRAFT_STREAM, draw, processed_probabilities, uniforms
from medusa_engine.runtime.tree import chain, parse_tree
from medusa_engine.runtime.tree_plan import TreePlan

HEADS, DRAFT, TOPK = 2, 9, 4
TREE = parse_tree([[0], [1], [2], [0, 0], [1, 0]], "tree")


def draft_heads(folder: Path, *, own_projection: bool) -> torch.Tensor:
    """Save heads of random weights over DRAFT tokens; gives the token of each place."""
    generator = torch.Generator().manual_seed(11)
    token_map = torch.randperm(RANDOM_VOCAB, generator=generator)[:DRAFT].sort().values
    tensors = {"token_map": token_map}
    for head in range(HEADS):
        tensors[f"blocks.{head}.layers.0.weight"] = 0.3 * torch.randn(RANDOM_HIDDEN, RANDOM_HIDDEN, generator=generator)
        if own_projection:
            tensors[f"lm_heads.{head}.weight"] = torch.randn(DRAFT, RANDOM_HIDDEN, generator=generator)
    save_file(tensors, folder / HEADS_FILE)
    return token_map


@pytest.fixture(scope="module", params=[True, False], ids=["own projection", "rows of the shared projection"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, set[int]]:
    folder = tmp_path_factory.mktemp("draft")
    random_llama(folder, tied=True, seed=8)
    token_map = draft_heads(folder, own_projection=request.param)
    sizes = ("--max-length", "100", "--top-k", str(TOPK), "--max-tree-nodes", "8")
    exported = export(folder, folder / "bundle", *sizes, "--acceptance", "rejection")
    return exported, set(token_map.tolist())


def test_heads_propose_what_torch_ranks_among_the_draft_tokens(drafted: tuple[Exported, set[int]]) -> None:
    exported, draft = drafted
    prompt = [5, 3, 60, 2, 17]
    engine = exported.engine
    state = engine.backend.new_state()
    plan = engine.stream(prompt_ids=prompt, tree=TREE, max_new_tokens=1)._decoding._plan
    assert plan is not None
    state.prefill(np.array(prompt), 0, plan.full)
    proposed = state.slot.input_ids[0, 1 : TREE.nodes].tolist()

    heads, model = exported.heads, exported.model
    assert heads.token_map is not None
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1:]
        expected = []
        for head in range(HEADS):
            state_row = hidden + torch.nn.functional.silu(hidden @ heads.residual_weight[head, 0].T)
            rows = model.lm_head.weight[heads.token_map] if heads.projection is None else heads.projection[head]
            expected.append(heads.token_map[(state_row @ rows.T)[0].topk(TOPK).indices].tolist())
    assert proposed == [expected[0][0], expected[0][1], expected[0][2], expected[1][0], expected[1][0]]
    assert set(proposed) <= draft


def test_answers_are_those_of_transformers(drafted: tuple[Exported, set[int]]) -> None:
    exported, draft = drafted
    answer = exported.engine.generate(prompt_ids=[5, 3, 60, 2, 17], max_new_tokens=40, tree=TREE)
    assert answer.token_ids == greedy_ids(exported.model, [5, 3, 60, 2, 17], 40)
    assert set(answer.token_ids) - draft, "the answer has tokens that no head can propose"


def test_rejection_draws_among_the_draft_tokens_what_numpy_draws(drafted: tuple[Exported, set[int]]) -> None:
    exported, draft = drafted
    prompt = [5, 3, 60, 2, 17]
    engine, heads = exported.engine, MedusaHeads(exported.heads, exported.model.get_output_embeddings())
    with torch.no_grad():
        logits = heads(exported.model.model(torch.tensor([prompt])).last_hidden_state[0, -1:]).numpy()  # [K, V']
    assert heads.token_map is not None
    proposed = set()
    for seed in range(20):
        policy = AcceptancePolicy("rejection", seed=seed, temperature=3.0, top_p=0.95)
        state = engine.backend.new_state()
        state.use(policy)
        plan = TreePlan(chain(HEADS), engine.limits)
        state.prefill(np.array(prompt), 0, plan.full)
        probabilities = processed_probabilities(logits, temperature=3.0, top_p=0.95)
        places = draw(probabilities, uniforms(seed, len(prompt) + np.arange(HEADS), DRAFT_STREAM))
        assert state.proposed()[1:].tolist() == heads.token_map[torch.tensor(places)].tolist()
        proposed |= set(state.proposed()[1:].tolist())
    assert len(proposed) > HEADS and proposed <= draft


def test_more_ranks_than_draft_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_llama(tmp_path, tied=True, seed=8)
    draft_heads(tmp_path, own_projection=True)
    (tmp_path / "tree.json").write_text("[[0]]")
    arguments = ["--model", tmp_path, "--tree", tmp_path / "tree.json", "-o", tmp_path / "bundle", "--top-k", DRAFT + 1]
    assert main(list(map(str, arguments))) == 1
    assert f"--top-k {DRAFT + 1}" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()
