"""The same answer in each way that an engine can write it, side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

from medusa_engine.runtime.answer_options import AnswerOptions
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.generation import Generation
from medusa_engine.runtime.tree import ADAPTIVE_NAME, PLAIN_NAME, Tree

_HEADING = ("way", "proposes", "tokens/s", "x plain", "tokens/round", "same ids")


class Written(NamedTuple):
    """An answer, and the way it was written.

    Attributes:
        way: `plain`, the name of its tree, or `adaptive`.
        proposes: `heads`, `lookup`, `heads + lookup`; empty for plain decoding.
    """

    way: str
    proposes: str
    generation: Generation

    @property
    def tokens_per_second(self) -> float:
        return self.generation.generated_tokens / self.generation.timings.decode


def compare(engine: Engine, asked: AnswerOptions, generation: Generation) -> list[Written]:
    """Write an answer again: plainly, then with each tree of the engine unless it was asked for one tree.

    Args:
        asked: what the answer was asked with.
        generation: the answer, of at least one token, which becomes the last way.

    Raises:
        UserError: as of an answer.
    """
    fixed = asked["tree"] or (None if asked["adaptive"] else engine.tree)
    plainly: AnswerOptions = {**asked, "speculation": False, "tree": None}
    written = [Written(PLAIN_NAME, "", engine.generate(**plainly))]
    if fixed is not None:
        return [*written, Written(fixed.name, proposes(fixed), generation)]
    for tree in engine.trees:
        always: AnswerOptions = {**asked, "tree": tree}
        written.append(Written(tree.name, proposes(tree), engine.generate(**always)))
    return [*written, Written(ADAPTIVE_NAME, "what is fastest", generation)]


def proposes(tree: Tree) -> str:
    """Where the drafts of a tree come from."""
    return " + ".join(name for name, count in (("heads", tree.heads), ("lookup", tree.lookup)) if count)


def same(written: list[Written]) -> bool:
    """Whether all have the tokens of plain decoding, the first."""
    return all(each.generation.token_ids == written[0].generation.token_ids for each in written)


def table(written: list[Written]) -> str:
    """A line for each way, plain decoding first."""
    plain = written[0]
    rows = [_HEADING]
    for each in written:
        done, speed = each.generation, each.tokens_per_second
        ratio, per_round = speed / plain.tokens_per_second, done.generated_tokens / done.rounds
        same_ids = "yes" if done.token_ids == plain.generation.token_ids else "NO"
        rows.append((each.way, each.proposes, f"{speed:.1f}", f"{ratio:.2f}", f"{per_round:.2f}", same_ids))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def document(written: list[Written]) -> list[dict[str, Any]]:
    """The JSON form of the ways beside the answer itself, the last of them."""
    plain = written[0].generation.token_ids
    return [
        {"way": each.way, **each.generation.document(), "same_ids": each.generation.token_ids == plain}
        for each in written
    ]
