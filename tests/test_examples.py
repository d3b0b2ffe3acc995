"""Every script of examples/ runs as its first lines say."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import pytest
from checkpoints import CHAT_VOCAB, save_llama
from documents import ROOT

EXAMPLES = ROOT / "examples"
TESTED = {"embed_in_10_lines", "streaming_chat", "custom_tree", "train_export_run"}


def run(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    script = EXAMPLES / f"{name}.py"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    runpy.run_path(str(script), run_name="__main__")


def test_every_example_is_tested_and_in_the_readme() -> None:
    assert {path.stem for path in EXAMPLES.iterdir() if path.suffix == ".py"} == TESTED
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(TESTED) if f"(examples/{name}.py)" not in readme] == []


def test_embedding_takes_ten_lines() -> None:
    text = (EXAMPLES / "embed_in_10_lines.py").read_text(encoding="utf-8").partition("\n")[2]  # behind the docstring
    assert len([line for line in text.splitlines() if line]) == 10


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("embed_in_10_lines", ("missing",), "missing"),
        ("custom_tree", ("missing",), "missing"),
        ("streaming_chat", ("missing",), "missing"),
        ("train_export_run", ("model", "README.md"), "README.md"),
    ],
)
def test_a_mistake_ends_an_example_in_two_lines(
    name: str, arguments: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, *arguments, monkeypatch=monkeypatch)
    problem, hint = str(ended.value.code).splitlines()  # which go to standard error, with status 1
    assert problem.startswith(f"{named}: ") and "give" in hint


@pytest.mark.demo
def test_embedded_engine_streams_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("embed_in_10_lines", monkeypatch=monkeypatch)
    assert "River" in capsys.readouterr().out


@pytest.mark.demo
def test_custom_trees_give_the_same_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("custom_tree", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    root, wide, context = [float(line.partition(" tokens per round")[0].split()[-1]) for line in lines]
    assert 1.0 == root < wide < context
    assert all(", the same answer; " in line for line in lines)


def test_chat_keeps_what_earlier_turns_computed(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache of 64 rows holds two turns; a third one is refused."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n" + "c" * 100 + "\n"))
    with pytest.raises(SystemExit, match="but the cache holds 64\nshorten the prompt"):
        run("streaming_chat", chat_bundle, 3, monkeypatch=monkeypatch)
    output = capsys.readouterr()
    first, second = [line for line in output.err.splitlines() if line.endswith("prompt tokens were kept]")]
    assert first.startswith("[0 of ") and not second.startswith("[0 of ")


@pytest.mark.slow
def test_a_model_without_heads_becomes_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_llama(tmp_path / "model", vocab_size=CHAT_VOCAB, tokenizer="bytelevel_bos_twice")
    run("train_export_run", model, tmp_path / "made", 1, monkeypatch=monkeypatch)
    output = capsys.readouterr()
    assert "tokens per round" in output.err
    assert (tmp_path / "made" / "engine" / "manifest.json").is_file() and (tmp_path / "made" / "tree.json").is_file()
