"""Which acceptance policy a request asks for, by OpenAI's sampling fields or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import GREEDY, PARAMETERS, SAMPLE, TYPICAL, AcceptancePolicy
from medusa_engine.runtime.serve.errors import RequestError, naming
from medusa_engine.runtime.serve.fields import Fields
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.strict_json import shown

_PARAMETERS = {field.name: field for field in fields(AcceptancePolicy) if field.name != "name"}
_NARROWING = ("top_k", "top_p", "min_p")  # which only a draw can heed
_PENALTY = "repetition_penalty"  # goes with every policy
_USUAL = ("temperature", *_NARROWING, "seed")  # clients send them always: with a temperature of 0 they are no mistake


def choose_policy(given: Fields, engine: Engine, server: ServeOptions) -> AcceptancePolicy:
    """The policy asked for: the server's, unless `acceptance` names one or the request asks for draws.

    A temperature of 0 is greedy; one above, or a top_k, top_p or min_p that narrows, asks for draws. What a request
    does not give of its policy's parameters is the server's if that has the same policy, a
    repetition penalty in any case.

    Raises:
        RequestError: a parameter is out of range or does nothing, the bundle has no such policy, or the server's tree
            is none for it; names the field.
    """
    acceptance = given.text("acceptance")
    parameters = _parameters(given)
    policy_name, asker = _policy_name(acceptance, parameters, server)
    with naming("acceptance"):
        AcceptancePolicy(policy_name)
    for name, value in parameters.items():
        with naming(name):
            AcceptancePolicy(TYPICAL, **{name: value})  # which takes every parameter
    inherited = (*_PARAMETERS,) if policy_name == server.acceptance else (_PENALTY,)
    defaults = {name: value for name, value in server.parameters.items() if name in inherited}
    taken = {name: value for name, value in {**defaults, **parameters}.items() if name in PARAMETERS[policy_name]}
    policy = AcceptancePolicy(policy_name, **taken)
    _refuse_idle(policy, parameters, strict=acceptance is not None and parameters.get("temperature") != 0)
    with naming(asker):
        engine.check_policy(policy, speculation=server.speculation)
        if server.tree is not None:
            engine.plans(policy, tree=server.tree)
    return policy


def _parameters(given: Fields) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for name, field in _PARAMETERS.items():
        readers: dict[object, Callable[[str], object]] = {"int": given.whole, "str": given.text}
        value = readers.get(field.type, given.number)(name)
        if value is not None:
            parameters[name] = value
    return parameters


def _policy_name(acceptance: str | None, parameters: Mapping[str, Any], server: ServeOptions) -> tuple[str, str | None]:
    """The name of the policy, and the field that asks for it; None for the server's own."""
    if acceptance is not None:
        return acceptance, "acceptance"
    temperature = parameters.get("temperature")
    if temperature == 0:
        return GREEDY, "temperature"
    askers = ["temperature"] if temperature is not None else []
    askers += [
        name for name in _NARROWING if parameters.get(name, _PARAMETERS[name].default) != _PARAMETERS[name].default
    ]
    if server.acceptance == GREEDY and askers:
        return SAMPLE, askers[0]
    return server.acceptance, None


def _refuse_idle(policy: AcceptancePolicy, parameters: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse parameters that do nothing under the policy; not a seed, and the usual ones only if `strict`."""
    effective = policy.document()
    for name, value in parameters.items():
        if name in effective or name == "seed" or (name in _USUAL and not strict):
            continue
        if name == "temperature" or value != _PARAMETERS[name].default:
            problem = f"{name} is {shown(value)}, but does nothing with acceptance {policy.name}"
            raise RequestError(f"{problem}: leave it out, or give another acceptance", param=name)
