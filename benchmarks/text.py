"""What `medusa-bench` measured, as text: each figure with its baseline beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from medusa_engine.benchmarks.answers import OTHER, PLAIN, Way
from medusa_engine.benchmarks.bench import AtContext, Results
from medusa_engine.benchmarks.hits import depth_rates
from medusa_engine.benchmarks.measure import Samples, ratio_of
from medusa_engine.benchmarks.prompt_file import TOGETHER
from medusa_engine.benchmarks.stage_times import BETWEEN
from medusa_engine.benchmarks.stages import STAGES
from medusa_engine.runtime.comparison import proposes
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.manifest import number_formats

SHOWN_RANKS = 6


def text(found: Results) -> str:
    """The whole report."""
    blocks = [_facts(found), *map(_at_context, found.contexts), _sweep(found), _stages(found)]
    blocks += [_answers(found), _distribution(found), _categories(found), *_hits(found)]
    if found.costs is not None:
        reads, products = found.costs.rates.read, found.costs.rates.product
        blocks += ["\n".join(["machine rates, measured; the best counts", reads.line(), products.line()])]
        blocks += found.costs.tables()
    blocks.append(exactness(found))
    return "\n\n".join(blocks)


def facts(found: Results) -> dict[str, str]:
    """Engine, machine and versions by name."""
    limits = found.manifest["limits"]
    numbers = number_formats(found.manifest["weights"], found.manifest["dtype"])
    machine = found.machine
    memory = machine["memory_bytes"]
    assert isinstance(memory, int)
    load = machine["load_average"]
    assert isinstance(load, tuple)
    return {
        "engine": f"{found.manifest['name']}: {numbers}, {counted(limits['heads'], 'head')},"
        f" {counted(found.settings.threads, 'thread')}, loaded in {found.load_seconds:.1f} s",
        "machine": f"{machine['processor']}, {counted(machine['cores'], 'core')}, {memory / (1 << 30):.0f} GiB,"
        f" load {load[0]:.1f}",
        "system": f"{machine['system']}, Python {machine['python']}",
        "versions": ", ".join(f"{name} {number}" for name, number in found.versions.items()),
    }


def exactness(found: Results) -> str:
    """Whether the answers are those of plain decoding, in a line for each way that has others."""
    count, repeats = len(found.answers.prompts), found.answers.repeats
    ways = [way for way in found.answers.ways if way.kind != OTHER][1:]
    often = f", {counted(repeats, 'time')}," if repeats > 1 else ""
    lines = []
    if found.exact:
        told = f"{counted(count, 'answer')} in {counted(len(ways), 'way')}{often}"
        lines.append(f"exact: each of {told} is token for token that of plain steps")
    for way in found.answers.ways:
        differing = found.answers.differing(way)
        if differing and way.kind == OTHER:
            lines.append(f"{way.name}: {count - len(differing)} of {counted(count, 'answer')} are those of plain steps")
        elif differing:
            prompt, token, repeat = differing[0]
            others = f"{len(differing)} of {counted(count, 'answer')}"
            what = "the same in every repeat" if way.kind == PLAIN else "those of plain steps"
            where = f"prompt {prompt + 1} from token {token + 1} on" + (f" in repeat {repeat + 1}" if often else "")
            verify = "" if way.kind == PLAIN else "; medusa-verify tells whether that is a near-tie"
            lines.append(f"NOT EXACT: {way.name}: {others} are not {what}; the first is {where}{verify}")
    return "\n".join(lines)


def spread(found: Results, way: Way, chosen: Sequence[int]) -> str:
    """The least and the largest speed-up among the repeats, in brackets behind a blank; nothing where there is one."""
    if found.answers.repeats == 1 or way.kind == PLAIN:
        return ""
    speed_ups = found.answers.speed_ups(way, chosen)
    return f" ({min(speed_ups):.2f} to {max(speed_ups):.2f})"


def category_title(found: Results) -> str:
    """What stands in the cells of the categories."""
    if found.answers.repeats == 1:
        return "tokens per second over plain steps (tokens per round)"
    return (
        "tokens per second over plain steps, median answers (least to largest of"
        f" {counted(found.answers.repeats, 'repeat')}), and tokens per round"
    )


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of columns, the first `left` of them aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def answer_rows(found: Results) -> list[tuple[str, ...]]:
    """A heading, and a row for each way."""
    answers = found.answers
    rows = [("way", "proposes", "tok/s", "x plain", "tokens/round", "p50 ms", "p95 ms", "p99 ms", "same answers")]
    for way in answers.ways:
        tally = way.tally(answers.everything)
        percentiles = (f"{value:.2f}" for value in tally.percentiles().values())
        same = f"{len(answers.prompts) - len(answers.differing(way))} of {len(answers.prompts)}"
        speed_up = answers.speed_up(way, answers.everything)
        rows.append(
            (
                way.name,
                "" if way.tree is None else proposes(way.tree),
                f"{tally.tokens_per_second:.1f}",
                f"{speed_up:.2f}{spread(found, way, answers.everything)}",
                f"{tally.per_round:.2f}",
                *percentiles,
                same,
            )
        )
    return rows


def sweep_rows(found: Results) -> list[tuple[str, ...]]:
    """A heading, and a row for each tree; modelled times in a column of their own."""
    swept = found.sweep
    modelled = {} if found.costs is None else found.costs.roofline
    heading = ("tree", "nodes", "depth", "T(N) ms", "T(N)/T(1)", "E[G]", "speed-up", "pays")
    rows = [(*heading, *(("modelled ms",) if modelled else ()), "")]
    for point in swept.points:
        row = (
            point.tree.name,
            f"{point.tree.nodes}",
            f"{point.tree.depth}",
            f"{point.rounds.median:.2f}",
            f"{point.overhead.median:.2f}",
            f"{point.published.mean:.2f}",
            f"{point.speed_up:.2f}",
            "yes" if point.pays else "no",
        )
        model = (f"{1000 * modelled[point.tree.nodes].value:.2f}",) if modelled else ()
        rows.append((*row, *model, "<- optimum" if point is swept.optimum else ""))
    return rows


def category_rows(found: Results) -> list[tuple[str, ...]]:
    """A heading, and a row for each category: what each way publishes per second over plain steps."""
    answers = found.answers
    rows = [("category", "prompts", "plain tok/s", *(f"{way.name}" for way in answers.ways[1:]))]
    for category, chosen in {**answers.categories, **answers.groups, TOGETHER: list(answers.everything)}.items():
        plain = answers.plain.tally(chosen).tokens_per_second
        cells = (_category_cell(found, way, chosen) for way in answers.ways[1:])
        rows.append((category, f"{len(chosen)}", f"{plain:.1f}", *cells))
    return rows


def _category_cell(found: Results, way: Way, chosen: Sequence[int]) -> str:
    speed_up = f"{found.answers.speed_up(way, chosen):.2f} x{spread(found, way, chosen)}"
    if way.kind == OTHER:
        return speed_up
    per_round = f"{way.tally(chosen).per_round:.2f}"
    return f"{speed_up} ({per_round})" if found.answers.repeats == 1 else f"{speed_up}, {per_round}"


def hit_rows(found: Results) -> list[tuple[str, ...]]:
    """A heading, and a row for each head: share of positions at which it is right at each rank."""
    ranks = min(SHOWN_RANKS, len(found.hits.rates[0]))
    rows = [("head", *(f"rank {rank}" for rank in range(ranks)), "any rank")]
    for head, rates in enumerate(found.hits.rates):
        rows.append((f"head {head}", *(f"{rate:.3f}" for rate in rates[:ranks]), f"{sum(rates):.3f}"))
    return rows


def lookup_rows(found: Results) -> list[tuple[str, ...]]:
    """A heading, and a row for each length of the key: how often it is found, and lookup is right as far as a depth."""
    depth = len(found.hits.lookup[0].right)
    rows = [("key", "found", *(f"depth {step}" for step in range(1, depth + 1)))]
    for key, share, right in found.hits.lookup:
        name = "all" if key is None else counted(key, "token") if key else "no tokens"
        rows.append((name, f"{share:.3f}", *(f"{rate:.3f}" for rate in right)))
    return rows


def stage_rows(found: Results) -> list[tuple[str, ...]]:
    """A heading, and a row for each stage: mean milliseconds and share, by kind of pass."""
    rows = [("stage", *(times.title for times in found.stages))]
    shares = [times.shares() for times in found.stages]
    means = [sum(times.passes) / len(times.passes) for times in found.stages]
    for stage in (*STAGES, BETWEEN):
        cells = (f"{part[stage] * mean:.3f} ms {part[stage]:6.1%}" for part, mean in zip(shares, means, strict=True))
        rows.append((stage, *cells))
    rows.append(("whole pass", *(f"{mean:.3f} ms 100.0%" for mean in means)))
    return rows


def _facts(found: Results) -> str:
    return "\n".join(f"{name:<11}{value}" for name, value in facts(found).items())


def _at_context(at: AtContext) -> str:
    speed = Samples("prefill", "tok/s", tuple(1000 * at.tokens / value for value in at.prefill.values))
    lines = [f"context {at.tokens}: {counted(len(at.step.values), 'sample')}, median (minimum to maximum)"]
    lines += [at.prefill.line(), speed.line(), at.step.line()]
    for samples in at.rounds.values():
        lines += [samples.line(), ratio_of(f"{samples.name} / plain step", samples, at.step).line()]
    return "\n".join(lines)


def _sweep(found: Results) -> str:
    swept = found.sweep
    title = (
        f"trees at context {swept.context}, plain step T(1) {swept.step.median:.2f} ms; a tree pays where"
        f" E[G] > T(N)/T(1)\n  T(N) is timed; E[G] is counted by replaying {counted(swept.judged_on, 'answer')}, trees"
        f" were grown on {counted(swept.grown_on, 'answer')}"
    )
    return "\n".join([title, *table(sweep_rows(found))])


def _stages(found: Results) -> str:
    title = f"time per stage at context {found.sweep.context}, with ONNX Runtime's profiler on: mean and share"
    return "\n".join([title, *table(stage_rows(found))])


def _answers(found: Results) -> str:
    count = found.settings.max_new_tokens
    asked = f"{counted(len(found.answers.prompts), 'prompt')}, at most {counted(count, 'token')} each"
    repeats = found.answers.repeats
    often = f", in {repeats} repeats: median answers (least to largest of the repeats)" if repeats > 1 else ""
    title = f"answers to {asked}{often}; time per round in the pNN"
    return "\n".join([title, *table(answer_rows(found), left=2)])


def _distribution(found: Results) -> str:
    return "\n".join(["tokens published per round, share of the rounds", *_distribution_lines(found)])


def _distribution_lines(found: Results) -> Iterator[str]:
    depths = {tree.name: tree.depth for tree in found.trees}
    for way in found.answers.ways[1:]:
        if way.kind != OTHER:
            published = way.tally(found.answers.everything)
            shares = ", ".join(f"{count}: {share:.1%}" for count, share in published.distribution().items())
            yield f"  {way.name:<16}{shares}"
            if way.tree is not None:
                rates = depth_rates(published.published, depths[way.name])
                if rates:
                    told = ", ".join(f"{depth}: {rate:.1%}" for depth, rate in enumerate(rates, 1))
                    yield f"  {'':<16}accepted at depth, of those that got there: {told}"


def _categories(found: Results) -> str:
    return "\n".join([f"by category: {category_title(found)}", *table(category_rows(found))])


def _hits(found: Results) -> Iterator[str]:
    if found.hits.rates:
        positions = ", ".join(map(str, found.hits.positions))
        title = f"heads: share of the positions at which they are right at a rank; {positions} positions"
        yield "\n".join([title, *table(hit_rows(found))])
    if found.hits.lookup:
        title = "lookup: share of the positions at which a key is the longest found, and all is right down to a depth"
        yield "\n".join([title, *table(lookup_rows(found))])
