"""What fewer bits per weight cost and save: the same model as several bundles, the first of them the reference.

1. held-out text, token by token: perplexity, and how often the likeliest token is the reference's
2. prompts, greedily: whole answers with plain steps and with the bundle's trees, in turn; the ids must be the same
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_engine.benchmarks.measure import Report, Samples
from medusa_engine.exporter.verify_passes import LogitsBackend
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.manifest import file_sha256

ROOT = Path(__file__).resolve().parents[1]
ENGINES = [ROOT / "engines" / name for name in ("smollm2-135m", "smollm2-135m-int8", "smollm2-135m-int4")]
TEXTS = [ROOT / "docs" / name for name in ("architecture.md", "training.md")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, action="append", help="bundle folder, the reference first; several")
    parser.add_argument("--text", type=Path, action="append", help="file of held-out text; default: two of docs/")
    parser.add_argument("--text-tokens", type=int, default=2000, help="of all texts together; default: %(default)s")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "benchmarks/prompts/held_out.txt", help="one per line, as chat messages"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all samples")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    engines = {folder.name: Engine.open(folder) for folder in options.engine or ENGINES}
    texts = options.text or TEXTS
    report = Report()
    quality = compare_text(list(engines), options.engine or ENGINES, texts, options.text_tokens)
    for name, found in quality.items():
        print(f"  {name:<28} " + ", ".join(f"{what} {value:.4f}" for what, value in found.items()))
    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    same = compare_speed(engines, prompts, options.max_new_tokens, report)
    if options.json:
        report.save(
            options.json,
            quality=quality,
            texts={path.name: file_sha256(path) for path in texts},
            options={"text_tokens": options.text_tokens, "max_new_tokens": options.max_new_tokens},
            manifests={name: engine.manifest.document() for name, engine in engines.items()},
        )
    return 0 if same else 1


def compare_text(
    names: Sequence[str], folders: Sequence[Path], texts: Sequence[Path], tokens: int
) -> dict[str, dict[str, float]]:
    """Perplexity of each engine on the texts, and the share of positions where its argmax is the reference's."""
    found: dict[str, dict[str, float]] = {}
    reference: npt.NDArray[np.int64] | None = None
    for name, folder in zip(names, folders, strict=True):
        engine = Engine.open(folder)
        backend = LogitsBackend(folder, engine.manifest)
        best: list[int] = []
        loss: list[float] = []
        for path in texts:
            ids = engine.encode(path.read_text(encoding="utf-8"))[: tokens // len(texts)]
            state: Any = backend.new_state()
            for position, (token, after) in enumerate(pairwise(ids)):
                state.prefill(np.array([token]), position, None)
                assert backend.logits is not None
                logits = backend.logits[-1].astype(np.float64)
                best.append(int(logits.argmax()))
                loss.append(float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[after]))
            print(f"\r{name}: {path.name}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        chosen = np.array(best)
        reference = chosen if reference is None else reference
        found[name] = {
            "perplexity": float(np.exp(np.mean(loss))),
            "argmax_agreement": float((chosen == reference).mean()),
            "tokens": float(len(loss)),
        }
    return found


def compare_speed(engines: dict[str, Engine], prompts: Sequence[str], count: int, report: Report) -> bool:
    """Milliseconds per token of whole answers; False if a round's answer is not that of plain steps."""
    times: dict[str, list[float]] = {f"{name}, {kind}": [] for name in engines for kind in ("plain", "rounds")}
    same = True
    for index, prompt in enumerate(["warm up", *prompts]):
        for name, engine in engines.items():
            plain, rounds = (
                engine.generate([{"role": "user", "content": prompt}], max_new_tokens=count, speculation=speculation)
                for speculation in (False, True)
            )
            same = same and plain.token_ids == rounds.token_ids
            if index:
                for kind, answer in (("plain", plain), ("rounds", rounds)):
                    times[f"{name}, {kind}"].append(answer.timings.decode / answer.generated_tokens * 1e3)
        print(f"\r{index}/{len(prompts)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    report.section("whole answers, per token", [Samples(name, "ms", tuple(values)) for name, values in times.items()])
    print(f"  answers of rounds and of plain steps: {'the same ids' if same else 'DIFFER'}")
    return same


if __name__ == "__main__":
    sys.exit(main())
