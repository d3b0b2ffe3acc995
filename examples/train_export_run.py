"""From a model without heads to an engine with its own tree.

    python examples/train_export_run.py MODEL FOLDER [TOKENS]

MODEL is a checkpoint with a chat template, FOLDER takes all that is made, and TOKENS says how much the model writes to
train its heads on: 2 million for heads worth having, which takes hours on a CPU. The least, to see the steps, is 1:
data are stored by 64 conversations, and so many are written, which takes minutes. Each step is the command of its name,
as docs/training.md has it in a shell.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from medusa_engine.exporter.cli import main as medusa_export
from medusa_engine.runtime.cli import main as medusa_run
from medusa_engine.training.distill_cli import main as medusa_distill
from medusa_engine.training.train_cli import main as medusa_train
from medusa_engine.training.tree_cli import main as medusa_tree

PROMPTS = ("Name three rivers.", "What is rain?", "Write a short poem.", "How do I boil an egg?")  # better 40 or more


def step(command: Callable[[Sequence[str]], int], *arguments: str | Path) -> None:
    """Run a command; it has said what is wrong where it fails."""
    print("==", command.__module__, *arguments, flush=True)
    if status := command([str(argument) for argument in arguments]):
        sys.exit(status)


def main(model: str, folder: Path, tokens: str = "2000000") -> None:
    prompts, calibration, tree = folder / "prompts.txt", folder / "calibration.json", folder / "tree.json"
    data, heads, engine = folder / "data", folder / "heads", folder / "engine"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prompts.write_text("\n".join(PROMPTS))
    except OSError as error:
        sys.exit(f"{folder}: cannot write there: {error.strerror}\ngive another folder")
    step(medusa_distill, "--model", model, "-o", data, "--owned-tokens", tokens)
    step(medusa_train, "--model", model, "--data", data, "-o", heads, "--heads", "3")
    step(medusa_export, "--model", model, "--heads", heads, "--tree", "8", "-o", engine, "--force")
    step(medusa_tree, "calibrate", "--engine", engine, "--prompts", prompts, "--chat", "-o", calibration)
    step(medusa_tree, "search", calibration, "--for-engine", engine, "-o", tree)
    step(medusa_run, "--engine", engine, "--tree", tree, "--chat", "--prompt", PROMPTS[0], "--stats")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
