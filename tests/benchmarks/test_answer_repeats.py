"""Answers that are written several times: the median counts, its spread stands beside it, and each has to be exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_run import MAX_NEW_TOKENS, Benched
from tiny_models import Exported, Rigged

from medusa_engine.benchmarks import answers, cli
from medusa_engine.benchmarks.answers import ADAPTIVE, PLAIN, TREE, Answered, Answers, Way, answer_all
from medusa_engine.benchmarks.prompt_file import BenchPrompt

PROMPTS = [BenchPrompt("a", "", [1, 2]), BenchPrompt("b", "", [7])]
TOKENS = 6
SECONDS = {PLAIN: (1.0, 2.0, 4.0), TREE: (0.8, 1.0, 1.0), ADAPTIVE: (0.8, 1.6, 8.0)}  # of each answer, by repeat
Change = Callable[[Way, BenchPrompt, Answered], Answered]


class Slow:
    """Another runtime, which takes a second longer per token from call to call."""

    name, version = "slow", "1"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    def answer(self, prompt_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        self.asked.append((prompt_ids, tokens))
        return [0] * tokens, [float(len(self.asked))] * (tokens - 1)


def answered(seconds: float, *token_ids: int) -> Answered:
    return Answered(list(token_ids), len(token_ids), seconds, [seconds], [len(token_ids)], [f"{seconds}"])


def twice_or_more(plain: list[list[Answered]], tree: list[list[Answered]]) -> tuple[Answers, Way]:
    other = Way("tree", TREE, repeats=tree)
    return Answers(PROMPTS[: len(plain[0])], [Way("plain", PLAIN, repeats=plain), other]), other


@pytest.mark.parametrize(("seconds", "counts"), [((5.0,), 5.0), ((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 3.0, 2.0), 2.0)])
def test_the_answer_of_the_median_time_counts_with_all_that_is_its_own(
    seconds: tuple[float, ...], counts: float
) -> None:
    way = Way("tree", TREE, repeats=[[answered(taken, 1, 2), answered(9.0 - taken, 3)] for taken in seconds])
    assert way.answers[0] == answered(counts, 1, 2)
    tally = way.tally([0])
    assert (tally.seconds, tally.round_seconds, tally.rounds_per_tree) == (counts, [counts], {f"{counts}": 1})
    assert way.answers[1].seconds == sorted(9.0 - taken for taken in seconds)[(len(seconds) - 1) // 2]


def test_a_speed_up_of_a_repeat_is_over_the_plain_steps_of_that_repeat() -> None:
    plain = [[answered(seconds, 1, 2), answered(1.0, 3)] for seconds in (1.0, 4.0, 2.0)]
    tree = [[answered(seconds, 1, 2), answered(1.0, 3)] for seconds in (1.0, 1.0, 4.0)]
    found, way = twice_or_more(plain, tree)
    assert found.speed_ups(way, [0]) == [1.0, 4.0, 0.5]
    assert found.speed_ups(way, [0, 1]) == [1.0, 2.5, 0.6]
    assert found.speed_up(way, [0]) == 2.0  # 1 second of 1, 1, 4 over 2 of 1, 4, 2


def test_an_answer_of_any_repeat_that_is_another_one_is_found() -> None:
    plain = [[answered(1.0, 1, 2), answered(1.0, 3, 4)], [answered(2.0, 1, 2), answered(2.0, 3, 5)]]
    tree = [[answered(1.0, 1, 2), answered(1.0, 3, 4)], [answered(9.0, 1, 9), answered(9.0, 3)]]
    found, way = twice_or_more([*plain, plain[1]], [*tree, tree[1]])
    assert found.differing(way) == [(0, 1, 1), (1, 1, 1)]
    assert found.differing(found.plain) == [(1, 1, 1)]  # plain steps have to repeat themselves


def test_all_prompts_come_before_any_is_repeated_and_the_ways_take_turns(
    rigged_64: Exported, rigged_heads: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[int, str]] = []

    def note(way: Way, prompt: BenchPrompt, done: Answered) -> Answered:
        order.append((PROMPTS.index(prompt), way.kind))
        return done

    changed(monkeypatch, note)
    monkeypatch.setattr(answers, "PAUSE_SECONDS", 0.0)
    slow, steps = Slow(), []
    found = answer_all(
        rigged_64.engine,
        PROMPTS,
        rigged_64.engine.trees[:1],
        [slow],
        max_new_tokens=TOKENS,
        repeats=3,
        progress=lambda: steps.append(1),
    )
    own = [PLAIN, TREE, ADAPTIVE]
    turned = [(prompt, repeat, (prompt + repeat) % 3) for repeat in range(3) for prompt in range(2)]
    warm_up, rest = order[:4], order[4:]
    assert warm_up == [(0, kind) for kind in (*own, "other")]
    assert rest == [(prompt, kind) for prompt, _, turn in turned for kind in (*own[turn:], *own[:turn], "other")]
    assert len(steps) == len(rest) == 3 * 2 * 4
    assert slow.asked[1:] == [(prompt.ids, TOKENS) for _ in range(3) for prompt in PROMPTS]
    for way in found.ways[:3]:
        for repeat in way.repeats:
            assert [one.token_ids for one in repeat] == [rigged_heads.answer(each.ids, TOKENS) for each in PROMPTS]
    assert [one.seconds for one in found.ways[3].answers] == [4.0 * (TOKENS - 1), 5.0 * (TOKENS - 1)]


def changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let real answers be changed behind the engine."""
    decode = Way.decode

    def decoded(way: Way, engine: Any, prompt: BenchPrompt, tokens: int) -> Answered:
        return change(way, prompt, decode(way, engine, prompt, tokens))

    monkeypatch.setattr(Way, "decode", decoded)


def bench(engine: Path, folder: Path, repeats: int) -> tuple[int, dict[str, Any]]:
    """Exit status and document of a run on PROMPTS."""
    file = folder / "prompts.json"
    file.write_text(json.dumps({prompt.category: [prompt.ids] for prompt in PROMPTS}))
    options = ["--engine", engine, "--prompts", file, "--context", "4", "--sweep", "1", "--repeats", "1"]
    options += ["--max-new-tokens", TOKENS, "--threads", "1", "--answer-repeats", repeats]
    options += ["--json", folder / "out.json", "--report", folder / "out.html"]
    return cli.main(list(map(str, options))), json.loads((folder / "out.json").read_text())


def test_reports_show_the_spread_of_the_repeats(
    rigged_64: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(way: Way, _prompt: BenchPrompt, done: Answered) -> Answered:
        return replace(done, seconds=SECONDS[way.kind][max(0, len(way.repeats) - 1)])

    bars: dict[str, list[int]] = {}  # title -> steps that it has, and that were made

    @contextmanager
    def counting(title: str, total: int) -> Iterator[Callable[[], None]]:
        made: list[None] = []
        yield lambda: made.append(None)
        bars[title] = [total, len(made)]

    changed(monkeypatch, timed)
    monkeypatch.setattr(cli, "_steps", counting)
    status, document = bench(rigged_64.bundle, tmp_path, 3)
    told = capsys.readouterr().out
    assert (status, document["settings"]["answer_repeats"]) == (0, 3)
    assert bars["answers"] == [3 * 2 * 3] * 2
    plain, tree, adaptive = document["answers"]["ways"]
    for way, seconds, speed_ups in (
        (plain, SECONDS[PLAIN], [1, 1, 1]),
        (tree, SECONDS[TREE], [1.25, 2, 4]),
        (adaptive, SECONDS[ADAPTIVE], [1.25, 1.25, 0.5]),
    ):
        assert [answer["repeat_seconds"] for answer in way["answers"]] == [list(seconds)] * 2
        for part in (way, *way["categories"].values()):
            assert part["repeat_speed_ups"] == pytest.approx(speed_ups)
            assert part["seconds"] / (2 if part is way else 1) == pytest.approx(sorted(seconds)[1])
    assert "2 prompts, at most 6 tokens each, in 3 repeats: median answers (least to largest of the repeats)" in told
    assert re.search(r"(?m)^  plain steps +\S+ +1\.00  ", told)
    assert re.search(r"(?m)^  a_tree .* 2\.00 \(1\.25 to 4\.00\)  ", told)
    assert "over plain steps, median answers (least to largest of 3 repeats), and tokens per round" in told
    cell = r"2\.00 x \(1\.25 to 4\.00\), \d\.\d\d +1\.25 x \(0\.50 to 1\.25\), \d\.\d\d"
    assert len(re.findall(rf"(?m)^  (?:a|b|together) +[12] +\S+ +{cell}$", told)) == 3
    assert "exact: each of 2 answers in 2 ways, 3 times, is token for token that of plain steps" in told
    page = (tmp_path / "out.html").read_text()
    assert "1.25 ×</span> plain decoding: whole answers to 2 prompts in 3 repeats (0.50 to 1.25), as" in page
    assert page.count("<td>2.00 (1.25 to 4.00)</td>") == 1 and page.count("<td>2.00 x (1.25 to 4.00), ") == 3
    assert "Tokens per second over plain steps, median answers (least to largest of 3 repeats)" in page


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (PLAIN, "plain steps: 1 of 2 answers are not the same in every repeat; the first is {}\n"),
        (TREE, "a_tree: 1 of 2 answers are not those of plain steps; the first is {}; medusa-verify"),
    ],
    ids=[PLAIN, TREE],
)
def test_a_repeat_that_is_not_exact_is_told_and_gives_exit_status_1(
    kind: str,
    told: str,
    rigged_64: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(way: Way, prompt: BenchPrompt, done: Answered) -> Answered:
        if way.kind != kind or prompt.ids != [7] or len(way.repeats) < 2:
            return done
        done.token_ids[3] ^= 1
        return replace(done, seconds=1e6)  # never the median

    changed(monkeypatch, wrong)
    status, document = bench(rigged_64.bundle, tmp_path, 2)
    assert (status, document["exact"]) == (1, False)
    assert f"NOT EXACT: {told.format('prompt 2 from token 4 on in repeat 2')}" in capsys.readouterr().out
    differing = {way["kind"]: way["differing"] for way in document["answers"]["ways"]}
    assert differing.pop(kind) == [{"prompt": 1, "token": 3, "repeat": 1}]
    assert set(map(tuple, differing.values())) == {()}


def test_answers_that_are_written_once_are_reported_without_repeats(benched: Benched) -> None:
    assert benched.document["settings"]["answer_repeats"] == 1
    of_repeats = {"repeat_speed_ups", "repeat_seconds", "repeat"}
    for way in benched.document["answers"]["ways"]:
        parts = (way, *way["categories"].values(), *way["groups"].values(), *way["answers"], *way["differing"])
        assert not any(of_repeats & set(part) for part in parts)
    new = benched.document["answers"]["ways"][1]
    one = {"token_ids", "timed_tokens", "seconds", "round_seconds", "published", "trees"}
    assert all(set(answer) == one for answer in new["answers"])
    assert f"answers to 5 prompts, at most {MAX_NEW_TOKENS} tokens each; time per round in the pNN\n" in benched.text
    assert "by category: tokens per second over plain steps (tokens per round)\n" in benched.text
    assert re.search(r"(?m)^  even +3 +\S+(?: +\d\.\d\d x \(\d\.\d\d\)){3} +\d\.\d\d x$", benched.text)
    assert "repeats" not in benched.text.lower() and " repeats" not in benched.report.read_text()
