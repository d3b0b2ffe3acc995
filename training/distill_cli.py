"""`medusa-distill`: what heads are trained on, from conversations that the model writes or from given ones."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_engine.runtime.command_line import add_version, run_command
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.training.device import DTYPES, choose_device, choose_dtype

if TYPE_CHECKING:
    from medusa_engine.runtime.text import Tokenizer
    from medusa_engine.training.chat_data import ChatData

GIVEN_MAX_LENGTH = 2048  # of a given conversation, where the model has as many positions


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-distill",
        description="Write training conversations with the model itself, or store the model's features of given ones; "
        "an interrupted run goes on where it was.",
    )
    add_version(parser)
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder, hub id or .gguf file, with a chat template"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, help="data folder")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, help="first user turns, one per line; default: the model writes them")
    source.add_argument(
        "--conversations",
        type=Path,
        metavar="FILE",
        help="store the features of given conversations instead of writing new ones: JSON Lines or one JSON array of "
        "ShareGPT, messages or input_ids rows",
    )
    parser.add_argument("--owned-tokens", type=int, help="assistant tokens to write; default: 100000")
    parser.add_argument("--batch", type=int, help="conversations written or read at once; default: 64")
    parser.add_argument("--max-length", type=int, help="tokens of a conversation; default: 448 written, 2048 given")
    parser.add_argument("--seed", type=int, help="of every random choice; default: 0")
    parser.add_argument("--device", help="where the model runs; default: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 where the device is fast in it, else float32"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(build_parser(), _run, arguments, extra="train")


def _run(options: argparse.Namespace) -> None:
    from medusa_engine.exporter import checkpoint
    from medusa_engine.exporter.saved_tokenizer import save_tokenizer, stop_token_ids
    from medusa_engine.runtime.manifest import file_sha256
    from medusa_engine.runtime.text import Tokenizer, read_prompt_file

    _check(options)
    prompts, data = None, None
    if options.prompts:
        prompts = [line for line in read_prompt_file(options.prompts).splitlines() if line.strip()]
        if not prompts:
            raise UserError(f"{options.prompts}: holds no prompts", "write one prompt per line")
    if options.conversations:
        from medusa_engine.training.chat_data import read_chat_data

        data = read_chat_data(options.conversations)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    source = checkpoint.find_source(options.model)
    with tempfile.TemporaryDirectory(prefix="medusa-distill-") as name:
        folder = Path(name)
        model = checkpoint.load_model(source)
        saved = save_tokenizer(source, folder)
        target = _Target(
            model=model,
            tokenizer=None if saved is None else Tokenizer.open(folder),
            stop_ids=frozenset(stop_token_ids(model, saved)),
            device=device,
            dtype=dtype,
            provenance={
                "target_sha256": {file.name: file_sha256(file) for file in source.weight_files()},
                "tokenizer_sha256": None if saved is None else file_sha256(folder / "tokenizer.json"),
            },
        )
        if data is None:
            _write(options, target, prompts)
        else:
            _read(options, target, data)


@dataclass(frozen=True)
class _Target:
    model: Any
    tokenizer: Tokenizer | None
    stop_ids: frozenset[int]
    device: str
    dtype: str
    provenance: dict[str, Any]


def _check(options: argparse.Namespace) -> None:
    for name in ("owned_tokens", "batch", "max_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: is not positive", "give a number of at least 1")
    if options.seed is not None and options.seed < 0:
        raise UserError(f"--seed is {options.seed}", "give 0 or more")
    for name in ("owned_tokens", "seed"):
        if options.conversations and getattr(options, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')}: means nothing with --conversations, which stores every usable row",
                "leave it out, or shorten the file",
            )


def _write(options: argparse.Namespace, target: _Target, prompts: Sequence[str] | None) -> None:
    """Let the model write conversations."""
    from medusa_engine.runtime.manifest import file_sha256
    from medusa_engine.training.batch_engine import BatchEngine
    from medusa_engine.training.distill import DistillSettings, distill

    if target.tokenizer is None:
        raise UserError(f"{options.model}: has no tokenizer", "give a model with tokenizer and chat template")
    names = ("output", "owned_tokens", "batch", "max_length", "seed")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings = DistillSettings(**chosen, dtype=target.dtype)
    positions = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and settings.max_length > positions:
        raise UserError(
            f"--max-length {settings.max_length}: the model has {counted(positions, 'position')}",
            f"give at most {positions}",
        )
    engine = BatchEngine(
        target.model, batch=settings.batch, max_length=settings.max_length, dtype=target.dtype, device=target.device
    )
    distill(
        engine,
        target.tokenizer,
        settings,
        stop_ids=target.stop_ids,
        prompts=prompts,
        provenance=target.provenance | {"prompts": None if options.prompts is None else file_sha256(options.prompts)},
    )


def _read(options: argparse.Namespace, target: _Target, data: ChatData) -> None:
    """Store the features of given conversations."""
    from medusa_engine.runtime.manifest import file_sha256
    from medusa_engine.training.chat_examples import make_examples
    from medusa_engine.training.extract import extract_features

    config = target.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or GIVEN_MAX_LENGTH
    if options.max_length is not None and options.max_length > positions:
        raise UserError(
            f"--max-length {options.max_length}: the model has {counted(positions, 'position')}", "give fewer tokens"
        )
    examples = make_examples(
        data,
        options.conversations,
        tokenizer=target.tokenizer,
        stop_ids=target.stop_ids,
        vocab_size=config.vocab_size,
        max_length=options.max_length or min(GIVEN_MAX_LENGTH, positions),
    )
    for line in data.report.lines():
        _report(line)
    rows = {"used": data.report.used, "skipped": dict(data.report.skipped)}
    extract_features(
        target.model,
        examples,
        options.output,
        provenance=target.provenance | {"conversations_sha256": file_sha256(options.conversations), "rows": rows},
        dtype=target.dtype,
        device=target.device,
        **({} if options.batch is None else {"batch": options.batch}),
        report=_report,
    )


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
