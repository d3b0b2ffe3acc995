"""/v1/chat/completions: messages through the model's template, whole and in pieces, turn after turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import Serving, serving

from medusa_engine.runtime.engine import Engine

TURN: Any = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}
EXTRA = {"ignore_eos": True, "return_token_ids": True}


def test_chat_answer_is_the_engines(chat_server: Serving, chat_engine: Engine) -> None:
    expected = chat_engine.generate(TURN, max_new_tokens=10, ignore_eos=True)
    answer = chat_server.openai.chat.completions.create(model="tiny", messages=TURN, max_tokens=10, extra_body=EXTRA)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    document = answer.model_dump()
    assert document["choices"][0]["token_ids"] == expected.token_ids
    assert document["prompt_token_ids"] == chat_engine.encode(TURN)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_streamed_deltas_joined_are_the_whole_message(chat_server: Serving, chat_engine: Engine) -> None:
    expected = chat_engine.generate(TURN, max_new_tokens=10, ignore_eos=True)
    with chat_server.openai.chat.completions.create(
        model="tiny",
        messages=TURN,
        max_completion_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXTRA,
    ) as stream:
        first, *chunks, last = list(stream)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    ids = [token for chunk in chunks for token in chunk.model_dump()["choices"][0]["token_ids"]]
    assert ids == expected.token_ids
    assert [chunk.choices[0].finish_reason for chunk in (first, *chunks)] == [None] * len(chunks) + ["length"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 10


def test_chat_without_max_tokens_ends_with_the_context(chat_server: Serving, chat_engine: Engine) -> None:
    answer = chat_server.openai.chat.completions.create(model="tiny", messages=TURN, extra_body=EXTRA)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64 - len(chat_engine.encode(TURN))
    assert answer.choices[0].finish_reason == "length"
    assert answer.model_extra["medusa"]["finish_reason"] == "cache_full"  # the request set no budget


def test_content_may_be_a_list_of_text_parts(chat_server: Serving) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole, split = (
        chat_server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=4, return_token_ids=True
        ).json()
        for content in ("hi", parts)
    )
    assert split["prompt_token_ids"] == whole["prompt_token_ids"]
    assert split["choices"] == whole["choices"]


def test_message_that_openais_client_gave_may_be_handed_back(chat_engine: Engine) -> None:
    with serving(chat_engine) as server:
        first = server.openai.chat.completions.create(model="tiny", messages=TURN, max_tokens=6, extra_body=EXTRA)
        turns = [*TURN, first.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
        second = server.openai.chat.completions.create(model="tiny", messages=turns, max_tokens=6, extra_body=EXTRA)
    expected = chat_engine.generate(
        [{"role": turn["role"], "content": turn["content"]} for turn in turns], max_new_tokens=6, ignore_eos=True
    )
    assert second.model_dump()["choices"][0]["token_ids"] == expected.token_ids
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= len(chat_engine.encode(TURN)) - 2


def test_developer_is_the_system_role_of_the_template(chat_server: Serving) -> None:
    # The template knows user and assistant only, and says which role it refuses.
    for role in ("developer", "system"):
        response = chat_server.post("/v1/chat/completions", messages=[{"role": role, "content": "x"}, *TURN])
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages")
        assert "role system not supported" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [*TURN, {"role": "tool", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{**TURN[0], "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{**TURN[0], "mood": "x"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "hi " * 100}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": TURN, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": TURN, "tool_choice": "required"}, "tool_choice"),
        ({"messages": TURN, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": TURN, "logprobs": True}, "logprobs"),
        ({"messages": TURN, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": TURN, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": TURN, "prompt": "hi"}, "prompt"),
    ],
)
def test_bad_chat_is_refused_with_the_field_named(chat_server: Serving, fields: dict[str, Any], param: str) -> None:
    response = chat_server.http.post("/v1/chat/completions", content=json.dumps(fields), headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"] or param == "messages"


def test_harmless_values_of_unsupported_fields_are_accepted(chat_server: Serving) -> None:
    harmless = {
        "n": 1,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "logprobs": False,
        "top_logprobs": None,
        "store": False,
        "user": "someone",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
    }
    response = chat_server.post("/v1/chat/completions", messages=TURN, max_tokens=2, **harmless)
    assert response.status_code == 200, response.text
