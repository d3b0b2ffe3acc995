"""The messages of every `UserError` in the sources, with … where a value stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from documents import ROOT

FOLDERS = ("runtime", "plugins", "exporter", "training", "benchmarks")
VALUE = "…"

_LETTERS = 6  # fewer fixed ones do not tell a message
_HELPERS = {"refusal": 1, "refusing": 0}  # function -> argument with the problem; a library's words are added
_COMMAND_LINE = "runtime/command_line.py"  # prints some pairs of lines itself

Assigned = Mapping[str, Sequence[ast.expr]]


@dataclass(frozen=True)
class Message:
    """A problem as the source has it: `…: the file is empty`."""

    place: str
    text: str

    @cached_property
    def telling(self) -> bool:
        return len(re.findall("[a-z]", self.text)) >= _LETTERS


@cache
def messages() -> list[Message]:
    """Every way in which the first argument of a `UserError` may read, and what `run_command` prints by itself."""
    found: dict[Message, None] = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                assigned = {**_constants(), **_assigned(function)}
                for problem in _problems(function, place):
                    found.update({Message(place, text): None for text in _texts(problem, assigned)})
    return list(found)


def _problems(function: ast.AST, place: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "UserError" or (name == "__init__" and place == "runtime/cuda.py"):  # its CudaError is one
                yield node.args[0]
            elif name == "WrongValueError":
                yield ast.JoinedStr([node.args[0], ast.Constant(f" is {VALUE}")])
            elif name in _HELPERS:
                yield ast.JoinedStr([ast.Constant(VALUE), node.args[_HELPERS[name]], ast.Constant(VALUE)])
        if place == _COMMAND_LINE:
            lines = [call for part in getattr(node, "body", []) for call in _printed(part)]
            yield from lines[:1]  # the second one is the hint


def _printed(statement: ast.stmt) -> Iterator[ast.expr]:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[line, *_])):
            yield line


@cache
def _constants() -> Assigned:
    """The texts that have a name at the top of a file, which no other file has for another."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    named: dict[str, list[ast.expr]] = {}
    for node in (node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str()) as text) if name.isupper():
                named.setdefault(name, []).append(text)
    return {name: texts for name, texts in named.items() if len(texts) == 1}


def _assigned(function: ast.AST) -> Assigned:
    """The values that each name is given anywhere in the function."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    return values


def _texts(node: ast.expr, assigned: Assigned) -> list[str]:
    """The texts that an expression may give."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(choice) for choice in product(*(_texts(part, assigned) for part in parts))]
        case ast.FormattedValue(value=value):
            return _texts(value, assigned)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [first + second for first in _texts(left, assigned) for second in _texts(right, assigned)]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body, assigned), *_texts(orelse, assigned)]
        case ast.Call(func=ast.Name(id="counted"), args=[_, ast.Constant(value=str(noun))]):
            return [f"{VALUE} {noun}s"]
        case ast.Name(id=name) if name in assigned:
            others = {other: values for other, values in assigned.items() if other != name}
            return [text for value in assigned[name] for text in _texts(value, others)]
    return [VALUE]
