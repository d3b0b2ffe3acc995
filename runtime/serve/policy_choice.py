"""Which acceptance policy a request asks for, by OpenAI's sampling fields or by name."""

from __future__ import annotations

from dataclasses import fields

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import GREEDY, SAMPLE, AcceptancePolicy
from medusa_engine.runtime.serve.errors import RequestError, naming
from medusa_engine.runtime.serve.fields import Fields
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.strict_json import shown

_PARAMETERS = {field.name: field for field in fields(AcceptancePolicy) if field.name != "name"}
_NARROWING = ("top_k", "top_p", "min_p")  # which only a draw can heed


def choose_policy(given: Fields, engine: Engine, server: ServeOptions) -> AcceptancePolicy:
    """The policy asked for: the server's, unless `acceptance` names one or the request asks for draws.

    A temperature of 0 is greedy; one above, or a top_k, top_p or min_p that narrows, asks for draws. What a request
    does not give of its policy's parameters is the server's, if that has the same policy.

    Raises:
        RequestError: a parameter is out of range or does nothing, or the bundle has no such policy; names the field.
    """
    acceptance = given.text("acceptance")
    parameters: dict[str, object] = {}
    for name, field in _PARAMETERS.items():
        kind = str(field.type)
        value: float | str | None
        value = given.whole(name) if kind == "int" else given.text(name) if kind == "str" else given.number(name)
        if value is not None:
            parameters[name] = value
    temperature = parameters.get("temperature")
    narrowing = [name for name in _NARROWING if name in parameters and parameters[name] != _PARAMETERS[name].default]
    name, asker = acceptance or server.acceptance, "acceptance" if acceptance else None
    if acceptance is None and temperature == 0:
        name = GREEDY
    elif acceptance is None and name == GREEDY and (temperature or narrowing):
        name, asker = SAMPLE, "temperature" if temperature else narrowing[0]

    with naming("acceptance"):
        AcceptancePolicy(name)
    for parameter, value in parameters.items():
        with naming(parameter):
            AcceptancePolicy(name, **{parameter: value})  # type: ignore[arg-type]
    defaults = server.parameters if name == server.acceptance else {}
    policy = AcceptancePolicy(name, **{**defaults, **parameters})  # type: ignore[arg-type]
    if acceptance is not None and temperature != 0:
        _refuse_idle(policy, parameters)
    with naming(asker):
        engine.check_policy(policy, speculation=server.speculation)
    return policy


def _refuse_idle(policy: AcceptancePolicy, parameters: dict[str, object]) -> None:
    """Refuse parameters that do nothing under the policy that the request names; a seed never hurts."""
    for name, value in parameters.items():
        if name == "seed" or name in policy.document():
            continue
        if name == "temperature" or value != _PARAMETERS[name].default:
            message = (
                f"{name} is {shown(value)}, which does nothing with acceptance {policy.name}: leave one of them out"
            )
            raise RequestError(message, param=name)
