"""medusa-run refuses prompts, numbers and trees that the engine cannot use, in two lines and without a traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import DATA, TREES, write_tree
from command_checks import RUN, Commands, check_refused, unchanged
from tiny_models import Exported

EXPECTED_TREES = json.loads((TREES / "EXPECTED.json").read_text())
REFUSED_TREES = sorted(name for name, facts in EXPECTED_TREES.items() if facts["verdict"] != "accept")
# What the first line names, where EXPECTED.json says it in other words or leaves the choice.
NAMED_IN_TREES = {
    "bad_deeper_than_2heads": ("depth 3", "2 heads"),
    "bad_huge_rank": ("rank", "does not fit"),
    "bad_object_unknown_key": ("unknown top-level key", "choices_v9"),
    "bad_scalar_entry": ("entry 0", "not a list"),
    "bad_trailing_comma": ("line 1", "column 10"),
    "dup_path": ("[0]", "twice"),
    "leaf_only_compact": ("prefix [0]", "missing"),
}


def give_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.fixture
def ids_bundle(shared_heads: Exported) -> Path:
    """A bundle without tokenizer: two heads, 4 ranks, 16 nodes, a cache of 100 rows, 61 tokens."""
    return shared_heads.bundle


def test_bundle_without_tokenizer_answers_ids_with_ids(ids_bundle: Path, commands: Commands) -> None:
    answer = json.loads(commands.run("--engine", ids_bundle, "--prompt-ids", " 1, 2 ,3", "--json"))
    assert answer["text"] is None
    printed = commands.run("--engine", ids_bundle, "--prompt-ids", "1,2,3")
    assert [int(token) for token in printed.split()] == answer["token_ids"]


@pytest.mark.parametrize("options", [("--prompt", "hello"), ("--prompt", "hello", "--chat")], ids=["plain", "chat"])
def test_text_for_a_bundle_without_tokenizer(options: tuple[str, ...], ids_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", ids_bundle, *options, named=["no tokenizer"])


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ("", '""'),
        (",", '""'),
        ("1,,2", '""'),
        ("1,2,", '""'),
        ("one", '"one"'),
        ("1 2", '"1 2"'),
        ("1.0", '"1.0"'),
        ("0x10", '"0x10"'),
        ("-1", '"-1"'),
        ("1,-2", '"-2"'),
        ("²", "b2"),
        ("٣", "u0663"),
        ("1\n2", "1\\n2"),
        ("9" * 5000, "9999"),
        ("[1,2]", '"[1"'),
    ],
)
def test_prompt_ids_that_are_no_ids(ids: str, named: str, ids_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", ids_bundle, f"--prompt-ids={ids}", named=["--prompt-ids", named])


@pytest.mark.parametrize("token", [61, 1 << 40])
def test_prompt_id_outside_the_vocabulary(token: int, ids_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", ids_bundle, "--prompt-ids", f"1,{token}", named=[f"token {token}", "61 tokens"])


@pytest.mark.parametrize("plain", [(), ("--no-speculation",)], ids=["rounds", "steps"])
def test_prompt_longer_than_the_cache(plain: tuple[str, ...], ids_bundle: Path, commands: Commands) -> None:
    prompt = ",".join(["1"] * 101)
    commands.run_refuses("--engine", ids_bundle, "--prompt-ids", prompt, *plain, named=["101 tokens", "holds 100"])


def test_text_prompt_longer_than_the_cache(plain_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", plain_bundle, "--prompt", "hello " * 100, named=["tokens", "holds 64"])


@pytest.mark.parametrize("options", [(), ("--prompt", ""), ("--prompt-file", DATA / "prompts" / "empty.txt")])
@pytest.mark.parametrize("plain", [(), ("--no-speculation",)], ids=["rounds", "steps"])
def test_empty_prompt(
    options: tuple[str, ...],
    plain: tuple[str, ...],
    plain_bundle: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_input(monkeypatch, b"")
    commands.run_refuses("--engine", plain_bundle, *options, *plain, named=["prompt is empty"])


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("hello\n", "hello"),
        ("hello\r\n", "hello"),
        ("hello\n\n", "hello\n"),
        ("hello\r", "hello\r"),
        ("a\nb ", "a\nb "),
    ],
)
@pytest.mark.parametrize("source", ["file", "input"])
def test_one_newline_behind_a_prompt_does_not_belong_to_it(
    given: str,
    prompt: str,
    source: str,
    plain_bundle: Path,
    tmp_path: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = ("--engine", plain_bundle, "--max-new-tokens", "0", "--json")
    expected = json.loads(commands.run(*ask, "--prompt", prompt))["prompt_tokens"]
    file = tmp_path / "prompt.txt"
    file.write_bytes(given.encode())
    give_input(monkeypatch, given.encode())
    options = ("--prompt-file", file) if source == "file" else ()
    assert json.loads(commands.run(*ask, *options))["prompt_tokens"] == expected


def test_empty_prompt_starts_from_bos_where_the_tokenizer_adds_it(chat_bundle: Path, commands: Commands) -> None:
    answer = json.loads(commands.run("--engine", chat_bundle, "--prompt", "", "--max-new-tokens", "2", "--json"))
    assert answer["prompt_tokens"] == 1


def test_prompt_file_that_is_not_utf8(plain_bundle: Path, commands: Commands) -> None:
    file = DATA / "prompts" / "invalid_utf8.bin"
    commands.run_refuses("--engine", plain_bundle, "--prompt-file", file, named=[file, "UTF-8", "offset"])


def test_standard_input_that_is_not_utf8(
    plain_bundle: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_input(monkeypatch, b"hello \xff")
    commands.run_refuses("--engine", plain_bundle, named=["standard input", "byte 6", "UTF-8"])


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_prompt_file_that_cannot_be_read(name: str, plain_bundle: Path, tmp_path: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", plain_bundle, "--prompt-file", tmp_path / name, named=[tmp_path / name])


def test_prompt_argument_that_is_not_utf8(plain_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", plain_bundle, "--prompt", "hello \udcff", named=["prompt text", "character 6"])


def test_standard_input_that_is_closed(plain_bundle: Path) -> None:
    command = ["sh", "-c", '"$@" <&-', "sh", *RUN, "--engine", str(plain_bundle)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    check_refused(ended.returncode, ended.stderr, "medusa-run", "standard input", "closed")


def test_standard_input_that_cannot_be_read(plain_bundle: Path) -> None:
    command = ["sh", "-c", '"$@" 0>/dev/null', "sh", *RUN, "--engine", str(plain_bundle)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    check_refused(ended.returncode, ended.stderr, "medusa-run", "standard input", "cannot read")


def test_chat_without_a_template(plain_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", plain_bundle, "--chat", "--prompt", "hello", named=[plain_bundle, "chat template"])


def test_chat_with_an_empty_message(chat_bundle: Path, commands: Commands) -> None:
    commands.run_refuses("--engine", chat_bundle, "--chat", "--prompt", "", named=["the message is empty"])


def test_chat_that_the_template_refuses(chat_bundle: Path, commands: Commands) -> None:
    options = ("--chat", "--system", "Be brief.", "--prompt", "hello")
    commands.run_refuses("--engine", chat_bundle, *options, named=["chat template", "refuses"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--max-new-tokens", "-1"), ("--max-new-tokens is -1",)),
        (("--threads", "-1"), ("--threads is -1",)),
        (("--threads", "1099511627776"), ("--threads is 1099511627776",)),
        (("--deadline-ms", "0"), ("--deadline-ms is 0.0",)),
        (("--acceptance", "sample", "--top-p", "0"), ("--top-p is 0.0",)),
        (("--system", "Be brief."), ("--system", "--chat")),
        (("--tree", "tree.json", "--no-speculation"), ("--tree", "--no-speculation")),
        (("--chat",), ("--chat", "--prompt-ids")),
        (("--compare", "--no-speculation"), ("--compare", "--no-speculation")),
        (("--compare", "--max-new-tokens", "0"), ("--compare", "--max-new-tokens 0")),
    ],
    ids=["tokens", "threads", "too many threads", "deadline", "top-p", "system", "tree", "chat", "compare", "nothing"],
)
def test_option_that_makes_no_sense(
    options: tuple[str, ...], named: tuple[str, ...], ids_bundle: Path, commands: Commands
) -> None:
    commands.run_refuses("--engine", ids_bundle, "--prompt-ids", "1,2", *options, named=named)


@pytest.mark.parametrize("name", REFUSED_TREES)
def test_tree_file_that_is_no_tree(name: str, ids_bundle: Path, commands: Commands) -> None:
    tree = TREES / f"{name}.json"
    named = NAMED_IN_TREES.get(name) or (EXPECTED_TREES[name]["error_must_name"],)
    source = name if name == "bad_deeper_than_2heads" else tree  # the file is a tree, which this engine cannot run
    with unchanged(ids_bundle):
        commands.run_refuses("--engine", ids_bundle, "--prompt-ids", "1,2", "--tree", tree, named=[source, *named])


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"null", b"{}", b"[" * 100_000, b" " * (1 << 21)])
def test_tree_file_that_is_no_json(content: bytes, ids_bundle: Path, tmp_path: Path, commands: Commands) -> None:
    tree = tmp_path / "tree.json"
    tree.write_bytes(content)
    commands.run_refuses("--engine", ids_bundle, "--prompt-ids", "1,2", "--tree", tree, named=[tree])


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_tree_file_that_cannot_be_read(name: str, ids_bundle: Path, tmp_path: Path, commands: Commands) -> None:
    tree = tmp_path / name
    commands.run_refuses("--engine", ids_bundle, "--prompt-ids", "1,2", "--tree", tree, named=[tree, "cannot read"])


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ([[0], [0, 0], [0, 0, 0]], ("depth 3", "2 heads")),
        ([[4]], ("rank 4", "ranks 0 to 3")),
        ([[rank] for rank in range(4)] + [[i, j] for i in range(4) for j in range(4)], ("21 nodes", "allows 16")),
    ],
    ids=["depth", "rank", "nodes"],
)
def test_tree_beyond_the_engine(
    paths: list[list[int]], named: tuple[str, ...], ids_bundle: Path, tmp_path: Path, commands: Commands
) -> None:
    tree = write_tree(tmp_path / "beyond.json", paths)
    commands.run_refuses("--engine", ids_bundle, "--prompt-ids", "1,2", "--tree", tree, named=["tree beyond", *named])
