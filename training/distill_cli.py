"""`medusa-distill`: let a model write the conversations that its heads are trained on."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_engine.runtime.command_line import run_command
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.device import DTYPES, choose_device, choose_dtype


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-distill",
        description="Write training conversations with the model itself; an interrupted run goes on where it was.",
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder, hub id or .gguf file, with a chat template"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, help="data folder")
    parser.add_argument("--prompts", type=Path, help="first user turns, one per line; default: the model writes them")
    parser.add_argument("--owned-tokens", type=int, help="assistant tokens to write; default: 100000")
    parser.add_argument("--batch", type=int, help="conversations written at once; default: 64")
    parser.add_argument("--max-length", type=int, help="tokens of a conversation; default: 448")
    parser.add_argument("--seed", type=int, help="of every random choice; default: 0")
    parser.add_argument("--device", help="where the model runs; default: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 where the device computes in it, else float32"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    from medusa_engine.exporter import checkpoint
    from medusa_engine.runtime.manifest import file_sha256
    from medusa_engine.runtime.text import Tokenizer, read_prompt_file
    from medusa_engine.training.batch_engine import BatchEngine
    from medusa_engine.training.distill import DistillSettings, distill

    names = ("output", "owned_tokens", "batch", "max_length", "seed")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    device = choose_device(options.device)
    settings = DistillSettings(**chosen, dtype=choose_dtype(options.dtype, device))
    prompts = None
    if options.prompts:
        prompts = [line for line in read_prompt_file(options.prompts).splitlines() if line.strip()]
    source = checkpoint.find_source(options.model)
    with tempfile.TemporaryDirectory(prefix="medusa-distill-") as name:
        folder = Path(name)
        model = checkpoint.load_model(source)
        saved = checkpoint.save_tokenizer(source, folder)
        if saved is None:
            raise UserError(f"{options.model}: has no tokenizer", "give a model with tokenizer and chat template")
        tokenizer = Tokenizer.open(folder)
        stop_ids = frozenset(checkpoint.stop_token_ids(model, saved))
        provenance = {
            "target_sha256": {file.name: file_sha256(file) for file in source.weight_files()},
            "tokenizer_sha256": file_sha256(folder / "tokenizer.json"),
            "prompts": None if options.prompts is None else file_sha256(options.prompts),
        }
        engine = BatchEngine(
            model, batch=settings.batch, max_length=settings.max_length, dtype=settings.dtype, device=device
        )
        distill(engine, tokenizer, settings, stop_ids=stop_ids, prompts=prompts, provenance=provenance)


if __name__ == "__main__":
    sys.exit(main())
