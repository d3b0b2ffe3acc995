"""The prompt of a request: text, token ids, or a conversation; as token ids that the engine takes."""

from __future__ import annotations

from http import HTTPStatus
from typing import NoReturn

from medusa_engine.runtime.answer_options import Message
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.serve.errors import RequestError, naming
from medusa_engine.runtime.serve.fields import Fields
from medusa_engine.runtime.strict_json import shown

# What a model has to know is `developer` for OpenAI's newer models, `system` for all chat templates.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that OpenAI's client writes into the messages it hands back -> values that say nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}


def completion_ids(engine: Engine, fields: Fields) -> list[int]:
    """Token ids of the field `prompt`: a text, a list of token ids, or a list of one of these.

    Raises:
        RequestError: it is none of these, or the engine does not take it.
    """
    prompt = fields.take("prompt")
    if prompt is None:
        raise RequestError("prompt is missing: give a text or a list of token ids", param="prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            message = f"prompt is a list of {counted(len(prompt), 'prompt')}: give one prompt per request"
            raise RequestError(message, param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        with naming("prompt"):
            ids = engine.encode(prompt)
    elif isinstance(prompt, list):
        ids = prompt
    else:
        fields.refuse("prompt", prompt, "give a text or a list of token ids")
    return _checked(engine, ids, "prompt")


def chat_ids(engine: Engine, fields: Fields) -> list[int]:
    """Token ids of the field `messages`, through the model's chat template.

    Raises:
        RequestError: a message is not one, the template refuses them, or the engine does not take them.
    """
    given = fields.take("messages")
    if not isinstance(given, list) or not given:
        problem = "is missing" if given is None else "is empty" if given == [] else f"is {shown(given)}"
        raise RequestError(f"messages {problem}: give a list of messages", param="messages")
    messages = [_message(document, f"messages[{index}]") for index, document in enumerate(given)]
    with naming("messages"):
        ids = engine.encode(messages)
    return _checked(engine, ids, "messages")


def _message(document: object, place: str) -> Message:
    fields = Fields(document, within=f"{place}.")
    role = fields.text("role")
    if role is None or role not in _ROLES:
        problem = "is missing" if role is None else f"{shown(role)} is not supported"
        raise RequestError(f"{place}.role {problem}: give one of {', '.join(_ROLES)}", param=f"{place}.role")
    message = {"role": _ROLES[role], "content": _content(fields.take("content"), f"{place}.content")}
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    fields.refuse_unsupported(_UNSUPPORTED)
    fields.refuse_others()
    return message


def _content(content: object, place: str) -> str:
    """The text of a content, which is a text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problem = "is missing" if content is None else f"is {shown(content)}"
        raise RequestError(f"{place} {problem}: give a text or a list of text parts", param=place)
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(document: object, place: str) -> str:
    fields = Fields(document, within=f"{place}.")
    kind = fields.text("type")
    if kind != "text":
        problem = "is missing" if kind is None else f"{shown(kind)} is not supported"
        raise RequestError(f'{place}.type {problem}: give "text"', param=f"{place}.type")
    text = fields.text("text")
    if text is None:
        raise RequestError(f"{place}.text is missing: give a text", param=f"{place}.text")
    fields.refuse_others()
    return text


def _checked(engine: Engine, ids: list[object] | list[int], param: str) -> list[int]:
    limits = engine.limits
    if not ids:
        _refuse(f"{param} is empty: it has no tokens; give at least one", param)
    if len(ids) > limits.max_length:
        message = f"{param} has {counted(len(ids), 'token')}, but the context holds {limits.max_length}: shorten it"
        _refuse(message, param, code="context_length_exceeded")
    checked: list[int] = []
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            place = f"{param}[{index}]"
            _refuse(f"{place} is {shown(token)}: give token ids from 0 to {limits.vocab_size - 1}", place)
        checked.append(token)
    return checked


def _refuse(message: str, param: str, *, code: str | None = None) -> NoReturn:
    raise RequestError(message, param=param, code=code, status=HTTPStatus.BAD_REQUEST)
