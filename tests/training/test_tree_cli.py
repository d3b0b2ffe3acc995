"""medusa-tree from the command line: what it writes, what it says, and what it refuses in two lines."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import document_sha256, file_sha256
from medusa_engine.runtime.tree import load_tree
from medusa_engine.training import tree_search
from medusa_engine.training.calibration import Answer, load_calibration
from medusa_engine.training.tree_cli import main
from medusa_engine.training.tree_search import MISS, joint_mass, marginal_mass, rank_mass, replay
from medusa_engine.training.tree_settings import COUNTS

ROOT = Path(__file__).resolve().parents[2]
CASES = DATA / "trees"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CASES / "EXPECTED.json").read_text())
BAD_TREES = sorted(name for name in EXPECTED if name.startswith("bad_") and name != "bad_deeper_than_2heads")

Refuses = Callable[..., None]
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def repetitive(calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibration with answers that say everything twice, then something else; heads know the latter alone."""
    path = tmp_path_factory.mktemp("repetitive") / "c.json"
    whole = load_calibration(calibration)
    tokens = [*range(20), *range(20), *range(30, 40)]
    ranks = np.full((len(tokens), 2), MISS)
    ranks[39::2, 0] = 0
    answers = [Answer([50, 51 + index], ranks, tokens) for index in range(6)]
    dataclasses.replace(whole, answers=answers).save(path)
    return path


def test_calibrate_writes_counts_and_hashes(chat_bundle: Path, prompts: Path, tmp_path: Path, tree_run: Run) -> None:
    output = tmp_path / "c.json"
    arguments = ["--engine", chat_bundle, "--prompts", prompts, "-o", output, "--chat", "--max-new-tokens", 6]
    out, err = tree_run("calibrate", *arguments)
    assert out == f"{output}\n"
    lines = err.splitlines()
    assert lines[0].startswith("1/6 answers, ") and lines[5].startswith("6/6 answers, ")
    assert all(line.startswith("lookup") for line in lines[6:]) and len(lines) > 6
    manifest = json.loads((chat_bundle / "manifest.json").read_text())
    document = json.loads(output.read_text())
    provenance = document["provenance"]
    assert provenance["model"] == manifest["model"] and provenance["model"]["weights_sha256"]
    assert provenance["heads"] == manifest["heads"]
    assert provenance["prompts_sha256"] == file_sha256(prompts)
    assert provenance["tokenizer_sha256"] == file_sha256(chat_bundle / "tokenizer.json")
    template = chat_bundle / "chat_template.jinja"
    holder = template if template.exists() else chat_bundle / "tokenizer_config.json"
    assert provenance["template_sha256"] == file_sha256(holder)
    assert provenance["policy"] == {"acceptance": "greedy", "chat": True, "max_new_tokens": 6}
    assert provenance["policy_sha256"] == document_sha256(provenance["policy"])
    engine = Engine.open(chat_bundle, threads=1)
    lines = ["hello", "world, hello", "low", "lower", "hello hello", "well"]
    asked = [engine.encode([{"role": "user", "content": line}]) for line in lines]
    assert [answer["prompt_ids"] for answer in document["answers"]] == asked
    counts = np.array(document["counts"])
    assert counts.shape == (2, 4) and (counts.sum(axis=1) <= document["positions"]).all()
    load_calibration(output)


def test_bundle_without_template_has_no_template_hash(
    plain_bundle: Path, prompts: Path, tmp_path: Path, tree_run: Run, tree_refuses: Refuses
) -> None:
    arguments = ["--engine", plain_bundle, "--prompts", prompts, "--max-new-tokens", 2, "-o"]
    tree_run("calibrate", *arguments, tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["provenance"]["template_sha256"] is None
    tree_refuses("calibrate", *arguments, tmp_path / "d.json", "--chat", named=["no chat template"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", ["holds no prompts"]),
        (b"\n \r\n\t\n", ["holds no prompts"]),
        (b"\xff\xfe", ["UTF-8"]),
        (b"ok\n\n" + b"hello " * 60, ["line 3", "63"]),
        (None, ["cannot read"]),
    ],
)
def test_prompts_that_cannot_be_used(
    chat_bundle: Path, tmp_path: Path, tree_refuses: Refuses, text: bytes | None, named: list[str]
) -> None:
    path = tmp_path / "prompts.txt"
    if text is not None:
        path.write_bytes(text)
    tree_refuses(
        "calibrate", "--engine", chat_bundle, "--prompts", path, "-o", tmp_path / "c.json", named=[path, *named]
    )


def test_options_of_calibrate_that_cannot_be_used(
    chat_bundle: Path, prompts: Path, tmp_path: Path, tree_refuses: Refuses
) -> None:
    output = tmp_path / "c.json"

    def check(named: list[object], **changes: object) -> None:
        options = {"engine": chat_bundle, "prompts": prompts, "output": output} | changes
        arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
        tree_refuses("calibrate", *arguments, named=named)

    check(["--max-new-tokens is 0"], max_new_tokens=0)
    check(["threads is -1"], threads=-1)
    check([tmp_path / "none", "no such folder"], engine=tmp_path / "none")
    check([tmp_path / "none" / "c.json", "folder does not exist"], output=tmp_path / "none" / "c.json")
    check([tmp_path, "is a folder"], output=tmp_path)


def test_search_writes_the_best_tree_of_that_many_nodes(calibration: Path, tmp_path: Path, tree_run: Run) -> None:
    ranks = load_calibration(calibration).ranks
    masses = {"joint": joint_mass(ranks), "marginal": marginal_mass(rank_mass(ranks, 4))}
    for counts, mass in masses.items():
        output = tmp_path / f"{counts}.json"
        out, err = tree_run("search", calibration, "--nodes", 4, "--counts", counts, "--no-lookup", "-o", output)
        tree = load_tree(output)
        assert out == f"{output}\n" and f"{counts} counts" in err and tree.name == counts
        assert tree.paths == tree_search.best_first(mass, nodes=4, heads=2, topk=4).paths
        assert tree.metadata["probabilities"] == [mass(path) for path in tree.paths]
        assert tree.metadata["metadata"]["counts"] == counts  # type: ignore[index]


def test_searched_tree_has_the_lookup_nodes_that_the_engine_offers(
    repetitive: Path, calibration: Path, tmp_path: Path, tree_run: Run, tree_refuses: Refuses
) -> None:
    output = tmp_path / "t.json"
    for options, most in (([], 2), (["--no-lookup"], 0), (["--lookup-depth", 1], 1), (["--lookup-depth", 9], 9)):
        tree_run("search", repetitive, "--nodes", 8, *options, "-o", output)
        tree = load_tree(output)
        assert tree.lookup == most if most < 9 else tree.lookup > 2
        facts = json.loads(output.read_text())
        expected = np.mean(replay(tree, load_calibration(repetitive).sequences))
        if most:
            assert facts["metadata"]["expected_published"] == pytest.approx(expected)
            assert 1 + sum(facts["probabilities"]) == pytest.approx(expected)
            gains = facts["metadata"]["selected_in_order"]
            assert [entry for entry, _ in gains[: tree.lookup]] == [["L"] * (d + 1) for d in range(tree.lookup)]
            assert 1 + sum(gain for _, gain in gains) == pytest.approx(expected)
            drawn, _ = tree_run("show", output, "--calibration", repetitive)
            assert drawn == tree_run("show", output)[0] and f"E[G] {expected:.2f}" in drawn and "L  " in drawn
    search = ["search", repetitive, "-o", tmp_path / "u.json"]
    tree_refuses(*search, "--nodes", 4, "--lookup-depth", 0, named=["--lookup-depth is 0"])
    tree_refuses(*search, "--nodes", 4, "--lookup-depth", 65, named=["--lookup-depth is 65"])


def test_lookup_needs_a_calibration_and_an_engine_that_have_it(
    repetitive: Path, chat_bundle: Path, tmp_path: Path, tree_run: Run, tree_refuses: Refuses
) -> None:
    old, output, chain = tmp_path / "old.json", tmp_path / "t.json", tmp_path / "chain.json"
    document = json.loads(repetitive.read_text())
    del document["lookup"]
    old.write_text(json.dumps(document))
    chain.write_text('[["L"]]')
    tree_refuses("search", old, "--nodes", 4, "--lookup-depth", 2, "-o", output, named=[old, "without lookup"])
    tree_refuses("show", chain, "--calibration", old, named=["chain", "without lookup"])
    _, err = tree_run("search", old, "--nodes", 4, "-o", output)
    assert f"{old} was written without lookup" in err and load_tree(output).lookup == 0
    assert "without lookup" not in tree_run("search", old, "--nodes", 4, "--no-lookup", "-o", output)[1]
    engine = ["--for-engine", chat_bundle, "--lookup-depth", 3, "-o", output]
    tree_refuses("search", repetitive, *engine, named=["--lookup-depth is 3", chat_bundle, "offers 2"])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("smollm2_lookup", ["calibration.json", "--nodes", 8]),
        ("smollm2_lookup_long", ["calibration_grounded.json", "--nodes", 10, "--lookup-depth", 16]),
    ],
)
def test_shipped_lookup_trees_are_what_the_shipped_calibrations_give(
    name: str, arguments: list[object], tmp_path: Path, tree_run: Run
) -> None:
    output = tmp_path / f"{name}.json"
    tree_run("search", ROOT / "heads" / "smollm2-135m-instruct" / str(arguments[0]), *arguments[1:], "-o", output)
    assert json.loads(output.read_text()) == json.loads((ROOT / "trees" / f"{name}.json").read_text())


@pytest.mark.parametrize("nodes", [8, 64])
def test_shipped_trees_of_heads_have_the_paths_that_the_shipped_calibration_gives(
    nodes: int, tmp_path: Path, tree_run: Run
) -> None:
    calibration = ROOT / "heads" / "smollm2-135m-instruct" / "calibration.json"
    tree_run("search", calibration, "--no-lookup", "--nodes", nodes, "-o", tmp_path / "t.json")
    assert load_tree(tmp_path / "t.json").paths == load_tree(ROOT / "trees" / f"smollm2_{nodes}.json").paths


def test_search_says_which_counts_it_uses(calibration: Path, tmp_path: Path, tree_run: Run) -> None:
    output = tmp_path / "t.json"
    _, err = tree_run("search", calibration, "--nodes", 4, "-o", output)
    used = json.loads(output.read_text())["metadata"]["counts"]
    assert used in COUNTS and f"{used} counts: E[G]" in err
    for counts in COUNTS:
        assert any(line.startswith(f"{counts} counts of 3 answers predict E[G]") for line in err.splitlines())


def test_searched_tree_runs_on_the_engine_it_was_searched_for(
    chat_bundle: Path, calibration: Path, tmp_path: Path, tree_run: Run
) -> None:
    output = tmp_path / "t.json"
    out, err = tree_run("search", calibration, "--for-engine", chat_bundle, "--threads", 1, "-o", output)
    assert out == f"{output}\n"
    for said in ("plain step", "chosen: ", "of 2 heads", "predicted: E[G]", "measured:  E[G]", "on 1 other prompt"):
        assert said in err
    engine = Engine.open(chat_bundle, threads=1)
    tree = load_tree(output)
    assert engine.generate("hello", tree=tree, max_new_tokens=5).token_ids == (
        engine.generate("hello", speculation=False, max_new_tokens=5).token_ids
    )
    facts = json.loads(output.read_text())["metadata"]
    assert facts["nodes"] == tree.nodes and facts["heads"] == tree.depth
    assert facts["speculation_pays"] == (tree.nodes > 1)


@pytest.mark.parametrize(("nodes", "named"), [(0, "--nodes is 0"), (-1, "--nodes is -1"), (9, "trees of 8 nodes")])
def test_nodes_that_no_tree_has(
    calibration: Path, tmp_path: Path, tree_refuses: Refuses, nodes: int, named: str
) -> None:
    tree_refuses("search", calibration, "--nodes", nodes, "-o", tmp_path / "t.json", named=[named])


def test_calibration_that_cannot_be_used(calibration: Path, tmp_path: Path, tree_refuses: Refuses) -> None:
    def check(path: Path, *named: object) -> None:
        tree_refuses("search", path, "--nodes", 4, "-o", tmp_path / "t.json", named=[path, *named])

    check(tmp_path / "none.json", "cannot read")
    check(tmp_path, "cannot read")
    whole = calibration.read_bytes()
    for name, data in {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "binary": b"\x80\x02",
        "list": b"[]",
        "tree": b'{"paths": [[0]]}',
    }.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(data)
        check(path)


def test_calibration_of_another_engine_is_refused(
    calibration: Path, chat_bundle: Path, tmp_path: Path, tree_refuses: Refuses
) -> None:
    bundle = Path(shutil.copytree(chat_bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text())

    def check(named: str, **changes: dict[str, object]) -> None:
        changed = manifest | {name: manifest[name] | part for name, part in changes.items()}
        del changed["sha256"]
        changed["sha256"] = document_sha256(changed)
        (bundle / "manifest.json").write_text(json.dumps(changed))
        tree_refuses(
            "search", calibration, "--for-engine", bundle, "-o", tmp_path / "t.json", named=[calibration, named]
        )

    check("another model", model={"weights_sha256": {"model.safetensors": "0" * 64}})
    check("other heads", heads={"sha256": {"medusa_lm_head.safetensors": "0" * 64}})
    check("4 ranks per head, but the engine keeps 3", limits={"topk": 3})
    check("2 heads, but the engine has 1", limits={"heads": 1})


def test_other_options_of_search_that_cannot_be_used(
    calibration: Path, chat_bundle: Path, tmp_path: Path, tree_refuses: Refuses
) -> None:
    engine = ["search", calibration, "--for-engine", chat_bundle, "-o"]
    tree_refuses(*engine, tmp_path / "t.json", "--measure", -1, named=["--measure is -1"])
    tree_refuses(*engine, tmp_path / "t.json", "--threads", 5000, named=["--threads is 5000"])
    tree_refuses(*engine, tmp_path / "none" / "t.json", named=[tmp_path / "none" / "t.json", "folder does not exist"])
    tree_refuses("search", calibration, "--for-engine", calibration, "-o", tmp_path / "t.json", named=["not a bundle"])
    with pytest.raises(SystemExit) as usage:
        main(["search", str(calibration), "-o", str(tmp_path / "t.json")])
    assert usage.value.code == 2
