"""Lines about a finished answer for people to read."""

from __future__ import annotations

from collections import Counter
from statistics import median

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.manifest import Manifest
from medusa_engine.runtime.policy import GREEDY, AcceptancePolicy


def statistics(generation: Generation, manifest: Manifest, *, speculation: bool, acceptance: AcceptancePolicy) -> str:
    """Tokens per round, time per round and speed of one answer; of steps if it was decoded plainly."""
    milliseconds = [1000 * seconds for seconds in generation.round_seconds] or [0.0]
    kept = f", {generation.cached_tokens} of them kept from before" if generation.cached_tokens else ""
    lines = [
        f"prompt             {counted(generation.prompt_tokens, 'token')} in {generation.timings.prefill:.2f} s{kept}",
        f"answer             {counted(generation.generated_tokens, 'token')} in {generation.timings.decode:.2f} s"
        f" ({_per_second(generation):.1f} tokens/s), finish: {generation.finish_reason}",
    ]
    if speculation:
        heads = "" if manifest.heads_trained else ", untrained: expect no speed-up from them"
        histogram = ", ".join(f"{n} x {size}" for size, n in sorted(Counter(generation.published_per_round).items()))
        mean = generation.generated_tokens / max(generation.rounds, 1)
        lines.insert(0, f"heads              {f'{manifest.limits.heads}{heads}' if manifest.limits.heads else 'none'}")
        lines.append(
            f"tokens per round   {mean:.2f} over {counted(generation.rounds, 'round')} ({histogram or 'none'})"
        )
        rounds = ", ".join(f"{name} in {counted(count, 'round')}" for name, count in generation.rounds_per_tree.items())
        lines.append(f"trees              {rounds or 'none'}; in use: {generation.tree}")
    if acceptance.name != GREEDY or acceptance.penalises:
        lines.append(f"acceptance         {acceptance}")
    unit = "round" if speculation else "step "
    spread = f"({min(milliseconds):.1f} to {max(milliseconds):.1f})"
    lines.append(f"time per {unit}     {median(milliseconds):.1f} ms median {spread}")
    return "\n".join(lines)


def _per_second(generation: Generation) -> float:
    seconds = generation.timings.decode
    return generation.generated_tokens / seconds if seconds else 0.0
