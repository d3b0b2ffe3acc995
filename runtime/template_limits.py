"""What a chat template may use up: a program that anybody may have written must end, in time and in memory.

Every turn of a loop and every call is counted, and between them no value is large: whatever operators, filters, calls
and literals make is weighed when it is made, everything in it as often as it is reached, so that comparing, hashing,
sorting or writing it takes little. What could be large before it is weighed, or takes long for a small value, is
checked beforehand.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import generate_lorem_ipsum
from markupsafe import Markup

from medusa_engine.runtime.template_formats import EscapeFormatter, Formatter, check_format
from medusa_engine.runtime.template_nodes import MOST_SOURCE, MOST_TAGS, rewrite
from medusa_engine.runtime.template_weight import ELEMENT, MOST_WEIGHT, Weights

MOST_SECONDS = 5.0
MOST_STEPS = 1_000_000  # turns of loops, and calls
MOST_MADE = 1 << 27  # characters and elements, of everything that a rendering makes
_SLOT = 32  # what an element of those counts: most have been made before, and are in several lists
MOST_NUMBER = 10_000  # given to a filter or a function, which may make a text as wide
_MOST_WORDS = 100  # of `lipsum`, in each of its numbers
_MOST_SLOW = 1 << 17  # weight given to what takes the square of it
_MOST_PAIRS = 1 << 28  # of characters that a search compares
_MOST_SPACES = 16  # in front of what `tojson` writes, and between
_MOST_BITS = 1 << 12  # of an integer

# By name, of filters and of methods.
_SLOW = frozenset(("wordwrap", "striptags", "urlize", "pprint", "unescape"))
_SEARCHES = frozenset(("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"))
_REFUSED = frozenset(("translate", "maketrans", "encode", "fromkeys", "to_bytes", "from_bytes", "fromhex"))


class _Spent:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self.steps = 0
        self.made = 0
        self.end = time.monotonic() + MOST_SECONDS
        self.weights = Weights()


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which templates cannot run for ever or fill the memory.

    Call `start` before each rendering and `finish` after it; several threads may render.

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

    def finish(self) -> None:
        """Let go of what this thread has made."""
        vars(self._local).pop("spent", None)

    def limit_filters(self) -> None:
        """Measure what the filters and tests are given and make; once they are all there."""
        both: tuple[dict[str, Any], dict[str, Any]] = (self.filters, self.tests)
        for functions in both:
            for name, function in functions.items():
                functions[name] = self._limited(name, function)

    def step(self, plain: int = 0) -> str:
        """Count a turn of a loop, in whose body the compiler puts this, and the characters it writes anyhow."""
        spent = self._spent
        spent.steps += 1
        if spent.steps > MOST_STEPS or time.monotonic() > spent.end:
            raise SecurityError("the template takes too long")
        if plain:
            self._count(plain)
        return ""

    def joined(self, *parts: object) -> Any:
        """The operator `~`."""
        return self.held("".join([str(self._written(part)) for part in parts]))

    def compared(self, value: Any) -> Any:
        """The first operand of a comparison."""
        self.step()
        return value

    def held(self, value: Any) -> Any:
        """Count and weigh what was made; what makes values one after another is to do so as it goes."""
        if isinstance(value, Iterator):
            return self._each(value)
        weight = self._spent.weights.weigh(value)
        if isinstance(value, str):
            self._count(weight)
        elif isinstance(value, Collection) and not isinstance(value, range):
            self._count(_SLOT * len(value))
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        subject = getattr(__obj, "__self__", None)
        if subject is __self:  # what the compiler put in
            return __obj(*args)
        given = (*args, *[value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")])
        __self.step()
        if __obj is not safe_range and not isinstance(__obj, (type, Macro)):  # which make nothing as wide
            _check_numbers(given, _MOST_WORDS if __obj is generate_lorem_ipsum else MOST_NUMBER)
        __self._weigh_all(*given)
        if isinstance(subject, str):
            if __obj.__name__ == "join" and args:
                args = given = (list(args[0]), *args[1:])
            __self._check_work(__obj.__name__, subject, *given)
            __self._check_growth(__obj.__name__, subject, *given)
        return __self.held(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.step()
        if operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        elif operator in ("*", "**") and _size(left, right, operator) > MOST_WEIGHT:
            raise SecurityError(f"the template computes something too large with {operator}")
        return self.held(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        refused = attr in _REFUSED and isinstance(obj, (str, dict, int, float, type))
        return not refused and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        escaped = isinstance(text, Markup)
        formatter = EscapeFormatter(self, escape=text.escape) if escaped else Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> Any:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))

        return formatted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MOST_SOURCE or source.count("{%") + source.count("{{") > MOST_TAGS:
            raise SecurityError("the template is too long")
        return super()._parse(source, name, filename)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> Any:
        """Compile a template that counts its steps."""
        rewrite(source)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    @property
    def _spent(self) -> _Spent:
        if not hasattr(self._local, "spent"):  # in a thread that has not started
            self.start()
        spent: _Spent = self._local.spent
        return spent

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            yield self.held(value)

    def _written(self, value: Any) -> Any:
        """A value that is to become text."""
        self._count(self._spent.weights.weigh(value))
        return value

    def _weigh_all(self, *values: Any) -> int:
        """The weight of values together: a macro has all that it is given in one tuple."""
        weights = self._spent.weights
        return weights.checked(sum([weights.weigh(value) for value in values]))

    def _count(self, made: int) -> None:
        self._spent.made += made
        if self._spent.made > MOST_MADE:
            raise SecurityError("the template makes too much text")

    def _check_work(self, name: str, subject: Any, *args: Any) -> None:
        """Refuse what takes far longer than its operands are long."""
        weight = self._spent.weights.weigh(subject)
        lists = name == "sum" and any(isinstance(arg, (list, tuple)) for arg in args)
        if (name in _SLOW or lists) and weight > _MOST_SLOW:
            raise SecurityError(f"the template gives {name} too much")
        longest = max([len(arg) for arg in args if isinstance(arg, str)], default=1)
        if name in _SEARCHES and weight * longest > _MOST_PAIRS:
            raise SecurityError(f"the template gives {name} too much")

    def _check_growth(self, name: str, subject: str, *args: Any) -> None:
        """Check what `replace`, `join`, `indent` and `expandtabs` will make, beforehand."""
        checked = self._spent.weights.checked
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            checked(subject.count(args[0]) * len(args[1]))
        elif name == "join" and args and isinstance(args[0], list):
            checked(sum([len(subject) + len(part) for part in args[0] if isinstance(part, str)]))
        elif name == "indent" and args:
            checked(len(subject.splitlines()) * (args[0] if isinstance(args[0], int) else len(str(args[0]))))
        elif name == "expandtabs":
            checked(subject.count("\t") * max([arg for arg in args if isinstance(arg, int)], default=8))

    def _check_percent(self, text: str, values: Any) -> None:
        check_format(text)
        if isinstance(values, Mapping) and text.count("%") * self._spent.weights.weigh(values) > MOST_MADE:
            raise SecurityError("the template formats too much")

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        order = tuple(inspect.signature(function).parameters) if name in ("replace", "join", "indent") else ()

        @functools.wraps(function)  # jinja2's marks of what a filter is to be given, too
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.step()
            first = 0
            while first < len(args) and isinstance(args[first], (Context, EvalContext, Environment)):
                first += 1
            if name in ("join", "sum", "pprint") and len(args) > first and isinstance(args[first], Iterator):
                args = (*args[:first], list(args[first]), *args[first + 1 :])
            given = args[first:]
            _check_numbers((*given[1:], *kwargs.values()))
            self._weigh_all(*given, *kwargs.values())
            if given:
                self._check_work(name, *given, *kwargs.values())
            if order:
                named = {**dict(zip(order, args, strict=False)), **kwargs}
                self._check_filter(name, named)
            elif name == "format" and given:
                self._check_percent(str(given[0]), kwargs)
            elif name == "tojson":
                for part in _parts((*given[1:], *kwargs.values())):
                    if (part if isinstance(part, int) else len(str(part))) > _MOST_SPACES:
                        raise SecurityError("the template writes JSON too wide")
            return self.held(function(*args, **kwargs))

        return limited

    def _check_filter(self, name: str, named: dict[str, Any]) -> None:
        if name == "join":
            self._check_growth(name, str(named.get("d", "")), list(named.get("value", ())))
        elif name == "replace":
            self._check_growth(name, str(named.get("s")), str(named.get("old")), str(named.get("new")))
        else:
            self._check_growth(name, str(named.get("s")), named.get("width", 4))


def _parts(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _check_numbers(values: tuple[Any, ...], most: int = MOST_NUMBER) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            raise SecurityError("the template gives a function a number that is too large")


def _size(left: Any, right: Any, operator: str) -> int:
    """About how large a product or a power will be: characters, elements, or one more than allowed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        return MOST_WEIGHT + 1 if bits > _MOST_BITS else 1
    for many, count in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(count, int):
            return len(many) * count * (1 if isinstance(many, str) else ELEMENT)
    return 1
