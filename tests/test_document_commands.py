"""What the documents tell people to type exists: commands parse, options are those of a command, imports are there."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from documents import DOCUMENTS, name_of

from medusa_engine.runtime.policy_options import add_policy_options

SCRIPTS = {
    script.name: script.module
    for script in importlib.metadata.distribution("medusa-engine").entry_points
    if script.group == "console_scripts"
}
FOREIGN = {"--bundle-8192"}  # of benchmarks/bench_overheads.py


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = importlib.import_module(SCRIPTS[command]).build_parser()
    return parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every option, those of its subcommands included."""
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for choice in action.choices.values() for option in options_of(choice)}
    return found


def blocks(text: str) -> Iterator[str]:
    """The lines of code blocks, fenced or indented, with continued lines joined and comments dropped."""
    fenced = False
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield re.sub(r"\s#\s.*", "", line).strip().removeprefix("$ ")


def spans(text: str) -> list[str]:
    """Code within lines of text; in a table of what is called otherwise elsewhere, that of here."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    outside = re.sub(
        r"^\| there \|.*?\n\n", lambda table: re.sub(r"(?m)^\| .*? \| ", "", table[0]), outside, flags=re.M | re.S
    )
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", outside)]


def commands(path: Path) -> Iterator[list[str]]:
    for line in blocks(path.read_text(encoding="utf-8")):
        if line.split(" ")[0] in SCRIPTS:
            yield shlex.split(line)


def quoted(path: Path) -> Iterator[list[str]]:
    """Words of commands, and of options alone; the parser takes abbreviations, which documents do not use."""
    yield from commands(path)
    for span in spans(path.read_text(encoding="utf-8")):
        if span.startswith(("medusa-", "--")):
            yield span.split()


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if [*commands(path)]], ids=name_of)
def test_commands_parse(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = []
    for words in commands(path):
        if "…" in words:  # stands for what was said before
            continue
        try:
            parser_of(words[0]).parse_args(words[1:])
        except SystemExit:
            refused.append(f"{shlex.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")
    assert refused == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if [*quoted(path)]], ids=name_of)
def test_quoted_options_exist(path: Path) -> None:
    every = {option for command in SCRIPTS for option in options_of(parser_of(command))} | FOREIGN
    unknown = []
    for words in quoted(path):
        known = every if words[0].startswith("--") else options_of(parser_of(words[0]))
        options = [re.sub(r"[=,;:].*", "", word) for word in words if re.match(r"--[a-z]", word)]
        unknown += [" ".join(words) for option in options if option not in known]
    assert unknown == []


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_option_is_in_a_document(command: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"(?<![\w-])--[a-z0-9-]*[a-z0-9]", text))
    assert sorted(long_options(parser_of(command)) - named) == []


def test_the_document_of_the_server_has_its_every_option() -> None:
    policies = argparse.ArgumentParser()
    add_policy_options(policies)
    (page,) = (path for path in DOCUMENTS if path.name == "server.md")
    options = long_options(parser_of("medusa-serve")) - long_options(policies) - {"--version"}
    text = page.read_text(encoding="utf-8")
    assert [option for option in sorted(options) if f"`{option}" not in text] == []


@pytest.mark.parametrize("command", SCRIPTS)
def test_helps_say_that_trees_have_names_and_hold_for_every_machine(command: str) -> None:
    helps = {option: action.help or "" for action in parser_of(command)._actions for option in action.option_strings}
    assert "name of a shipped" in helps.get("--tree", "the name of a shipped tree")
    assert not re.search("[0-9]|%", helps.get("--threads", ""))


def long_options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for option in options_of(parser) if option.startswith("--")} - {"--help"}


def imports(path: Path) -> list[ast.stmt]:
    """The import statements of the Python blocks, which have to be Python as a whole."""
    found = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    trees = [ast.parse(block) for block in found]
    return [line for tree in trees for line in tree.body if isinstance(line, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if imports(path)], ids=name_of)
def test_imports_of_python_blocks_are_there(path: Path) -> None:
    exec(compile(ast.Module(imports(path), type_ignores=[]), str(path), "exec"), {})
