"""medusa-bench reports everything it measured, with sums that are right and answers that are plain decoding's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_run import CHAIN, CHAIN_NAME, CONTEXTS, MAX_NEW_TOKENS, PROMPTS, REPEATS, SWEEP, Benched
from tiny_models import Exported, Rigged

from medusa_engine.benchmarks.answers import ADAPTIVE, OTHER, PLAIN, TREE
from medusa_engine.benchmarks.cli import main
from medusa_engine.runtime.cost import PARTS
from medusa_engine.runtime.lookup import lookup_tokens
from medusa_engine.runtime.tree import Tree, parse_tree

ALL_PROMPTS = [prompt for prompts in PROMPTS.values() for prompt in prompts]
TREES = {"a_tree": parse_tree([[0], [1], [0, 0]], "a_tree"), CHAIN_NAME: parse_tree(CHAIN, CHAIN_NAME)}


def ways(benched: Benched) -> dict[str, dict[str, Any]]:
    return {way["name"]: way for way in benched.document["answers"]["ways"]}


def check_samples(samples: dict[str, Any], count: int) -> None:
    values = samples["values"]
    assert len(values) == count and min(values) > 0
    assert samples["min"] == min(values) and samples["max"] == max(values)
    assert samples["min"] <= samples["median"] <= samples["max"]


def test_prefill_steps_and_rounds_are_timed_at_every_context(benched: Benched) -> None:
    contexts = benched.document["contexts"]
    assert [at["tokens"] for at in contexts] == CONTEXTS
    for at in contexts:
        check_samples(at["prefill"], 3)
        check_samples(at["plain_step"], REPEATS)
        assert list(at["rounds"]) == list(TREES)
        for samples in at["rounds"].values():
            check_samples(samples, REPEATS)


def test_sweep_has_a_tree_of_every_size_and_the_named_ones(benched: Benched) -> None:
    swept = benched.document["sweep"]
    assert swept["context"] == min(CONTEXTS) and (swept["judged_on_prompts"], swept["grown_on_prompts"]) == (3, 2)
    points = swept["points"]
    assert [point["nodes"] for point in points] == [*SWEEP, *(tree.nodes for tree in TREES.values())]
    assert [point["grown"] for point in points] == [True] * len(SWEEP) + [False] * len(TREES)
    for point in points:
        check_samples(point["round"], REPEATS)
        assert point["published_per_round"] == point["tokens"] / point["rounds"]
        assert point["speed_up"] == pytest.approx(point["published_per_round"] / point["overhead"])
        assert point["pays"] == (point["published_per_round"] > point["overhead"])
        assert point["tokens"] == 3 * MAX_NEW_TOKENS
    assert points[0]["published_per_round"] == 1.0
    best = max(points, key=lambda point: point["speed_up"])
    assert swept["optimum"] == best["tree"]
    assert max(point["published_per_round"] for point in points) > 1.5


def test_every_way_answers_every_prompt_as_plain_decoding_does(benched: Benched, rigged_heads: Rigged) -> None:
    found = ways(benched)
    assert [way["kind"] for way in found.values()] == [PLAIN, TREE, TREE, ADAPTIVE, OTHER]
    assert benched.document["exact"] is True
    for way in found.values():
        assert way["differing"] == []
        answers = [answer["token_ids"] for answer in way["answers"]]
        assert answers == [rigged_heads.answer(prompt, MAX_NEW_TOKENS) for prompt in ALL_PROMPTS]


def test_published_tokens_are_those_that_the_heads_allow(benched: Benched, rigged_heads: Rigged) -> None:
    for name, tree in TREES.items():
        way = ways(benched)[name]
        published = [answer["published"] for answer in way["answers"]]
        assert published == [rigged_heads.published_per_round(prompt, tree, MAX_NEW_TOKENS) for prompt in ALL_PROMPTS]
        together = [count for counts in published for count in counts]
        assert way["rounds"] == len(together) and way["tokens"] == sum(together) == 5 * MAX_NEW_TOKENS
        assert way["published_per_round"] == pytest.approx(sum(together) / len(together))
        shares = {int(count): share for count, share in way["distribution"].items()}
        assert shares == {count: pytest.approx(many / len(together)) for count, many in Counter(together).items()}
        assert sum(shares.values()) == pytest.approx(1)
        assert way["rounds_per_tree"] == {name: len(together)}
        assert way["depth_rates"][0] == pytest.approx(sum(count > 1 for count in together) / len(together))
        percentiles = way["percentiles"]
        assert 0 < percentiles["p50"] <= percentiles["p95"] <= percentiles["p99"]


def test_other_runtimes_time_every_token_but_the_first(benched: Benched) -> None:
    way = ways(benched)["transformers"]
    assert way["version"] == benched.document["versions"]["transformers"]
    for answer in way["answers"]:
        assert answer["timed_tokens"] == len(answer["round_seconds"]) == MAX_NEW_TOKENS - 1
        assert answer["seconds"] == pytest.approx(sum(answer["round_seconds"]))


def test_categories_add_up(benched: Benched) -> None:
    for way in ways(benched).values():
        assert list(way["categories"]) == list(PROMPTS)
        for total in ("tokens", "rounds"):
            assert sum(part[total] for part in way["categories"].values()) == way[total]
        assert sum(part["seconds"] for part in way["categories"].values()) == pytest.approx(way["seconds"])


def test_hit_rates_are_those_of_the_rigged_heads(benched: Benched, rigged_heads: Rigged) -> None:
    heads = benched.document["heads"]
    for head, rates in enumerate(heads["hit_rates"]):
        counts: Counter[int] = Counter()
        for prompt in ALL_PROMPTS:
            read = [prompt[-1], *rigged_heads.answer(prompt, MAX_NEW_TOKENS - 1)]
            counts.update(int(rigged_heads.correct_rank[token, head]) for token in read)
        assert heads["positions"][head] == 5 * MAX_NEW_TOKENS
        assert rates[:2] == [pytest.approx(counts[rank] / (5 * MAX_NEW_TOKENS)) for rank in range(2)]
        assert sum(rates) <= 1 + 1e-9


def test_lookup_rates_are_those_of_the_reference(benched: Benched, rigged_heads: Rigged) -> None:
    depth, right, counted = 4, Counter[int](), 0
    for prompt in ALL_PROMPTS:
        tokens = [*prompt, *rigged_heads.answer(prompt, MAX_NEW_TOKENS + depth)]
        for end in range(len(prompt) + 1, len(prompt) + MAX_NEW_TOKENS + 1):
            wrong = np.flatnonzero(lookup_tokens(tokens[:end], depth) != tokens[end : end + depth])
            right.update(range(1, 1 + int(wrong[0] if len(wrong) else depth)))
            counted += 1
    *_, every = benched.document["lookup"]
    assert (every["key"], every["found"]) == (None, 1)
    assert every["right"] == [pytest.approx(right[step] / counted) for step in range(1, depth + 1)]
    assert [row["key"] for row in benched.document["lookup"]] == [3, 2, 1, 0, None]
    assert sum(row["found"] for row in benched.document["lookup"][:-1]) == pytest.approx(1)


def test_an_engine_without_heads_is_measured_too(no_heads: Exported, tmp_path: Path, capsys: Any) -> None:
    prompts, deep = tmp_path / "prompts.json", tmp_path / "deep.json"
    prompts.write_text(json.dumps([[5, 6, 7, 8, 5, 6, 7, 8, 5], [7, 7, 7]]))
    deep.write_text(json.dumps([["L"] * length for length in range(1, 5)]))
    options = ["--engine", no_heads.bundle, "--prompts", prompts, "--context", "4", "--repeats", "1", "--tree", deep]
    options += ["--max-new-tokens", "12", "--threads", "1", "--ledger"]
    options += ["--json", tmp_path / "out.json", "--report", tmp_path / "out.html"]
    assert main(list(map(str, options))) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["exact"] and document["heads"]["hit_rates"] == []
    assert [point["nodes"] for point in document["sweep"]["points"]] == [1, 2, 4, 4, 5]
    assert max(point["published_per_round"] for point in document["sweep"]["points"]) > 1
    told = capsys.readouterr().out
    assert "lookup: share of the positions" in told and "heads: share" not in told
    page = (tmp_path / "out.html").read_text()
    assert "<h2>Lookup</h2>" in page and "<h2>Heads</h2>" not in page
    ways = {way["name"]: way for way in document["answers"]["ways"]}
    assert set(ways) == {"plain steps", "lookup", "deep", "adaptive"}


def test_acceptance_by_node_adds_up_to_the_tokens_per_round(benched: Benched) -> None:
    for name, tree in TREES.items():
        shares = {tuple(node["path"]): node["share"] for node in benched.document["heads"]["accepted"][name]}
        assert tuple(shares) == tree.paths
        assert 1 + sum(shares.values()) == pytest.approx(ways(benched)[name]["published_per_round"])
        assert all(share <= shares.get(path[:-1], 1.0) for path, share in shares.items())


def test_stages_of_steps_and_rounds_are_reported(benched: Benched) -> None:
    stages = benched.document["stages"]
    assert [times["pass"] for times in stages] == ["plain step", *TREES]
    for times in stages:
        assert len(times["passes"]) == REPEATS
        assert sum(times["shares"].values()) == pytest.approx(1)
        assert sum(map(sum, times["stages"].values())) == pytest.approx(sum(times["passes"]))


def test_costs_keep_counted_measured_and_modelled_apart(benched: Benched) -> None:
    costs = benched.document["costs"]
    assert costs["measured"]["bytes_per_second"] == 1e9 * costs["measured"]["memory_reads"]["max"]
    assert costs["measured"]["flops_per_second"] == 1e9 * costs["measured"]["matrix_products"]["max"]
    assert [ledger["counted"]["rows"] for ledger in costs["ledgers"]] == [1, 4, 5]
    assert [ledger["counted"]["context"] for ledger in costs["ledgers"]] == [min(CONTEXTS)] * 3
    for ledger, times in zip(costs["ledgers"], benched.document["stages"], strict=True):
        measured = ledger["measured_seconds"]
        counted = {part["name"] for part in ledger["counted"]["parts"]}
        assert counted == set(PARTS) and set(measured) == {*counted, "round"} - {"lookup"}
        assert max(measured.values()) == measured["round"] <= max(times["passes"]) / 1000
    assert list(costs["modelled_round_milliseconds"]) == ["1", "2", "4", "5", "8", "16"]
    header = next(line for line in benched.text.splitlines() if "T(N)/T(1)" in line and "speed-up" in line)
    assert header.index("T(N) ms") < header.index("modelled ms")


def test_machine_versions_and_settings_are_recorded(benched: Benched) -> None:
    document = benched.document
    assert document["format"] == "medusa-bench"
    assert document["machine"]["cores"] >= 1 and document["machine"]["processor"]
    assert {"medusa-engine", "numpy", "onnxruntime", "torch", "transformers"} <= set(document["versions"])
    assert document["settings"]["threads"] == 1 and document["settings"]["contexts"] == CONTEXTS
    assert document["manifest"]["name"] == "bundle" and document["load_seconds"] > 0


def test_text_has_every_part(benched: Benched) -> None:
    for part in (
        "context 4: 2 samples, median (minimum to maximum)",
        "plain step T(1)",
        "<- optimum",
        "LM projection",
        "p99 ms",
        "odd <&> category",
        "together",
        "head 3",
        "accepted at depth",
        "resident parameters",
        "memory reads",
        "exact: each of 5 answers in 3 ways is token for token that of plain steps",
    ):
        assert part in benched.text, part
    assert benched.text.count("<- optimum") == 1
    assert benched.errors == ""  # no bars where there is no terminal, no warnings of libraries


def test_pictures_are_written_as_svg_and_png(benched: Benched) -> None:
    names = ["hit_rates", "published", "roofline", "speed_up", "stages", "tree_0", "tree_1"]
    assert sorted(path.name for path in benched.figures.iterdir()) == sorted(
        f"{name}{suffix}" for name in names for suffix in (".svg", ".png")
    )
    for path in benched.figures.iterdir():
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in start or b"<?xml" in start


def test_a_wrong_answer_is_told_and_gives_exit_status_1(
    rigged_64: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from medusa_engine.benchmarks import answers

    decode = answers.Way.decode

    def wrong(way: answers.Way, engine: Any, prompt: Any, tokens: int) -> answers.Answered:
        done = decode(way, engine, prompt, tokens)
        if way.kind == TREE and prompt.ids == [7]:
            done.token_ids[3] ^= 1
        return done

    monkeypatch.setattr(answers.Way, "decode", wrong)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[1, 2], [7]]))
    options = ["--engine", rigged_64.bundle, "--prompts", prompts, "--context", "4", "--sweep", "1", "--repeats", "1"]
    options += ["--max-new-tokens", "6", "--threads", "1", "--json", tmp_path / "out.json"]
    assert main(list(map(str, options))) == 1
    assert "NOT EXACT: a_tree: 1 of 2 answers are not those of plain steps; the first is prompt 2 from token 4 on" in (
        capsys.readouterr().out
    )
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["exact"] is False and document["costs"] is None


def test_plain_run_needs_no_torch(rigged_64: Exported, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[1, 2]]")
    code = (
        "import sys\n"
        "from medusa_engine.benchmarks.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "print('loaded:', [name for name in ('torch', 'transformers', 'llama_cpp') if name in sys.modules])\n"
        "sys.exit(status)\n"
    )
    options = ["--engine", rigged_64.bundle, "--prompts", prompts, "--context", "4", "--sweep", "1", "--repeats", "1"]
    options += ["--max-new-tokens", "4", "--threads", "1", "--report", tmp_path / "out.html"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, options)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
    assert (tmp_path / "out.html").is_file()


def test_help_names_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for part in ("64,256,1024", "1,2,4,8,16,32,64", "default: 25", "default: 64", "{transformers,llama-cpp}"):
        assert part in told


def test_trees_of_one_name_are_told_apart(rigged_64: Exported, tmp_path: Path) -> None:
    from medusa_engine.benchmarks.settings import BenchSettings, named_trees

    same, other = tmp_path / "a_tree.json", tmp_path / "b.json"
    same.write_text("[[0], [1], [0, 0]]")
    other.write_text('{"paths": [[0]], "name": "a_tree"}')
    trees = named_trees(BenchSettings(rigged_64.bundle, trees=(same, other)), rigged_64.engine)
    assert trees == [rigged_64.engine.tree, Tree(((0,),), "a_tree (2)")]


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_shown_on_a_terminal_alone(terminal: bool) -> None:
    code = (
        "import io, os, sys\n"
        "os.environ['TQDM_DISABLE'] = '1'  # as the command sets it, for the bars of libraries\n"
        "from medusa_engine.benchmarks.cli import _steps\n"
        "stderr = sys.stderr = io.StringIO()\n"
        f"stderr.isatty = lambda: {terminal}\n"
        "with _steps('answers', 3) as step:\n"
        "    for _ in range(3):\n"
        "        step()\n"
        "print(repr(stderr.getvalue()))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert ("answers" in shown and "/3" in shown) == terminal
    assert (shown.strip() == "''") == (not terminal)
