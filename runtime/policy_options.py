"""The options of a command that choose the acceptance policy and its parameters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.policy import OF_DRAWS, PARAMETERS, ROOTS, TYPICAL, TYPICAL_NOTE, AcceptancePolicy, takers


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add `--acceptance` and the parameters; `policy_of` reads them."""
    group = parser.add_argument_group("acceptance")
    group.add_argument(
        "--acceptance",
        default=AcceptancePolicy.name,
        metavar="POLICY",
        help="greedy: the tokens of plain greedy decoding; sample: tokens drawn from the model's own distribution;"
        " rejection: of the same distribution, by a chain of drafts drawn from the heads;"
        f" typical: likely drafts are accepted, which {TYPICAL_NOTE}. One that the bundle was exported with;"
        " default: %(default)s",
    )
    default = AcceptancePolicy
    options: tuple[tuple[str, Callable[[str], object], str], ...] = (
        ("--temperature", float, f"0 is greedy; default: {default.temperature:g}"),
        ("--top-k", int, f"only the K likeliest tokens, 0 for all; default: {default.top_k}"),
        ("--top-p", float, f"only the likeliest tokens of together this probability; default: {default.top_p:g}"),
        ("--min-p", float, f"only tokens of this fraction of the largest probability; default: {default.min_p:g}"),
        ("--seed", int, "of the draws: the same seed gives the same answer; default: another one each time"),
        (
            "--repetition-penalty",
            float,
            "divides positive logits of tokens that are in prompt or answer, multiplies negative ones, 1 is off; for"
            f" engines exported with --repetition-penalty; default: {default.repetition_penalty:g}",
        ),
        ("--posterior-threshold", float, f"epsilon of typical; default: {default.posterior_threshold:g}"),
        ("--posterior-alpha", float, f"alpha of typical; default: {default.posterior_alpha:g}"),
        ("--typical-root", str, f"the token behind the accepted ones: {' or '.join(ROOTS)}; default: {ROOTS[0]}"),
    )
    for option, kind, text in options:
        group.add_argument(option, type=kind, help=text)


def policy_of(options: argparse.Namespace) -> AcceptancePolicy:
    """The policy that the options choose; `options.engine` is the bundle or plan, which a hint may look into.

    Raises:
        UserError: an unknown policy, a parameter that it does not take or that would do nothing, or one out of range.
    """
    taken = PARAMETERS[AcceptancePolicy(options.acceptance).name]
    parameters = {name: getattr(options, name) for name in PARAMETERS[TYPICAL]}
    given = {name: value for name, value in parameters.items() if value is not None}
    for name, value in given.items():
        if name not in taken and not (name == "temperature" and value == 0):  # which is greedy
            raise UserError(
                f"--{name.replace('_', '-')} is given, but --acceptance {options.acceptance} has no such parameter",
                f"drop it, or {_to_take(name, options.engine)}",
            )
    policy = AcceptancePolicy(options.acceptance, **given)
    if policy.name == TYPICAL and policy.typical_root == ROOTS[0]:
        for name in (name for name in OF_DRAWS if name in given):
            raise UserError(
                f"--{name.replace('_', '-')} is given, but --acceptance {TYPICAL} draws nothing",
                f"drop it, or give --typical-root {ROOTS[1]}",
            )
    return policy


def _to_take(parameter: str, engine: Path) -> str:
    """What to do for an answer that heeds a parameter: which of its policies there are, or how there are some.

    Raises:
        UserError: there is no such bundle or plan.
    """
    from medusa_engine.runtime.engine import PLAN_SUFFIX
    from medusa_engine.runtime.manifest import read_manifest
    from medusa_engine.runtime.plan import ACCEPTANCES, read_plan

    wanted = takers(parameter)
    if engine.suffix == PLAN_SUFFIX and not engine.is_dir():
        there, mend = read_plan(engine).policies, "build a plan with medusa-build"
        wanted = [name for name in wanted if name in ACCEPTANCES]
    else:
        there, mend = read_manifest(engine).policies, "export the model with medusa-export"
    usable = [name for name in wanted if name in there]
    return f"give --acceptance {' or '.join(usable)}" if usable else f"{mend} --acceptance {' or '.join(wanted)}"
