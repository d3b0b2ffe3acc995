"""Trees made in Python, side by side: `python examples/custom_tree.py [ENGINE]`.

A tree is an input of the engine: any that is within its limits runs without a new export. The answers are the same.
"""

import sys
from itertools import product

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import Tree, parse_tree

PROMPT = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return"


def wide(ranks: int, depth: int) -> Tree:
    """Every path of the best `ranks` candidates of each head."""
    paths = [path for length in range(1, depth + 1) for path in product(range(ranks), repeat=length)]
    return parse_tree([list(path) for path in paths], f"{ranks} ranks, {depth} deep")


def main(engine: Engine) -> None:
    root = parse_tree([], "root alone")  # as plain decoding: one token per round
    context = parse_tree([[0], ["L"], ["L", "L"], ["L", "L", "L"]], "heads and context")  # "L": copied from the context
    answers = {tree: engine.generate(PROMPT, max_new_tokens=32, tree=tree) for tree in (root, wide(2, 2), context)}
    for tree, answer in answers.items():
        same = "the same answer" if answer.token_ids == answers[root].token_ids else "ANOTHER ANSWER"
        rate = answer.generated_tokens / answer.rounds
        print(f"{tree.name:18} {rate:.2f} tokens per round, {same}; {tree.sizes}")


if __name__ == "__main__":
    try:
        main(Engine.open(sys.argv[1] if len(sys.argv) > 1 else "engines/smollm2-135m"))
    except UserError as error:
        sys.exit(str(error))
