"""What a chat template may use up: a program that anybody may have written must end, in time and in memory.

Every turn of a loop and every call is counted; the texts, lists and numbers that operators, filters and calls make
are measured, those that can be very large before they are made.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

MOST_SECONDS = 5.0
MOST_STEPS = 1_000_000  # turns of loops, and calls
MOST_MADE = 1 << 27  # characters and elements, of everything that a rendering makes
MOST_NUMBER = 10_000  # given to a filter or a function, which may make a text as wide
_ELEMENT = 128  # what an element of a list counts, in characters
_MOST_BITS = 1 << 12  # of an integer
_WRITING = ("tojson", "string", "pprint", "join", "format", "xmlattr", "urlencode", "sum", "list")  # filters
_WIDE_FIELD = re.compile(r"\d{5}|\*")  # in a format


T = TypeVar("T")


class _Spent:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self.steps = 0
        self.made = 0
        self.end = time.monotonic() + MOST_SECONDS


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which templates cannot run for ever or fill the memory.

    Call `start` before each rendering; several threads may render.

    Raises:
        SecurityError: from a rendering that goes too far.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%", "//", "/", "-"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=self._written)
        self._local = threading.local()

    def start(self) -> None:
        """Begin to count anew in this thread."""
        self._local.spent = _Spent()

    def limit_filters(self) -> None:
        """Measure what the filters are given and make; once they are all there."""
        for name, function in self.filters.items():
            self.filters[name] = self._limited(name, function)

    def step(self) -> str:
        """Count a turn of a loop, in whose body the compiler puts this."""
        spent = self._spent
        spent.steps += 1
        if spent.steps > MOST_STEPS or time.monotonic() > spent.end:
            raise SecurityError("the template takes too long")
        return ""

    def joined(self, *parts: object) -> str:
        """The operator `~`."""
        return self._measured("".join(str(self._written(part)) for part in parts))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        __self.step()
        if __obj is not safe_range:  # which has a limit of its own
            _check_numbers(args, kwargs)
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            __self._check_growth(__obj.__name__, subject, args)
        return __self._measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.step()
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            self._written(right)
        elif operator in ("*", "**") and _size(left, right, operator) > MOST_MADE:
            raise SecurityError(f"the template computes something too large with {operator}")
        return self._measured(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> Any:
        """Compile a template that counts its steps."""
        kinds: Any = (nodes.For, nodes.Macro, nodes.CallBlock)
        for loop in source.find_all(kinds):
            call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno))
        concats = list(source.find_all(nodes.Concat))
        joined = nodes.EnvironmentAttribute("joined")
        calls: dict[int, nodes.Node] = {
            id(concat): nodes.Call(joined, concat.nodes, [], None, None).set_lineno(concat.lineno) for concat in concats
        }
        for parent in (source, *source.find_all(nodes.Node), *calls.values()):
            _replace(parent, calls)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    @property
    def _spent(self) -> _Spent:
        if not hasattr(self._local, "spent"):  # while a template is compiled
            self.start()
        spent: _Spent = self._local.spent
        return spent

    def _measured(self, value: T) -> T:
        if isinstance(value, str):
            self._count(len(value))
        elif isinstance(value, (list, tuple)):
            self._count(_ELEMENT * len(value))
        return value

    def _written(self, value: Any) -> Any:
        """A value that is to become text: lists in lists can be far longer then than they are."""
        if isinstance(value, (list, tuple, dict)):
            self._count(_text_size(value, {}))
        return value

    def _count(self, made: int) -> None:
        self._spent.made += made
        if self._spent.made > MOST_MADE:
            raise SecurityError("the template makes too much text")

    def _check_growth(self, name: str, subject: str, args: tuple[Any, ...]) -> None:
        """Count what `replace`, `join` and `indent` will make."""
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self._count(subject.count(args[0]) * len(args[1]))
        elif name == "join" and args and isinstance(args[0], (list, tuple)):
            self._count(sum(len(subject) + len(part) for part in args[0] if isinstance(part, str)))
        elif name == "indent" and args:
            self._count(subject.count("\n") * (args[0] if isinstance(args[0], int) else len(str(args[0]))))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # jinja2's marks of what a filter is to be given, too
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.step()
            _check_numbers(args, kwargs)
            given = [arg for arg in args if not isinstance(arg, (Context, EvalContext, Environment))]
            if given and isinstance(given[0], str):
                if name == "format":
                    _check_format(given[0])
                self._check_growth(name, given[0], (*given[1:], *kwargs.values()))
            if name in _WRITING:
                for value in given:
                    self._written(value)
            return self._measured(function(*args, **kwargs))

        return limited


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MOST_NUMBER:
            raise SecurityError("the template gives a function a number that is too large")


def _text_size(value: Any, known: dict[int, int]) -> int:
    """Characters of a value as text, at least; `known` are those of the lists and mappings in it, by id."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if id(value) not in known:
        known[id(value)] = 1  # of one that is in itself
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = min(sum(_text_size(part, known) + 1 for part in inner), MOST_MADE + 1)
    return known[id(value)]


def _check_format(text: str) -> None:
    if _WIDE_FIELD.search(text):
        raise SecurityError("the template formats a field that is too wide")


def _size(left: Any, right: Any, operator: str) -> int:
    """About how large a product or a power will be: characters, elements, or one more than allowed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        return MOST_MADE + 1 if bits > _MOST_BITS else 1
    for many, count in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(count, int):
            return len(many) * count
    return 1


def _replace(parent: nodes.Node, new: dict[int, nodes.Node]) -> None:
    """Put other nodes into the places of some of a node's own, which are given by id."""
    for field, value in parent.iter_fields():
        if isinstance(value, list):
            setattr(parent, field, [new.get(id(item), item) for item in value])
        else:
            setattr(parent, field, new.get(id(value), value))
