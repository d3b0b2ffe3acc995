"""T(N) of a machine from the ledger's counts and two measured rates; what is modelled never passes for measured.

A value is `Modelled` if anything it was computed from was. `overhead`, and so `speed_up`, refuse to mix the two kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from medusa_engine.runtime.cost import Ledger, Part, round_ledger, step_ledger
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.model_facts import ModelFacts
from medusa_engine.runtime.tree import LOOKUP, Tree


@dataclass(frozen=True)
class Modelled:
    """A value that counts and rates lead to: seconds, or a ratio."""

    value: float


@dataclass(frozen=True)
class Measured:
    """A value that was timed: seconds, or a ratio."""

    value: float


Quantity = TypeVar("Quantity", Modelled, Measured)


@dataclass(frozen=True)
class Machine:
    """What was measured of a machine.

    Attributes:
        bytes_per_second: at which it reads large arrays.
        flops_per_second: of large matrix products, a multiply-add being two.

    Raises:
        ValueError: a rate is not above 0.
    """

    bytes_per_second: float
    flops_per_second: float

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.flops_per_second > 0):
            raise ValueError(f"rates are above 0, not {self}")


def part_seconds(part: Part, machine: Machine) -> Modelled:
    """The longer of its arithmetic and its memory traffic."""
    return Modelled(max(part.flops / machine.flops_per_second, part.bytes / machine.bytes_per_second))


def ledger_seconds(ledger: Ledger, machine: Machine) -> Modelled:
    """T: the parts run one after the other."""
    return Modelled(sum(part_seconds(part, machine).value for part in ledger.parts))


def roofline(facts: ModelFacts, machine: Machine, *, context: int, nodes: Iterable[int]) -> dict[int, Modelled]:
    """T(N): seconds of a round of N rows behind `context` committed rows, by N.

    N = 1 is a round that proposes the root alone, which is a plain step. For the trees of the others see `_tree`.

    Raises:
        ValueError: fewer than one row.
    """
    times = {}
    for count in nodes:
        if count < 1:
            raise ValueError(f"a round of {count} rows")
        times[count] = ledger_seconds(round_ledger(facts, _tree(facts, count), context=context), machine)
    return times


def _tree(facts: ModelFacts, rows: int) -> Tree:
    """A tree of so many rows: of its shape little depends but some comparisons and cache rows that move.

    With heads, all rows are the root's children; from three on the last is looked up, where the engine has lookup.
    Without heads, they are a chain of lookups.
    """
    name = counted(rows, "row")
    if not facts.heads:
        return Tree(tuple((LOOKUP,) * depth for depth in range(1, rows)), name)
    looked_up = [LOOKUP] * (facts.lookup > 0 and rows > 2)
    return Tree(tuple((step,) for step in (*range(rows - 1 - len(looked_up)), *looked_up)), name)


def step_seconds(facts: ModelFacts, machine: Machine, *, context: int) -> Modelled:
    """Seconds of a plain step."""
    return ledger_seconds(step_ledger(facts, context=context), machine)


@dataclass(frozen=True)
class Published:
    """Tokens that a number of rounds published, roots included: E[G] counts tokens, never rounds.

    Raises:
        ValueError: no rounds, or fewer tokens than rounds: each publishes one at least.
    """

    tokens: int
    rounds: int

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= self.tokens:
            raise ValueError(f"{self.rounds} rounds that published {self.tokens} tokens")

    @classmethod
    def of(cls, per_round: Sequence[int]) -> Published:
        """Of G by round."""
        return cls(sum(per_round), len(per_round))

    @property
    def mean(self) -> float:
        """E[G]."""
        return self.tokens / self.rounds

    def per_second(self, round_: Quantity) -> Quantity:
        """Tokens per second of rounds that take so long."""
        return type(round_)(self.mean / round_.value)


def overhead(round_: Quantity, step: Quantity) -> Quantity:
    """What a round costs in plain steps.

    Raises:
        TypeError: one is modelled and the other measured.
    """
    if type(round_) is not type(step):
        raise TypeError(f"{round_} and {step} are of different kinds")
    return type(round_)(round_.value / step.value)


def speed_up(published: Published, round_overhead: Quantity) -> Quantity:
    """E[G] / overhead: over plain decoding, of which a step publishes one token."""
    return type(round_overhead)(published.mean / round_overhead.value)


def pays(published: Published, round_overhead: Quantity) -> bool:
    """Break-even: E[G] > overhead."""
    return published.mean > round_overhead.value
