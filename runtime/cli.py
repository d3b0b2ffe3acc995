"""`medusa-run`: answer a prompt with an exported engine."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_engine.runtime.answer_options import DEFAULT_MAX_NEW_TOKENS, AnswerOptions, Message
from medusa_engine.runtime.command_line import add_provider, add_version, run_command
from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.huge_pages import restart_with_huge_pages
from medusa_engine.runtime.policy import TYPICAL, TYPICAL_NOTE, AcceptancePolicy
from medusa_engine.runtime.policy_options import add_policy_options, policy_of
from medusa_engine.runtime.strict_json import shown

if TYPE_CHECKING:  # imported where they are needed: loading them can be interrupted quietly
    from medusa_engine.runtime.engine import Engine
    from medusa_engine.runtime.generation import Generation
    from medusa_engine.runtime.session import Session
    from medusa_engine.runtime.tree import Tree


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa-run",
        description="Answer a prompt with an exported engine; greedy, token for token what plain decoding gives, unless"
        " --acceptance says otherwise.",
    )
    parser.add_argument(
        "--engine", required=True, type=Path, help="bundle folder of medusa-export, or NAME.plan of medusa-build"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="prompt text (without any prompt option: standard input, as from a file)")
    prompt.add_argument(
        "--prompt-file", type=Path, help="file that holds the prompt, UTF-8; one newline at its end is dropped"
    )
    prompt.add_argument("--prompt-ids", help="prompt as token ids: 1,2,3")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="apply the model's chat template; on a terminal without a prompt, hold a conversation",
    )
    parser.add_argument("--system", help="system message of the chat")
    parser.add_argument("--max-new-tokens", type=int, default=DEFAULT_MAX_NEW_TOKENS, help="default: %(default)s")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at stop tokens")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--deadline-ms", type=float, help="end after the round that takes longer, prompt included")
    parser.add_argument(
        "--tree",
        type=Path,
        help="verify this tree, a file or the name of a shipped one, in every round; the engine stays as it is",
    )
    parser.add_argument(
        "--no-adaptive",
        action="store_true",
        help="verify the bundle's first tree in every round; without it and --tree, answers change between the bundle's"
        " trees and plain steps to what is fastest, the tokens stay the same",
    )
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding: no tree, no heads")
    parser.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    add_provider(parser)
    parser.add_argument("--no-verify", action="store_true", help="do not hash the engine's files before the run")
    add_policy_options(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    output.add_argument("--stats", action="store_true", help="print tokens and time per round to stderr")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer again plainly and with each tree of the engine, or the given one: print to stderr the tokens per"
        " second and per round of each, and whether the ids are the same",
    )
    add_version(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    if arguments is None:  # the process is this command's own
        restart_with_huge_pages()
    return run_command(build_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    from medusa_engine.runtime.engine import Engine
    from medusa_engine.runtime.tree import load_tree

    if options.system is not None and not options.chat:
        raise UserError("--system is given without --chat", "add --chat to apply the chat template")
    if options.compare and options.no_speculation:
        raise UserError("--compare and --no-speculation are given together", "drop --no-speculation to compare")
    if options.compare and options.deadline_ms is not None:
        raise UserError("--compare and --deadline-ms are given together", "drop one: plain decoding takes longer")
    if options.compare and options.max_new_tokens == 0:
        raise UserError("--compare and --max-new-tokens 0 are given together", "ask for 1 token or more to compare")
    if options.deadline_ms is not None and not options.deadline_ms / 1000 > 0:  # NaN is not
        raise WrongValueError("deadline_ms", shown(options.deadline_ms), "give a time above 0")
    if options.tree and options.no_speculation:
        raise UserError("--tree and --no-speculation are given together", "drop one: plain decoding has no tree")
    policy = policy_of(options)
    if options.compare and not policy.reproduces_plain:
        reason = f"which {TYPICAL_NOTE}" if policy.name == TYPICAL else "whose draws are other ones with drafts"
        raise UserError(
            f"--compare is given with --acceptance {policy.name}, {reason}",
            "drop it: plain decoding gives other ids",
        )
    conversation = options.chat and _no_prompt(options) and sys.stdin is not None and sys.stdin.isatty()
    prompt = None if conversation else _prompt(options)  # read before the engine is loaded
    tree = load_tree(options.tree) if options.tree else None
    engine = Engine.open(
        options.engine, threads=options.threads, verify=not options.no_verify, provider=options.provider
    )
    if conversation:
        with engine.session() as session:
            _converse(engine, session, options, tree, policy)
    elif prompt == "" and options.chat:
        raise UserError("the message is empty", "give the chat at least one word")
    elif isinstance(prompt, str) and options.chat:
        _answer(engine, options, tree, policy, engine.encode([*_system(options), {"role": "user", "content": prompt}]))
    elif isinstance(prompt, str):
        _answer(engine, options, tree, policy, engine.encode(prompt))
    elif prompt is not None:
        _answer(engine, options, tree, policy, prompt)


def _no_prompt(options: argparse.Namespace) -> bool:
    return options.prompt is None and options.prompt_file is None and options.prompt_ids is None


def _prompt(options: argparse.Namespace) -> str | list[int]:
    if options.prompt_ids is not None:
        if options.chat:
            raise UserError("--chat is given with --prompt-ids", "give the conversation's prompt as text")
        return _parse_ids(options.prompt_ids)
    if options.prompt_file is not None:
        from medusa_engine.runtime.text import read_prompt_file

        return _without_last_newline(read_prompt_file(options.prompt_file))
    if options.prompt is not None:
        return str(options.prompt)
    hint = "give the prompt as UTF-8 text, or with --prompt or --prompt-file"
    if sys.stdin is None:  # closed before the start
        raise UserError("standard input: it is closed", hint)
    if sys.stdin.isatty():
        print("the prompt, ended with Ctrl-D:", file=sys.stderr)
    try:
        return _without_last_newline(sys.stdin.buffer.read().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: byte {error.start} is not UTF-8 text", hint) from error
    except OSError as error:
        raise UserError(f"standard input: cannot read it: {error.strerror or error}", hint) from error


def _without_last_newline(text: str) -> str:
    """The text without the newline that editors and `echo` put behind it, as llama.cpp reads prompts."""
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _parse_ids(text: str) -> list[int]:
    ids = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,18}\s*", part):
            raise UserError(f"--prompt-ids: {shown(part.strip())} is not a token id", "write ids as 1,2,3")
        ids.append(int(part))
    return ids


def _system(options: argparse.Namespace) -> list[Message]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _answer(
    engine: Engine,
    options: argparse.Namespace,
    tree: Tree | None,
    policy: AcceptancePolicy,
    prompt_ids: list[int],
    session: Session | None = None,
) -> Generation:
    """Write one answer to standard output, then what the options ask to know about it."""
    from medusa_engine.runtime.comparison import compare, document, same, table
    from medusa_engine.runtime.stats import statistics

    if options.compare and len(prompt_ids) == engine.limits.max_length:
        raise UserError("the prompt fills the cache: there is no answer to compare", "give a shorter prompt")
    asked: AnswerOptions = {
        "prompt_ids": prompt_ids,
        "max_new_tokens": options.max_new_tokens,
        "ignore_eos": options.ignore_eos,
        "stop": options.stop,
        "deadline": None if options.deadline_ms is None else options.deadline_ms / 1000,
        "speculation": not options.no_speculation,
        "tree": tree,
        "adaptive": not options.no_adaptive,
        "acceptance": policy,
    }
    stream = (session or engine).stream(**asked)
    for piece in stream:
        if not options.json:
            # Without a tokenizer the ids are the answer.
            text = piece.text if engine.tokenizer else "".join(f"{token} " for token in piece.token_ids)
            print(text, end="", flush=True)
    generation = stream.generation
    report = {**generation.document(), "acceptance": policy.document()}
    if not options.json:
        print(flush=True)
    if options.stats:
        speculation = not options.no_speculation
        print(statistics(generation, engine.manifest, speculation=speculation, acceptance=policy), file=sys.stderr)
    exact = True
    if options.compare:
        written = compare(engine, asked, generation)
        exact = same(written)
        report["compared"] = document(written)
        if not options.json:
            print(table(written), file=sys.stderr)
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    if not exact:
        raise UserError(
            "plain decoding gave other ids: two logits are nearly equal here, or the engine is at fault",
            "please report the model, the tree and the prompt",
        )
    return generation


def _converse(
    engine: Engine, session: Session, options: argparse.Namespace, tree: Tree | None, policy: AcceptancePolicy
) -> None:
    """Answer line after line until end of input; a turn sees as much of the conversation as the cache holds."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and history
    print("Ctrl-D ends the conversation, Ctrl-C an answer", file=sys.stderr)
    turns: list[Message] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line})
        try:
            generation = _answer(engine, options, tree, policy, _fit(engine, _system(options), turns), session)
        except UserError as error:
            print(f"{error.problem}\n{error.hint}", file=sys.stderr)
            turns.pop()
            continue
        except KeyboardInterrupt:
            print()
            turns.pop()
            continue
        if generation.finish_reason != "stop":
            print(f"(cut: {generation.finish_reason})", file=sys.stderr)
        turns.append({"role": "assistant", "content": generation.text or ""})


def _fit(engine: Engine, system: list[Message], turns: list[Message]) -> list[int]:
    """The conversation's token ids, without its oldest turns where the cache has no room for them."""
    prompt_ids = engine.encode([*system, *turns])
    while len(prompt_ids) >= engine.limits.max_length and len(turns) > 1:
        del turns[:2]
        print("the conversation is longer than the cache: its oldest turn is dropped", file=sys.stderr)
        prompt_ids = engine.encode([*system, *turns])
    return prompt_ids


if __name__ == "__main__":
    sys.exit(main())
