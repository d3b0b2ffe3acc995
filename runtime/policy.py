"""What a user chooses of acceptance: the policy and its parameters, checked where they enter."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields
from typing import Any

from medusa_engine.runtime.errors import UserError, WrongValueError
from medusa_engine.runtime.strict_json import shown

GREEDY, SAMPLE, REJECTION, TYPICAL = "greedy", "sample", "rejection", "typical"
POLICIES = (GREEDY, SAMPLE, REJECTION, TYPICAL)
PENALTY = "penalty"
ROOTS = ("argmax", "drawn")
TYPICAL_NOTE = "does not preserve the model's distribution"

OF_DRAWS = ("top_k", "top_p", "min_p", "seed")  # what concerns tokens that are drawn, and nothing else
_DRAWS = ("temperature", *OF_DRAWS)
PARAMETERS: dict[str, tuple[str, ...]] = {  # policy -> what it takes
    GREEDY: ("repetition_penalty",),
    SAMPLE: (*_DRAWS, "repetition_penalty"),
    REJECTION: (*_DRAWS, "repetition_penalty"),
    TYPICAL: (*_DRAWS, "repetition_penalty", "posterior_threshold", "posterior_alpha", "typical_root"),
}
_LEAST_TEMPERATURE = 1e-5  # below, differences of logits leave the range of fp32
_MOST_TEMPERATURE = 100.0
_PENALTIES = (0.01, 100.0)  # beyond, products of logits come near the end of fp32
_SEEDS = 1 << 64
_MOST_ALPHA = 1e9  # far above where epsilon is always the smaller one
_MOST_TOP_K = (1 << 31) - 1


def takers(parameter: str) -> list[str]:
    """The policies that take a parameter."""
    return [policy for policy, parameters in PARAMETERS.items() if parameter in parameters]


def graph_variant(policy: str, *, penalised: bool) -> str:
    """What tells graphs apart: the policy that accepts, and whether repetition is penalised: `sample.penalty`."""
    return f"{policy}.{PENALTY}" if penalised else policy


@dataclass(frozen=True)
class AcceptancePolicy:
    """How a round accepts, and how its tokens are chosen.

    `greedy` writes the target's argmax. `sample` draws every token from the target's processed distribution, as plain
    sampling does. `rejection` draws a chain of drafts, each from its head's own distribution under the same parameters,
    and accepts and corrects them so that tokens are distributed as those of `sample`. `typical` accepts drafts that the
    target finds likely enough: a quality heuristic, which does not preserve the model's distribution.

    Attributes:
        name: one of POLICIES.
        temperature: divides the logits; 0 is greedy.
        top_k: only the k largest logits count; 0 for all. Equal logits at the edge all count.
        top_p: of what is left only the fewest tokens of together at least this probability count; 1 for all.
        min_p: of what is left only tokens of at least this fraction of the largest probability count; 0 for all.
        seed: of every draw; drawn itself if it is not given.
        repetition_penalty: the logit of every token of the prompt, the answer and the row's own path is divided by it
            where it is positive, else multiplied, before anything else; 1 is off.
        posterior_threshold: epsilon of `typical`, the largest probability that it ever asks of a draft.
        posterior_alpha: alpha of `typical`: it asks for less than epsilon where alpha * exp(-entropy) is less.
        typical_root: the token behind the accepted ones under `typical`: the target's `argmax`, or `drawn` as `sample`
            does. top_k, top_p, min_p and seed concern that draw alone.

    Raises:
        UserError: an unknown policy, a parameter out of range, or one that the policy does not take; names it.
            A temperature of 0 and any seed go with every policy.
    """

    name: str = GREEDY
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    repetition_penalty: float = 1.0
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    typical_root: str = ROOTS[0]

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise WrongValueError("acceptance", shown(self.name), f"give one of {', '.join(POLICIES)}")
        if self.typical_root not in ROOTS:
            raise WrongValueError("typical_root", shown(self.typical_root), f"give one of {', '.join(ROOTS)}")
        for name, least, most in (("top_k", 0, _MOST_TOP_K), ("seed", 0, _SEEDS - 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise WrongValueError(name, shown(value), f"give a whole number from {least} to {most}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise WrongValueError(name, shown(value), "give a number")
        self._check(
            "temperature",
            self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature <= _MOST_TEMPERATURE,
            f"give 0, which is greedy, or {_LEAST_TEMPERATURE} to {_MOST_TEMPERATURE:g}",
        )
        self._check("top_p", 0 < self.top_p <= 1, "give a probability above 0, up to 1, which is off")
        self._check("min_p", 0 <= self.min_p <= 1, "give a fraction from 0, which is off, to 1")
        self._check(
            "repetition_penalty",
            _PENALTIES[0] <= self.repetition_penalty <= _PENALTIES[1],
            f"give {_PENALTIES[0]} to {_PENALTIES[1]:g}; 1 is off, above it repetition becomes less likely",
        )
        self._check("posterior_threshold", 0 <= self.posterior_threshold <= 1, "give a probability from 0 to 1")
        self._check("posterior_alpha", 0 <= self.posterior_alpha <= _MOST_ALPHA, f"give 0 to {_MOST_ALPHA:g}")
        for parameter in fields(self)[1:]:
            name, value = parameter.name, getattr(self, parameter.name)
            takes = name in PARAMETERS[self.name] or name == "seed" or (name == "temperature" and value == 0)
            if not takes and value != parameter.default:
                raise UserError(
                    f"{name} is {shown(value)}, but acceptance {self.name} has no such parameter",
                    f"leave it out, or choose {' or '.join(takers(name))}, if the bundle was exported with it",
                )

    def _check(self, name: str, right: bool, hint: str) -> None:
        if not right:  # NaN is never right: it compares with nothing
            raise WrongValueError(name, shown(getattr(self, name)), hint)

    @property
    def effective(self) -> str:
        """The policy that it amounts to: greedy where one token has all the probability."""
        if self.temperature == 0 or (self.name in (SAMPLE, REJECTION) and self.top_k == 1):
            return GREEDY
        return self.name

    @property
    def penalises(self) -> bool:
        """Whether the repetition penalty is on."""
        return self.repetition_penalty != 1

    @property
    def graph(self) -> str:
        """Its variant of the graphs, see `graph_variant`."""
        return graph_variant(self.effective, penalised=self.penalises)

    @property
    def exact(self) -> bool:
        """Whether answers are those of plain decoding: the same tokens, or tokens of the same distribution."""
        return self.name != TYPICAL

    @property
    def reproduces_plain(self) -> bool:
        """Whether plain decoding gives the same tokens, with the same seed where they are drawn."""
        return self.effective in (GREEDY, SAMPLE)

    @property
    def draws(self) -> bool:
        """Whether the seed matters."""
        return self.effective in (SAMPLE, REJECTION) or (self.effective == TYPICAL and self.typical_root == "drawn")

    def document(self) -> dict[str, Any]:
        """The JSON form: every parameter that had an effect, and whether the distribution is preserved."""
        used = {"name"}
        if self.name != GREEDY:
            used |= {"temperature"}
        if self.penalises:
            used |= {"repetition_penalty"}
        if self.draws:
            used |= set(OF_DRAWS)
        if self.name in (SAMPLE, REJECTION) and self.top_k == 1:
            used |= {"top_k"}  # which makes it greedy
        if self.name == TYPICAL:
            used |= {"posterior_threshold", "posterior_alpha", "typical_root"}
        chosen = {field.name: getattr(self, field.name) for field in fields(self) if field.name in used}
        return {"policy": chosen.pop("name"), **chosen, "preserves_distribution": self.exact}

    def __str__(self) -> str:
        document = self.document()
        name, exact = document.pop("policy"), document.pop("preserves_distribution")
        text = ", ".join((name, *(f"{key} {value}" for key, value in document.items())))
        return text if exact else f"{text}; {TYPICAL_NOTE}"
