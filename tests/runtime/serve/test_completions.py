"""/v1/completions: what is answered, whole and in pieces; the answers are those of the engine itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from serving import Serving, serving

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.policy import AcceptancePolicy

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPT = [5, 1, 4]


def test_answer_is_the_engines(ids_server: Serving, own_heads: Exported) -> None:
    expected = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=20)
    document = ids_server.complete(PROMPT, model="tiny", max_tokens=20)
    (choice,) = document["choices"]
    assert choice["token_ids"] == expected.token_ids
    assert choice["prompt_token_ids"] == PROMPT
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert (document["object"], document["model"]) == ("text_completion", "tiny")
    usage = document["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 20, 23)
    facts = document["medusa"]
    assert facts["published_per_round"] == expected.published_per_round
    assert facts["acceptance"] == {"policy": "greedy", "preserves_distribution": True}


def test_text_prompt_gives_text_to_openais_client(chat_server: Serving, chat_engine: Engine) -> None:
    expected = chat_engine.generate("hello there", max_new_tokens=12, ignore_eos=True)
    extra = {"ignore_eos": True}
    answer = chat_server.openai.completions.create(model="tiny", prompt="hello there", max_tokens=12, extra_body=extra)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12

    ids = chat_engine.encode("hello there")
    for prompt in (ids, [ids], ["hello there"]):
        same = chat_server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=12, extra_body=extra)
        assert same.choices[0].text == expected.text


def test_streamed_pieces_joined_are_the_whole_answer(chat_server: Serving, chat_engine: Engine) -> None:
    expected = chat_engine.generate("hello there", max_new_tokens=12, ignore_eos=True)
    stream = chat_server.openai.completions.create(
        model="tiny",
        prompt="hello there",
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    ids = [token for chunk in chunks for token in chunk.model_dump()["choices"][0]["token_ids"]]
    assert ids == expected.token_ids
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage is not None and last.usage.total_tokens == expected.prompt_tokens + 12
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def test_stream_is_events_that_end_with_done(ids_server: Serving, own_heads: Exported) -> None:
    expected = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=9)
    response = ids_server.post("/v1/completions", prompt=PROMPT, max_tokens=9, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    # One chunk for the prompt's ids, one for each round, one for how it ended; a bundle without tokenizer shows ids.
    per_round = [choice["token_ids"] for choice in choices[1:-1]]
    assert [len(ids) for ids in per_round] == expected.published_per_round
    assert [token for ids in per_round for token in ids] == expected.token_ids
    assert "usage" not in json.loads(events[-1].removeprefix("data: "))


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_small_budgets_give_exactly_that_many(ids_server: Serving, tokens: int) -> None:
    document = ids_server.complete(PROMPT, max_tokens=tokens)
    assert len(document["choices"][0]["token_ids"]) == tokens == document["usage"]["completion_tokens"]
    assert document["choices"][0]["finish_reason"] == "length"


def test_completion_without_max_tokens_has_openais_sixteen(ids_server: Serving) -> None:
    assert ids_server.complete(PROMPT)["usage"]["completion_tokens"] == 16
    assert ids_server.complete(PROMPT, max_tokens=None, stop=None)["usage"]["completion_tokens"] == 16


def test_end_of_the_context_is_length_and_the_exact_reason_is_told(chat_server: Serving) -> None:
    document = chat_server.complete([5, 6, 7], max_tokens=1000, ignore_eos=True)
    assert document["usage"]["completion_tokens"] == 64 - 3
    assert (document["choices"][0]["finish_reason"], document["medusa"]["finish_reason"]) == ("length", "cache_full")


def test_stop_text_ends_the_text_before_it(chat_server: Serving, chat_engine: Engine) -> None:
    whole = chat_engine.generate("hello there", max_new_tokens=30, ignore_eos=True).text
    assert whole is not None and len(whole) > 4
    stop = whole[len(whole) // 2 :][:2]
    for given in (stop, [stop], ["never there", stop]):
        document = chat_server.post(
            "/v1/completions", prompt="hello there", max_tokens=30, ignore_eos=True, stop=given
        ).json()
        assert document["choices"][0]["text"] == whole[: whole.index(stop)]
        assert document["choices"][0]["finish_reason"] == "stop"


def test_stop_token_is_stop_unless_it_is_ignored(rigged_32: Exported, rigged_heads: Any) -> None:
    with serving(rigged_32.engine) as server:
        document = server.complete([0], max_tokens=30)
        assert document["choices"][0]["token_ids"] == rigged_heads.answer([0], 10)
        assert document["choices"][0]["finish_reason"] == "stop"
        document = server.complete([0], max_tokens=15, ignore_eos=True)
        assert document["choices"][0]["token_ids"] == rigged_heads.answer([0], 15)


def test_deadline_of_server_or_request_ends_an_answer(own_heads: Exported) -> None:
    with serving(own_heads.engine, deadline_ms=1e-3) as server:
        for limit in (None, 60_000):  # a request cannot have more than the server gives
            document = server.complete(PROMPT, max_tokens=500, deadline_ms=limit)
            assert document["medusa"]["finish_reason"] == "deadline"
            assert document["choices"][0]["finish_reason"] == "length"
    with serving(own_heads.engine) as server:
        assert server.complete(PROMPT, max_tokens=500, deadline_ms=1e-3)["medusa"]["finish_reason"] == "deadline"
        assert server.complete(PROMPT, max_tokens=20, deadline_ms=60_000)["medusa"]["finish_reason"] == "length"


def test_sampling_fields_draw_as_the_engine_does(ids_server: Serving, own_heads: Exported) -> None:
    chosen = {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 7}
    policy = AcceptancePolicy("sample", **chosen)  # type: ignore[arg-type]
    expected = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=20, acceptance=policy).token_ids
    greedy = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=20).token_ids
    assert expected != greedy
    for acceptance in (None, "sample"):
        document = ids_server.complete(PROMPT, max_tokens=20, acceptance=acceptance, **chosen)
        assert document["choices"][0]["token_ids"] == expected
        assert document["medusa"]["acceptance"] == policy.document()
    answer = ids_server.openai.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=20,
        temperature=1.5,
        top_p=0.9,
        seed=7,
        extra_body={"top_k": 20, "min_p": 0.01},
    )
    assert answer.model_dump()["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({}, "greedy"),
        ({"seed": 3}, "greedy"),
        ({"top_p": 1, "top_k": 0, "min_p": 0}, "greedy"),
        ({"temperature": 0, "top_p": 0.9}, "greedy"),
        ({"temperature": 1}, "sample"),
        ({"top_p": 0.9}, "sample"),
        ({"top_k": 5}, "sample"),
        ({"min_p": 0.1}, "sample"),
        ({"acceptance": "typical", "posterior_threshold": 0.2}, "typical"),
        ({"acceptance": "greedy", "temperature": 0}, "greedy"),
    ],
)
def test_fields_choose_the_policy(ids_server: Serving, fields: dict[str, Any], policy: str) -> None:
    acceptance = ids_server.complete(PROMPT, max_tokens=4, **fields)["medusa"]["acceptance"]
    assert acceptance["policy"] == policy
    assert acceptance["preserves_distribution"] == (policy != "typical")
    assert {name: acceptance[name] for name in fields if name in acceptance} == {
        name: value for name, value in fields.items() if name in acceptance
    }


def test_server_may_have_another_policy_for_requests_that_choose_none(own_heads: Exported) -> None:
    parameters = {"temperature": 0.7, "top_p": 0.8}
    with serving(own_heads.engine, acceptance="sample", parameters=parameters) as server:

        def policy(**fields: Any) -> dict[str, Any]:
            acceptance: dict[str, Any] = server.complete(PROMPT, max_tokens=4, **fields)["medusa"]["acceptance"]
            return {name: acceptance[name] for name in ("policy", "temperature", "top_p") if name in acceptance}

        assert policy() == {"policy": "sample", **parameters}
        assert policy(top_p=0.5) == {"policy": "sample", "temperature": 0.7, "top_p": 0.5}
        assert policy(temperature=0) == {"policy": "greedy"}
        assert policy(acceptance="typical") == {"policy": "typical", "temperature": 1.0}


def test_plain_decoding_gives_the_same_ids_in_one_token_rounds(own_heads: Exported, ids_server: Serving) -> None:
    expected = ids_server.complete(PROMPT, max_tokens=12)["choices"][0]["token_ids"]
    with serving(own_heads.engine, speculation=False) as server:
        document = server.complete(PROMPT, max_tokens=12)
    assert document["choices"][0]["token_ids"] == expected
    assert document["medusa"]["published_per_round"] == [1] * 12


def test_models_are_listed_and_described(ids_server: Serving) -> None:
    (model,) = ids_server.openai.models.list().data
    assert model.id == "tiny" and model.owned_by == "medusa-engine"
    assert ids_server.openai.models.retrieve("tiny").model_dump()["max_model_len"] == 600
    assert ids_server.http.get("/health").json() == {"status": "ok"}
