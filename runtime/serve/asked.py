"""What a request asks for: every field checked, so that what is left to do is to answer."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from medusa_engine.runtime.answer_options import AnswerOptions
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import AcceptancePolicy
from medusa_engine.runtime.serve.errors import RequestError, naming
from medusa_engine.runtime.serve.fields import Fields
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.serve.policy_choice import choose_policy
from medusa_engine.runtime.serve.prompts import chat_ids, completion_ids
from medusa_engine.runtime.stop_strings import StopStrings
from medusa_engine.runtime.strict_json import Unfit, parse_json, shown

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
MOST_STOP_STRINGS = 16

# Fields of OpenAI's interface -> values that ask for nothing which this server does not do.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "store": (False,),
}
_UNSUPPORTED_COMPLETION = _UNSUPPORTED | {"best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",)}
_UNSUPPORTED_CHAT = _UNSUPPORTED | {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "reasoning_effort": (),
    "web_search_options": (),
}
# For OpenAI's bookkeeping: they never change an answer.
_IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)


@dataclass(frozen=True)
class Asked:
    """A request that can be answered.

    Attributes:
        prompt_ids: of the prompt, within the engine's limits.
        options: of the answer, `prompt_ids` included.
        policy: of the answer.
        chat: whether it is a chat completion.
        stream: whether pieces are sent as they come.
        include_usage: whether a stream ends with a chunk of usage.
        return_token_ids: whether token ids are sent beside the text.
    """

    prompt_ids: list[int]
    options: AnswerOptions
    policy: AcceptancePolicy
    chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


def read_request(body: bytes, engine: Engine, server: ServeOptions, *, chat: bool) -> Asked:
    """Check every field of a completion or chat completion.

    Raises:
        RequestError: names the field.
    """
    given = _parse(body)
    check_model(given.text("model"), server)
    policy = choose_policy(given, engine, server)
    stop = _stop(given, engine)
    max_new_tokens = _max_new_tokens(given, chat=chat)
    ignore_eos = given.flag("ignore_eos")
    deadline = _deadline(given, server)
    return_token_ids = given.flag("return_token_ids")
    stream = given.flag("stream")
    include_usage = _include_usage(given, stream=stream)
    for name in _IGNORED:
        given.take(name)
    given.refuse_unsupported(_UNSUPPORTED_CHAT if chat else _UNSUPPORTED_COMPLETION)
    prompt_ids = chat_ids(engine, given) if chat else completion_ids(engine, given)
    given.refuse_others()
    if max_new_tokens is None:
        max_new_tokens = engine.limits.max_length if chat else DEFAULT_COMPLETION_TOKENS  # to the end of the cache
    options: AnswerOptions = {
        "prompt_ids": prompt_ids,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "stop": stop,
        "deadline": deadline,
        "speculation": server.speculation,
        "tree": server.tree,
        "adaptive": server.adaptive,
        "acceptance": policy,
    }
    return Asked(
        prompt_ids=prompt_ids,
        options=options,
        policy=policy,
        chat=chat,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=return_token_ids or engine.tokenizer is None,  # else the answer would have nothing to show
    )


def check_model(name: str | None, server: ServeOptions) -> None:
    """Refuse the name of another model than the server's.

    Raises:
        RequestError: with status 404.
    """
    if name is not None and name != server.model_name:
        raise RequestError(
            f"model {shown(name)} is not served: give {shown(server.model_name)}",
            param="model",
            code="model_not_found",
            status=HTTPStatus.NOT_FOUND,
        )


def _parse(body: bytes) -> Fields:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"the request's body: byte {error.start} is not UTF-8: send JSON in UTF-8") from error
    with naming(None):
        return Fields(parse_json(text, source="the request's body", hint="send a JSON object", unfit=Unfit))


def _stop(given: Fields, engine: Engine) -> list[str]:
    value = given.take("stop")
    stops: list[str] = value if isinstance(value, list) else [] if value is None else [value]  # type: ignore[list-item]
    if len(stops) > MOST_STOP_STRINGS:
        raise RequestError(f"stop has {counted(len(stops), 'text')}: give at most {MOST_STOP_STRINGS}", param="stop")
    for index, stop in enumerate(stops):
        with naming(f"stop[{index}]" if isinstance(value, list) else "stop"):
            StopStrings([stop])
    if stops and engine.tokenizer is None:
        raise RequestError("stop: this model has no tokenizer, so there is no text to stop in", param="stop")
    return stops


def _max_new_tokens(given: Fields, *, chat: bool) -> int | None:
    tokens = given.whole("max_tokens")
    newer = given.whole("max_completion_tokens") if chat else None
    if tokens is not None and newer is not None and tokens != newer:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    return tokens if newer is None else newer


def _deadline(given: Fields, server: ServeOptions) -> float | None:
    """Seconds: the request's `deadline_ms` or the server's, whichever is shorter."""
    value = given.number("deadline_ms")
    if value is not None and not value / 1000 > 0:  # the smallest numbers are 0 s
        given.refuse("deadline_ms", value, "give a time above 0, in milliseconds")
    limits = [milliseconds for milliseconds in (value, server.deadline_ms) if milliseconds is not None]
    return min(limits) / 1000 if limits else None


def _include_usage(given: Fields, *, stream: bool) -> bool:
    options = given.nested("stream_options")
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options is given without stream: set stream to true", param="stream_options")
    include_usage = options.flag("include_usage")
    options.refuse_unsupported({"include_obfuscation": (False,)})
    options.refuse_others()
    return include_usage
