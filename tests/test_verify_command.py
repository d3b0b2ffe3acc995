"""medusa-verify as a command: its exit status, its text, JSON and page, its prompts, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_checks import check_refused, unchanged
from tampering import Tampered, causal_mask
from tiny_models import Exported

from medusa_engine.exporter.verify_cli import main
from medusa_engine.exporter.verify_prompts import read_prompts
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError

IDS = [[5, 17, 3, 9], [11, 12, 13]]


def arguments(exported: Exported, bundle: Path | None = None, *more: str | Path) -> list[str]:
    engine = exported.bundle if bundle is None else bundle
    fixed = ["--model", exported.checkpoint, "--engine", engine, "--rounds", "4", "--threads", "1"]
    return [str(argument) for argument in (*fixed, *more)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(IDS))
    return path


@pytest.fixture
def faulty(own_heads: Exported, tmp_path: Path) -> Path:
    """A bundle in whose rounds siblings see each other."""
    return Tampered(own_heads.bundle, tmp_path / "faulty").graph(causal_mask).seal()


def test_a_sound_bundle_exits_with_0_and_is_left_as_it_was(
    own_heads: Exported, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unchanged(own_heads.bundle):
        assert main(arguments(own_heads, None, "--prompts", prompts)) == 0
    out = capsys.readouterr().out
    assert out.count("2 prompts, 8 rounds; the same, token for token") == 2
    assert "for each of 2 layers" in out and "checkpoint   " in out


def test_a_fault_exits_with_1_and_is_explained(
    own_heads: Exported, faulty: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(own_heads, faulty, "--prompts", prompts)) == 1
    lines = capsys.readouterr().out.splitlines()
    (where,) = (line for line in lines if line.startswith("  fault"))
    assert "prompt 1 (token ids), round 1, row 2, path [1], position 5" in where
    (both,) = (line for line in lines if line.startswith("  both"))
    assert "checkpoint" in both and "engine" in both
    assert sum(line.startswith("  margin") for line in lines) == 1


def test_json_tells_the_same(
    own_heads: Exported, faulty: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(own_heads, faulty, "--prompts", prompts, "--json")) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["layers"], found["dtype"]) == ("fault", 2, "float32")
    rounds, steps = found["subjects"]
    assert (rounds["verdict"], steps["verdict"]) == ("fault", "same")
    first = rounds["first_divergence"]
    assert {name: first[name] for name in ("prompt", "round", "row", "path", "position", "kind")} == {
        "prompt": 1,
        "round": 1,
        "row": 2,
        "path": [1],
        "position": 5,
        "kind": "logits",
    }
    assert steps["first_divergence"] is None
    assert steps["logits_relative_error_per_layer"] == steps["logits_relative_error"] / 2
    assert found["versions"].keys() == {"medusa-engine", "onnxruntime", "torch", "transformers"}


def test_json_has_null_for_what_is_no_number(
    own_heads: Exported, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(weights: Any) -> None:
        weights[IDS[0][-1]] = np.nan

    bundle = Tampered(own_heads.bundle, tmp_path / "nan").weight("model.model.embed_tokens.weight", spoil).seal()
    page = tmp_path / "report.html"
    assert main(arguments(own_heads, bundle, "--prompts", prompts, "--json", "--report", page)) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["subjects"][0]["logits_relative_error"] is None
    assert " is nan instead of " in page.read_text(encoding="utf-8")


class Page(HTMLParser):
    """The text of a page, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.fetched, self.tags = "", [], []  # type: ignore[var-annotated]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_the_page_tells_the_divergence_and_fetches_nothing(
    own_heads: Exported, faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, report = tmp_path / "texts.json", tmp_path / "report.html"
    prompts.write_text(json.dumps([{"input_ids": IDS[0]}, IDS[1]]))
    assert main(arguments(own_heads, faulty, "--prompts", prompts, "--report", report)) == 1
    source = report.read_text(encoding="utf-8")
    page = Page(source)
    assert page.fetched == [] and "http" not in source and "script" not in page.tags
    assert "FAULT" in page.text and "row 2, path [1], position 5" in page.text
    assert page.tags.count("svg") == 2
    passes = 2 * 2 + 2 * 5  # prompt and first round until the fault; prompt and four steps
    assert page.tags.count("circle") == passes


def test_the_page_escapes_what_it_tells(own_heads: Exported, prompts: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<b>&amp;"
    shutil.copytree(own_heads.bundle, odd)
    report = tmp_path / "report.html"
    assert main(arguments(own_heads, odd, "--prompts", prompts, "--report", report)) == 0
    page = Page(report.read_text(encoding="utf-8"))
    assert str(odd) in page.text and "b" not in page.tags


@pytest.mark.parametrize("as_json", [False, True])
def test_a_disk_that_is_full_costs_neither_the_verdict_nor_the_old_page(
    own_heads: Exported,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    as_json: bool,
) -> None:
    def full(self: Path, *_arguments: object, **_options: object) -> None:
        self.touch()
        os.truncate(self, 0)  # as opening it to write does
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "reports"
    folder.mkdir()
    report = folder / "report.html"
    report.write_text("old")
    for write in ("write_text", "write_bytes"):
        monkeypatch.setattr(Path, write, full)
    extra = ("--json",) if as_json else ()
    assert main(arguments(own_heads, None, "--prompts", prompts, "--report", report, *extra)) == 1
    out, errors = capsys.readouterr()
    assert json.loads(out)["verdict"] == "same" if as_json else "the same, token for token" in out
    assert f"{report}: cannot write: {os.strerror(errno.ENOSPC)}" in errors
    assert report.read_text() == "old" and list(folder.iterdir()) == [report]


# Prompts


def test_prompts_are_lines_or_json(chat_bundle: Path, tmp_path: Path) -> None:
    engine = Engine.open(chat_bundle, threads=1)
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"Hello there\r\n\n  \ntwo\n")
    named = [(prompt.name, prompt.ids) for prompt in read_prompts(lines, engine, chat=False)]
    assert named == [("Hello there", engine.encode("Hello there")), ("two", engine.encode("two"))]
    message = [{"role": "user", "content": "Hello"}]
    document = tmp_path / "prompts.json"
    document.write_text(json.dumps(["Hello", {"text": "Hello", "chat": True}, message, {"messages": message}, [1, 2]]))
    read = [prompt.ids for prompt in read_prompts(document, engine, chat=False)]
    chat = engine.encode(message)  # type: ignore[arg-type]
    assert read == [engine.encode("Hello"), chat, chat, chat, [1, 2]]
    assert next(prompt.ids for prompt in read_prompts(document, engine, chat=True)) == chat
    plain, chatted = (read_prompts(None, engine, chat=own) for own in (False, True))
    assert all(0 < len(prompt.ids) < 64 for prompt in (*plain, *chatted))
    assert [prompt.ids for prompt in plain] != [prompt.ids for prompt in chatted]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "holds no prompts"),
        ("{}", "is not a list of prompts"),
        ("[1]", "entry 0: is 1, not a text, a list of token ids or a list of messages"),
        ('[[1], {"text": "a", "input_ids": [1]}]', "entry 1: an object with text and input_ids, not with one of text,"),
        ("[{}]", "entry 0: an object with other keys, not with one of text,"),
        ("[[1], [272]]", "entry 1"),
        ("[[]]", "entry 0: is an empty list, not"),
        (
            '[{"messages": [{"role": "user"}]}]',
            "is a list with a message without texts as role and content as its entry 1",
        ),
        ('[[{"role": "user", "content": "a"}, "b"]]', 'entry 0: is a list with "b" as its entry 2, not'),
        (json.dumps([[1] * 64]), "has 64 tokens"),
    ],
)
def test_prompts_that_are_none_are_refused(chat_bundle: Path, tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(UserError, match=named) as caught:
        read_prompts(path, Engine.open(chat_bundle, threads=1), chat=False)
    assert str(path) in caught.value.problem


# What is refused


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--rounds", "0", "--rounds is 0"),
        ("--tolerance", "0", "--tolerance is 0"),
        ("--tolerance", "nan", "--tolerance is nan"),
        ("--report", "out.pdf", "out.pdf"),
        ("--report", "no/such/folder/out.html", "out.html"),
        ("--prompts", "no_such_file.txt", "no_such_file.txt"),
        ("--tree", "no_such_tree.json", "no_such_tree.json"),
        ("--plan", "engines/mine.plan", "engines/mine.plan"),
        ("--plan", "/", "a folder, not a plan"),
    ],
)
def test_wrong_options_are_refused_in_two_lines(
    own_heads: Exported, capfd: pytest.CaptureFixture[str], option: str, value: str, named: str
) -> None:
    status = main(arguments(own_heads, None, option, value))
    check_refused(status, capfd.readouterr().err, "medusa-verify", named)


@pytest.mark.parametrize("given", [True, False], ids=["prompts", "own"])
def test_a_chat_with_an_engine_without_tokenizer_is_refused(
    given: bool, own_heads: Exported, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(arguments(own_heads, None, "--chat", *(("--prompts", prompts) if given else ())))
    check_refused(status, capfd.readouterr().err, "medusa-verify", "--chat is given, but the engine has no tokenizer")


def test_a_checkpoint_of_another_shape_is_refused(
    own_heads: Exported, llama_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["--model", str(llama_folder), "--engine", str(own_heads.bundle)])
    error = capfd.readouterr().err
    assert status == 1 and "has 128 tokens in its vocabulary" in error and "exported from" in error


def test_heads_of_another_number_are_refused(
    own_heads: Exported, shared_heads: Exported, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(own_heads, None, "--heads", shared_heads.checkpoint)) == 1
    assert "has 2 heads" in capfd.readouterr().err
