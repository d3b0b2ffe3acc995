"""The ledger's counts are those of the worked examples, and modelled times never pass for measured ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from medusa_engine.runtime.cost import (
    PARTS,
    ROOT,
    head_work,
    round_ledger,
    step_ledger,
)
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.ledger_table import ledger_table
from medusa_engine.runtime.manifest import TENSORRT
from medusa_engine.runtime.model_facts import ModelFacts, facts_of
from medusa_engine.runtime.roofline import (
    Machine,
    Measured,
    Modelled,
    Published,
    ledger_seconds,
    overhead,
    part_seconds,
    pays,
    roofline,
    speed_up,
    step_seconds,
)
from medusa_engine.runtime.tree import Tree, chain, parse_tree

if TYPE_CHECKING:
    from tiny_models import Exported

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "worked_examples.json").read_text(encoding="utf-8")
)
HEADS = ORACLES["head_parameters"]
KV = ORACLES["kv_payload"]
LEDGER = ORACLES["cost_ledger"]
SPEEDUP = ORACLES["speedup_identity"]

LARGE = ModelFacts(
    hidden=HEADS["hidden"],
    vocab=HEADS["vocab"],
    layers=KV["layers"],
    attention_heads=32,
    kv_heads=KV["kv_heads"],
    head_dim=KV["head_dim"],
    layer_weights=6_000_000_000,
    parameters=6_300_000_000,
    heads=HEADS["heads"],
    residual_blocks=HEADS["res_blocks"],
    choices=HEADS["vocab"],
    projections=HEADS["heads"],
    layer_weight_bytes=6_000_000_000 * KV["bytes_per_scalar"],
    lm_weight_bytes=HEADS["vocab"] * HEADS["hidden"] * KV["bytes_per_scalar"],
    weight_bytes=KV["bytes_per_scalar"],
    value_bytes=KV["bytes_per_scalar"],
)
SHARED = replace(LARGE, projections=0)
NINE = parse_tree(ORACLES["nine_row_tree"]["choices"], "nine")
SMALL = ModelFacts(
    hidden=4,
    vocab=10,
    layers=3,
    attention_heads=2,
    kv_heads=1,
    head_dim=2,
    layer_weights=100,
    parameters=140,
    heads=2,
    residual_blocks=1,
    choices=10,
    projections=0,
    layer_weight_bytes=400,
    lm_weight_bytes=160,
    weight_bytes=4,
    value_bytes=4,
)


# The worked examples


def test_head_parameters_are_those_of_the_worked_example() -> None:
    assert LARGE.residual_parameters == HEADS["one_residual_block"]
    assert LARGE.projection_parameters == HEADS["one_projection"]
    assert LARGE.head_parameters == HEADS["independent_total"]
    assert SHARED.head_parameters == HEADS["shared_total"]
    assert round(2 * LARGE.head_parameters / 2**30, 3) == HEADS["independent_gib_at_2_bytes"]
    assert round(2 * SHARED.head_parameters / 2**20, 2) == HEADS["shared_mib_at_2_bytes"]
    assert head_work(LARGE, 1).projection_flops == 2 * HEADS["macs_four_projections_one_row"]


def test_cache_bytes_are_those_of_the_worked_example() -> None:
    tree = Tree(tuple((rank,) for rank in range(KV["nodes"] - 1)))
    assert tree.nodes == KV["nodes"]
    assert LARGE.kv_row_bytes == KV["per_node_bytes"]
    ledger = round_ledger(LARGE, tree, context=7)
    assert ledger.temporary_kv_bytes == KV["tree_bytes"]
    assert ledger.temporary_kv_bytes / 2**20 == KV["tree_mib"]
    assert ledger.committed_kv_bytes == 7 * KV["per_node_bytes"]


def test_ledger_is_that_of_the_worked_example() -> None:
    ledger = round_ledger(LARGE, NINE, context=LEDGER["prefix"])
    assert ledger.rows == LEDGER["rows"]
    assert ledger.dense_attention_pairs == LEDGER["dense_attention_pairs"]
    assert ledger.allowed_attention_pairs == LEDGER["allowed_attention_pairs"]
    assert ledger.allowed_attention_pairs - ledger.rows * ledger.context == LEDGER["mask_ones"]
    assert ledger.part("LM").flops == LEDGER["lm_projection_flops"]
    assert ledger.heads_on_all_rows.projection_flops == LEDGER["head_projection_flops_all_rows"]
    assert ledger.heads_on_winning_row.projection_flops == LEDGER["head_projection_flops_terminal_row"]
    assert ledger.heads_on_all_rows.residual_flops == LEDGER["head_residual_flops_all_rows"]
    assert ledger.heads_on_winning_row.residual_flops == LEDGER["head_residual_flops_terminal_row"]
    assert ledger.target_logit_elements == LEDGER["target_logit_elements"]
    assert ledger.heads_on_all_rows.logit_elements == LEDGER["head_logit_elements_all_rows"]
    assert ledger.gathered_path_logit_elements == LEDGER["gathered_path_logit_elements"]


def test_speed_up_is_that_of_the_worked_example() -> None:
    published = Published(tokens=round(100 * SPEEDUP["mean_published"]), rounds=100)
    assert published.mean == SPEEDUP["mean_published"]
    for kind in (Modelled, Measured):
        gain = speed_up(published, overhead(kind(SPEEDUP["overhead"] * 0.02), kind(0.02)))
        assert type(gain) is kind
        assert round(gain.value, 3) == SPEEDUP["speedup"]


# The conventions


def test_every_part_of_a_small_round_by_hand() -> None:
    # 4 rows of 3 depths: [], [0], [1], [0,0]; P = 5, so 36 pairs; a cache row has 2 * 3 * 1 * 2 numbers, 48 bytes.
    ledger = round_ledger(SMALL, parse_tree([[0], [1], [0, 0]], "small"), context=5)
    parts = {part.name: (part.flops, part.weight_bytes, part.value_bytes) for part in ledger.parts}
    assert parts == {
        "top-k": (20, 0, 80),  # 2 heads, 10 logits each
        "backbone": (2 * 4 * 100 + 4 * 36 * 3 * 2 * 2, 4 * (100 + 16), 9 * 48),  # 16: the embeddings of 4 rows
        "LM": (2 * 4 * 4 * 10, 4 * 40, 160),
        "heads": (2 * 2 * 16 + 2 * 2 * 40, 4 * (2 * 20 + 40), 80),
        "path": (2 * 2, 0, 2 * 2 * 3 * 8),  # 2 leaves, 2 edges and 3 tokens each
        "posterior": (40, 0, 160),
        "commit": (0, 0, (2 * 3 + 4) * 48),  # 3 rows read and written, 4 written
    }
    assert tuple(parts) == PARTS[:-1]  # without lookup
    assert ledger.flops == sum(flops for flops, _, _ in parts.values())
    assert ledger.bytes == sum(weights + values for _, weights, values in parts.values())
    assert ledger.resident_parameters == 140 + 2 * (16 + 4)


def test_a_round_of_an_engine_with_lookup_by_hand() -> None:
    facts = replace(SMALL, lookup=4)  # D = 4
    tree = parse_tree([[0], ["L"], ["L", "L"], ["L", "L", "L"]], "small")  # 5 rows, 2 leaves, P = 5
    parts = {
        part.name: (part.flops, part.weight_bytes, part.value_bytes)
        for part in round_ledger(facts, tree, context=5).parts
    }
    assert tuple(parts) == PARTS
    assert parts["path"] == (2 * 4, 0, 2 * 2 * 5 * 8)
    assert parts["commit"] == (0, 0, (2 * 4 + 5) * 48)  # at most four rows were accepted: the root and three nodes
    assert parts["lookup"] == (4 * 5, 0, (5 + 2 * 4) * 8)  # 3 tokens of the key and a choice, at each of 5 tokens
    idle = round_ledger(facts, tree, context=5, next_tree=parse_tree([[0]], "heads alone"))
    assert idle.part("lookup").flops == idle.part("lookup").bytes == 0 < idle.part("heads").flops
    copied = round_ledger(facts, tree, context=5, next_tree=parse_tree([["L"]], "lookup alone"))
    assert copied.part("heads").flops == copied.part("top-k").bytes == 0 < copied.part("lookup").flops
    assert round_ledger(facts, ROOT, context=5).part("commit").value_bytes == (2 * 1 + 1) * 48


def test_fixed_shapes_move_and_cover_as_much_whatever_the_tree() -> None:
    facts = replace(SMALL, lookup=4, fixed_cache_rows=64)
    ledger = round_ledger(facts, parse_tree([[0]], "small"), context=5, next_tree=ROOT)  # 2 rows
    assert ledger.part("commit").value_bytes == (2 * 5 + 2) * 48  # D+1 rows
    assert ledger.part("backbone").value_bytes == 64 * 48 and ledger.dense_attention_pairs == 2 * 64
    assert ledger.part("heads").flops > 0 and ledger.part("lookup").flops == 4 * 64


def test_a_sparser_mask_computes_no_less() -> None:
    star = Tree(tuple((rank,) for rank in range(4)), "star")
    line = chain(4)
    sparse, dense = (round_ledger(LARGE, tree, context=100) for tree in (star, line))
    assert sparse.allowed_attention_pairs < dense.allowed_attention_pairs < dense.dense_attention_pairs
    assert sparse.dense_attention_pairs == dense.dense_attention_pairs
    assert sparse.part("backbone") == dense.part("backbone")


def test_sharing_the_projection_saves_memory_and_traffic_but_no_arithmetic() -> None:
    own, shared = (round_ledger(facts, NINE, context=100) for facts in (LARGE, SHARED))
    assert shared.part("heads").flops == own.part("heads").flops > 0
    assert shared.resident_parameters == own.resident_parameters - 4 * LARGE.projection_parameters
    read = own.part("heads").weight_bytes - shared.part("heads").weight_bytes
    assert read == 3 * 2 * LARGE.projection_parameters  # one pass over it for all heads is left
    assert round_ledger(replace(LARGE, projections=1), NINE, context=100).part("heads") == shared.part("heads")


def test_heads_run_on_the_winning_row_and_not_where_the_root_alone_is_proposed() -> None:
    ledger = round_ledger(LARGE, NINE, context=100)
    assert ledger.part("heads").flops == ledger.heads_on_winning_row.flops == ledger.heads_on_all_rows.flops // 9
    idle = round_ledger(LARGE, NINE, context=100, next_tree=ROOT)
    for name in ("heads", "top-k"):
        assert (idle.part(name).flops, idle.part(name).bytes) == (0, 0)
    step = step_ledger(LARGE, context=100)
    assert step.part("heads").bytes == step.heads_on_all_rows.flops == 0
    assert step.rows == 1


def test_a_draft_vocabulary_makes_heads_cheaper() -> None:
    draft = replace(SMALL, choices=3, projections=1)
    assert draft.head_parameters == 2 * 20 + 3 * 4
    work = head_work(draft, 1)
    assert (work.projection_flops, work.logit_elements) == (2 * 2 * 4 * 3, 6)


def test_posteriors_other_than_greedy_work_more_on_each_logit() -> None:
    flops = [round_ledger(SMALL, NINE, context=0, policy=p).part("posterior").flops for p in ("greedy", "typical")]
    assert flops == [90, 6 * 90]


# Times


def test_a_part_takes_the_longer_of_arithmetic_and_traffic() -> None:
    ledger = round_ledger(SMALL, NINE, context=5)
    lm, commit = ledger.part("LM"), ledger.part("commit")
    machine = Machine(bytes_per_second=1.0, flops_per_second=1e-3)
    assert part_seconds(lm, machine) == Modelled(lm.flops * 1e3)
    assert part_seconds(commit, machine) == Modelled(float(commit.bytes))
    assert ledger_seconds(ledger, machine).value == pytest.approx(
        sum(max(part.flops * 1e3, part.bytes) for part in ledger.parts)
    )


def test_the_roofline_is_flat_while_memory_limits_and_rises_with_arithmetic() -> None:
    machine = Machine(bytes_per_second=1e10, flops_per_second=1e12)
    times = roofline(LARGE, machine, context=256, nodes=[1, 2, 8, 64, 512])
    assert times[1] == step_seconds(LARGE, machine, context=256)
    assert times[8].value < 1.05 * times[2].value
    assert times[512].value == pytest.approx(times[64].value * 512 / 64, rel=0.5)
    assert all(type(time) is Modelled for time in times.values())
    with pytest.raises(ValueError):
        roofline(LARGE, machine, context=1, nodes=[0])


def test_the_roofline_counts_what_the_engine_proposes_with() -> None:
    machine = Machine(bytes_per_second=1e10, flops_per_second=1e12)
    known = replace(LARGE, lookup=8)
    plain, looked_up = (roofline(facts, machine, context=2048, nodes=[1, 2, 8]) for facts in (LARGE, known))
    assert looked_up[8].value > plain[8].value
    copied = roofline(replace(known, heads=0), machine, context=2048, nodes=[1, 8])
    assert copied[1].value < copied[8].value < plain[8].value


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_rates_that_are_none_are_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError):
        Machine(*rates)


def test_modelled_and_measured_times_do_not_mix() -> None:
    with pytest.raises(TypeError):
        overhead(Modelled(2.0), Measured(1.0))  # type: ignore[type-var]
    assert Modelled(1.0) != Measured(1.0)
    ledger = round_ledger(SMALL, NINE, context=5)
    with pytest.raises(TypeError):
        ledger_table(ledger, measured={"LM": Modelled(1.0)})  # type: ignore[dict-item]
    with pytest.raises(ValueError):
        ledger_table(ledger, measured={"lm head": Measured(1.0)})


def test_tokens_are_counted_and_not_rounds() -> None:
    published = Published.of([1, 3, 2])
    assert (published.tokens, published.rounds, published.mean) == (6, 3, 2.0)
    assert published.per_second(Measured(0.5)) == Measured(4.0)
    for tokens, rounds in ((2, 3), (0, 0)):
        with pytest.raises(ValueError):
            Published(tokens, rounds)


def test_a_round_pays_above_its_overhead_only() -> None:
    published = Published.of([1, 2])
    assert [pays(published, Measured(cost)) for cost in (1.4, 1.5, 1.6)] == [True, False, False]


# The table


def test_the_table_has_modelled_and_measured_times_in_columns_of_their_own() -> None:
    ledger = round_ledger(LARGE, NINE, context=2048)
    machine = Machine(bytes_per_second=1e9, flops_per_second=1e15)
    seconds = {"backbone": Measured(0.25), "round": Measured(0.5)}
    title, header, *lines = ledger_table(ledger, machine=machine, measured=seconds).splitlines()
    assert title == "nine: 9 rows behind 2048 in the cache, counted"
    assert header.split() == ["part", "GFLOP", "MB", "weights", "MB", "values", "modelled", "ms", "measured", "ms"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[: len(PARTS)]}
    assert list(cells) == [*PARTS[:-1], "round"]
    assert cells["LM"] == ["2.3593", "262.14", "0.576", "262.720", "-"]
    assert (cells["backbone"][4], cells["round"][4]) == ("250.000", "500.000")
    assert len({len(line) for line in [header, *lines[: len(PARTS)]]}) == 1
    text = "\n".join(lines)
    assert "18,513 computed, the mask allows 18,455" in text
    assert "9,437,184,000 in projections, 1,152,000 logits: not done" in text
    assert ledger_table(ledger).splitlines()[4].split()[-2:] == ["-", "-"]


# Bundles


@pytest.mark.parametrize("bundle", ["own_heads", "shared_heads"])
def test_a_bundle_tells_the_sizes_of_its_model(request: pytest.FixtureRequest, bundle: str) -> None:
    exported: Exported = request.getfixturevalue(bundle)
    facts = facts_of(exported.engine.manifest)
    config, heads = exported.model.config, exported.heads
    assert (facts.hidden, facts.vocab) == (config.hidden_size, config.vocab_size)
    assert (facts.attention_heads, facts.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    per_layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 40  # q and o; k and v; gate, up and down
    assert facts.layer_weights == 2 * per_layer
    assert facts.parameters == exported.model.num_parameters()
    own = 0 if heads.projection is None else heads.projection.numel()
    assert facts.head_parameters == heads.residual_weight.numel() + heads.residual_bias.numel() + own
    assert facts.weight_bytes == 4 and facts.lm_weight_bytes == 4 * facts.vocab * facts.hidden
    assert facts.layer_weight_bytes == 4 * facts.layer_weights
    assert (facts.depth, facts.fixed_cache_rows) == (exported.engine.limits.depth, 0)
    plan = facts_of(replace(exported.engine.manifest, target=TENSORRT, dtype="float16", weights="float16"))
    assert (
        plan.fixed_cache_rows == exported.engine.limits.cache_rows and plan.lm_weight_bytes == facts.lm_weight_bytes / 2
    )


def test_a_bundle_that_does_not_tell_is_refused(own_heads: Exported) -> None:
    manifest = own_heads.engine.manifest
    with pytest.raises(UserError, match=r"layer_weights") as caught:
        facts_of(replace(manifest, model={"hidden_size": 32, "attention_heads": 4}))
    assert "export the model again" in caught.value.hint
    with pytest.raises(UserError, match="layer_weight_bytes"):
        facts_of(replace(manifest, weights="int4"))
    with pytest.raises(UserError, match="int3"):
        facts_of(replace(manifest, dtype="int3", weights="int3"))
