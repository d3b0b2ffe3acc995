"""Say what a checkpoint's generation settings ask for: answers are greedy until a user asks for something else."""

from __future__ import annotations

from typing import Any

from medusa_engine.runtime.policy import SAMPLE

_DRAWS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # and the value at which each is off
_PENALTY = "repetition_penalty"


def generation_note(generation_config: Any) -> str | None:
    """One line with the options of medusa-run that do what the settings ask for; None if they are greedy and plain.

    Args:
        generation_config: of the model in transformers.
    """
    chosen: list[str] = []
    export: list[str] = []
    if generation_config.do_sample is True:
        chosen += ["--acceptance", SAMPLE]
        export += ["--acceptance", SAMPLE]
        for name, off in _DRAWS.items():
            value = getattr(generation_config, name, None)
            if _is_number(value) and value != off:
                chosen += [_option(name), f"{value:g}"]
    penalty = getattr(generation_config, _PENALTY, None)
    if _is_number(penalty) and penalty != 1:
        chosen += [_option(_PENALTY), f"{penalty:g}"]
        export.append(_option(_PENALTY))
    if not chosen:
        return None
    return (
        "the model's generation_config.json asks for other than greedy answers, which are the default here:"
        f" medusa-run {' '.join(chosen)} on an engine exported with {' '.join(export)}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
