"""Samples, the bars they are held against, and the facts about the machine that a reader of them needs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from medusa_engine.runtime.counted import counted

PAUSE_SECONDS = 0.05  # lets the threads of what ran before stop spinning, so that they cost the next one nothing
PACKAGES = ("medusa-engine", "numpy", "onnxruntime", "torch", "transformers", "llama-cpp-python")


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing.

    Attributes:
        name: what was measured.
        unit: of the values.
        values: in the order of measurement.
    """

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def line(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"  {self.name:<48}{self.median:9.3f} {self.unit:<3} ({low:.3f} to {high:.3f})"

    def document(self) -> dict[str, object]:
        return {
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
        }


@dataclass
class Report:
    """Prints figures as they are measured and keeps their samples.

    Attributes:
        sections: what was printed, as `document` gives it.
    """

    sections: list[dict[str, object]] = field(default_factory=list)

    def section(self, title: str, samples: Sequence[Samples]) -> None:
        """Start a figure: its title, and each of its measurements, the baseline first."""
        count = min(len(measured.values) for measured in samples)
        print(f"\n{title} ({counted(count, 'sample')})", flush=True)
        for measured in samples:
            print(measured.line())
        self.sections.append(
            {
                "title": title,
                "samples": {measured.name: {"unit": measured.unit, "values": measured.values} for measured in samples},
                "bars": [],
            }
        )

    def bar(self, ratio: Samples, bar: float, *, strict: bool = False) -> None:
        """Hold the median of a ratio of the last section against its bar.

        Args:
            ratio: measured over baseline, sample by sample.
            bar: largest value that holds.
            strict: the bar itself does not hold.
        """
        holds = ratio.median < bar if strict else ratio.median <= bar
        sign = "<" if strict else "<="
        verdict = "holds" if holds else "does not hold"
        print(f"{ratio.line()}   bar {sign} {bar:g}: {verdict}", flush=True)
        bars = self.sections[-1]["bars"]
        assert isinstance(bars, list)
        bars.append({"name": ratio.name, "values": ratio.values, "bar": bar, "holds": holds})

    def document(self, **facts: object) -> dict[str, object]:
        """Everything measured, with the machine and the versions."""
        return {"machine": machine(), "versions": versions()} | facts | {"sections": self.sections}

    def save(self, path: Path, **facts: object) -> None:
        path.write_text(json.dumps(self.document(**facts), indent=1) + "\n", encoding="utf-8")


def ratio_of(name: str, measured: Samples, baseline: Samples) -> Samples:
    """Sample i over baseline sample i: they were taken one right after the other."""
    pairs = zip(measured.values, baseline.values, strict=True)
    return Samples(name, "x", tuple(value / base for value, base in pairs))


def interleaved(
    cases: Mapping[str, Callable[[], float]],
    *,
    unit: str,
    samples: int,
    warm_up: int = 2,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Take one sample of every case in turn, over and over, so that a busy moment hits all of them.

    Args:
        cases: name -> a function that measures one value.
        samples: kept per case.
        warm_up: taken before those and dropped.
        progress: called behind each sample, warm-up included.
    """
    values: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(warm_up + samples):
        for name, measure in cases.items():
            time.sleep(PAUSE_SECONDS)
            values[name].append(measure())
            progress()
    return {name: Samples(name, unit, tuple(taken[warm_up:])) for name, taken in values.items()}


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def versions() -> dict[str, str]:
    """Of those PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, object]:
    """Processor, usable cores, memory in bytes, load and system."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
