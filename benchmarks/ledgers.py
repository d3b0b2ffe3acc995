"""The cost ledger of what was measured: counts, modelled times from measured rates, measured times beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from medusa_engine.benchmarks.rates import Rates
from medusa_engine.benchmarks.stage_times import StageTimes
from medusa_engine.benchmarks.stages import BACKBONE, BLOCKS, CACHE, LM, PATH, POSTERIOR, TOP_K
from medusa_engine.benchmarks.sweep import Sweep
from medusa_engine.runtime.cost import Ledger, round_ledger, step_ledger
from medusa_engine.runtime.ledger_table import ledger_table
from medusa_engine.runtime.model_facts import ModelFacts
from medusa_engine.runtime.roofline import Measured, Modelled, roofline
from medusa_engine.runtime.tree import Tree

_PART_OF_LEDGER = {
    TOP_K: "top-k",
    BACKBONE: "backbone",
    LM: "LM",
    BLOCKS: "heads",
    PATH: "path",
    POSTERIOR: "posterior",
    CACHE: "commit",
}


@dataclass(frozen=True)
class Costs:
    """Ledgers and roofline.

    Attributes:
        rates: of the machine.
        ledgers: of a plain step and of each named tree, with the seconds of its parts as they were profiled.
        roofline: T(N) by N of the sweep's trees.
    """

    rates: Rates
    ledgers: list[tuple[Ledger, dict[str, Measured]]]
    roofline: dict[int, Modelled]

    def tables(self) -> list[str]:
        """Each ledger as text."""
        return [ledger_table(ledger, machine=self.rates.machine, measured=taken) for ledger, taken in self.ledgers]


def count_costs(
    facts: ModelFacts, rates: Rates, trees: Sequence[Tree], stages: Sequence[StageTimes], swept: Sweep
) -> Costs:
    """Count what was profiled and timed.

    Args:
        stages: of a plain step, then of each tree.
    """
    context = swept.context
    counted = [step_ledger(facts, context=context), *(round_ledger(facts, tree, context=context) for tree in trees)]
    ledgers = [(ledger, _measured(times)) for ledger, times in zip(counted, stages, strict=True)]
    nodes = sorted({point.tree.nodes for point in swept.points})
    return Costs(rates, ledgers, roofline(facts, rates.machine, context=context, nodes=nodes))


def _measured(times: StageTimes) -> dict[str, Measured]:
    parts = {name: Measured(times.part_median(part) / 1000) for part, name in _PART_OF_LEDGER.items()}
    return {**parts, "round": Measured(median(times.passes) / 1000)}
