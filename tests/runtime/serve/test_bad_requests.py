"""Requests that are refused: with the field named, in OpenAI's JSON shape, and without harm to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from serving import Serving, serving

from medusa_engine.runtime.chat_template import ChatTemplate
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.serve.options import ServeOptions
from medusa_engine.runtime.tree import parse_tree

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPT = [5, 1, 4]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def unharmed(ids_server: Serving, own_heads: Exported) -> Iterator[None]:
    """Behind every test the next answer is the right one, and nothing is left running."""
    yield
    expected = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=8).token_ids
    assert ids_server.complete(PROMPT, max_tokens=8)["choices"][0]["token_ids"] == expected
    assert (ids_server.pool.running, ids_server.pool.waiting) == (0, 0)


def refused(response: Any, status: int = 400, param: str | None = None, code: str | None = None) -> str:
    """The message of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
    error = document["error"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    message: str = error["message"]
    assert 10 < len(message) < 200 and "Traceback" not in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [PROMPT, PROMPT]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[[5]]]}, "prompt[0]"),
        ({"prompt": [5, 61]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [5, 1.0]}, "prompt[1]"),
        ({"prompt": [5, True]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [10**500]}, "prompt[0]"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -5}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"acceptance": "lucky"}, "acceptance"),
        ({"acceptance": ""}, "acceptance"),
        ({"acceptance": 3}, "acceptance"),
        ({"acceptance": "greedy", "temperature": 1}, "temperature"),
        ({"acceptance": "greedy", "top_p": 0.5}, "top_p"),
        ({"acceptance": "sample", "posterior_alpha": 0.5}, "posterior_alpha"),
        ({"posterior_threshold": 0.5}, "posterior_threshold"),
        ({"acceptance": "typical", "typical_root": "x"}, "typical_root"),
        ({"acceptance": "typical", "posterior_threshold": 3}, "posterior_threshold"),
        ({"stop": "x"}, "stop"),  # no tokenizer
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"often": True}}, "stream_options.often"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": "1"}, "deadline_ms"),
        ({"deadline_ms": 5e-324}, "deadline_ms"),
        ({"deadline_ms": float("nan")}, "deadline_ms"),
        ({"deadline_ms": float("inf")}, "deadline_ms"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stream": True, "stream_options": {"include_usage": float("nan")}}, "stream_options.include_usage"),
        ({"prompt": [5, float("nan")]}, "prompt[1]"),
        ({"seed": 10**300}, "seed"),
        ({"seed": 10**4000}, "seed"),
        ({"top_k": 10**300}, "top_k"),
        ({"max_tokens": -(10**300)}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"what is this": 3}, "what is this"),
        ({"\ud800": 3}, "\ud800"),
    ],
)
def test_bad_field_is_named(ids_server: Serving, fields: dict[str, Any], param: str) -> None:
    for stream in (None, True):  # a refusal is no stream
        body = json.dumps({"stream": stream, "prompt": PROMPT, "max_tokens": 4} | fields)
        response = ids_server.http.post("/v1/completions", content=body, headers=JSON)
        code = response.json()["error"]["code"]
        assert code in (None, "unsupported_parameter", "unknown_parameter")
        message = refused(response, param=param, code=code)
        assert param.partition("[")[0] in message or param == "\ud800"
        if fields.keys() & {"stream", "stream_options"}:
            break


def test_prompt_longer_than_the_context_is_told_apart(ids_server: Serving) -> None:
    response = ids_server.post("/v1/completions", prompt=[5] * 601)
    assert "601" in refused(response, param="prompt", code="context_length_exceeded")


def test_unknown_model_is_not_found(ids_server: Serving) -> None:
    for response in (
        ids_server.post("/v1/completions", model="gpt", prompt=PROMPT),
        ids_server.post("/v1/chat/completions", model="gpt", messages=[]),
        ids_server.http.get("/v1/models/gpt"),
        ids_server.http.get("/v1/models/some/gpt"),
    ):
        assert "tiny" in refused(response, 404, "model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="gpt"):
        ids_server.openai.completions.create(model="gpt", prompt=PROMPT)


def test_sampling_of_a_bundle_without_it_is_refused_and_says_so(shared_heads: Exported) -> None:
    with serving(shared_heads.engine) as server:
        for field, value in {"temperature": 0.7, "top_p": 0.9, "acceptance": "sample"}.items():
            response = server.post("/v1/completions", prompt=PROMPT, **{field: value})
            assert "exported without --acceptance sample" in refused(response, param=field)
        assert server.complete(PROMPT, temperature=0)["usage"]["completion_tokens"] == 16


def test_model_without_a_chat_template_says_so(
    ids_server: Serving, plain_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = [{"role": "user", "content": "hi"}]
    assert "no tokenizer" in refused(ids_server.post("/v1/chat/completions", messages=turn), param="messages")
    with serving(Engine.open(plain_bundle, threads=1)) as server:
        message = refused(server.post("/v1/chat/completions", messages=turn), param="messages")
    assert "no chat template" in message
    assert str(plain_bundle) not in message and str(plain_bundle) in caplog.text


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ raise_exception('no') }}", "refuses the messages: no"), ("{% if %}", "line 1"), ("{{ 1 / 0 }}", "fails")],
)
def test_what_a_chat_template_says_is_told_without_the_servers_files(
    plain_bundle: Path, caplog: pytest.LogCaptureFixture, template: str, words: str
) -> None:
    engine = Engine.open(plain_bundle, threads=1)
    assert engine.tokenizer is not None
    origin = str(plain_bundle / "chat_template.jinja")
    engine.tokenizer._chat_template = ChatTemplate(template, origin=origin, special_tokens={})
    with serving(engine) as server:
        response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    message = refused(response, param="messages")
    assert words in message and str(plain_bundle) not in message
    assert origin in caplog.text


BODIES = {
    "empty": b"",
    "not JSON": b"prompt=hello",
    "cut": b'{"prompt": [5',
    "a list": b"[1, 2]",
    "null": b"null",
    "NaN": b"NaN",
    "infinite": b"1e999",
    "twice": b'{"prompt": [5], "prompt": [6]}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": [5]}'.encode("utf-16"),
    "long number": b"9" * 10_000,
    "deep list": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and cut": b"[" * 500_000,
}


@pytest.mark.parametrize("kind", BODIES)
def test_body_that_is_no_json_object_is_refused(ids_server: Serving, kind: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(ids_server.http.post(path, content=BODIES[kind], headers=JSON))


def test_many_unknown_keys_and_wide_values_are_refused(ids_server: Serving) -> None:
    wide = {f"key {index}": index for index in range(20_000)}
    refused(ids_server.post("/v1/completions", prompt=PROMPT, **wide), param="key 0", code="unknown_parameter")
    refused(ids_server.post("/v1/completions", prompt=["a"] * 50_000), param="prompt")
    refused(
        ids_server.post("/v1/completions", prompt=PROMPT, logit_bias=wide),
        param="logit_bias",
        code="unsupported_parameter",
    )


def test_body_of_another_type_is_refused(ids_server: Serving) -> None:
    body = json.dumps({"prompt": PROMPT}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = ids_server.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert "application/json" in refused(response, 415)
    charset = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert ids_server.http.post("/v1/completions", content=body, headers=charset).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_limit_is_413(own_heads: Exported, declared: bool) -> None:
    def chunks() -> Iterator[bytes]:  # sent without a Content-Length
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    with serving(own_heads.engine, max_body_bytes=1000) as server:
        fits = json.dumps({"prompt": PROMPT}).encode().ljust(1000)
        assert server.http.post("/v1/completions", content=fits, headers=JSON).status_code == 200
        for size in (1001, 3_000_000):
            body = fits.ljust(size)
            response = server.http.post("/v1/completions", content=body if declared else chunks(), headers=JSON)
            assert "1000 bytes" in refused(response, 413, code="request_too_large")
        assert server.complete(PROMPT)["usage"]["completion_tokens"] == 16


def test_wrong_path_or_method_has_the_same_shape(ids_server: Serving) -> None:
    assert "/v1/completions" in refused(ids_server.http.get("/v1/nothing"), 404)
    assert "/v1/completions" in refused(ids_server.http.post("/v1/completions/", json={}), 404)
    response = ids_server.http.get("/v1/completions")
    assert "send POST" in refused(response, 405)
    assert response.headers["allow"] == "POST"
    assert "send GET" in refused(ids_server.post("/v1/models"), 405)


def test_key_is_asked_for_everywhere_but_at_health(own_heads: Exported) -> None:
    with serving(own_heads.engine, api_key="s3cret") as server:
        assert server.complete(PROMPT)["usage"]["completion_tokens"] == 16
        assert server.openai.models.list().data[0].id == "tiny"
        del server.http.headers["Authorization"]
        for scheme in ("bearer", "BEARER", "Bearer  "):
            headers = {"Authorization": f"{scheme} s3cret"}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        for given in (None, "Bearer wrong", "Bearer s3cre", "Bearer s3crett", "s3cret", "Basic s3cret", "Bearer \xe9"):
            headers = {} if given is None else {b"Authorization": given.encode("latin-1")}
            for response in (
                server.http.post("/v1/completions", json={"prompt": PROMPT}, headers=headers),
                server.http.get("/v1/models", headers=headers),
                server.http.get("/metrics", headers=headers),
                server.http.get("/nowhere", headers=headers),
            ):
                message = refused(response, 401, code="invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer" and "s3cret" not in message
        assert server.http.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize(
    "options",
    [
        {"sessions": 0},
        {"sessions": 10**9},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"deadline_ms": 0},
        {"deadline_ms": float("nan")},
        {"model_name": ""},
        {"api_key": ""},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ServeOptions(**({"model_name": "tiny"} | options))


def test_a_tree_that_the_policy_cannot_use_is_refused_at_the_start_or_by_the_field(every_graph: Exported) -> None:
    branching = parse_tree([[0], [1]], "branching")
    with (
        pytest.raises(UserError, match="branching"),
        serving(every_graph.engine, acceptance="rejection", tree=branching),
    ):
        pass
    with serving(every_graph.engine, tree=branching) as server:
        response = server.post("/v1/completions", prompt=PROMPT, max_tokens=2, acceptance="rejection")
        assert "branching" in refused(response, param="acceptance")
        assert server.complete(PROMPT, max_tokens=2)["choices"]


def test_a_server_without_adaptive_speculation_measures_no_trees(own_heads: Exported) -> None:
    for adaptive in (True, False):
        engine = Engine.open(own_heads.bundle, threads=1)
        with serving(engine, adaptive=adaptive) as server:
            server.complete(PROMPT, max_tokens=4)
        assert bool(engine._adaptive) == adaptive


def test_top_k_of_one_is_greedy_and_no_mistake(ids_server: Serving) -> None:
    answer = ids_server.complete(PROMPT, max_tokens=8, acceptance="sample", top_k=1)
    assert answer["choices"][0]["token_ids"] == ids_server.complete(PROMPT, max_tokens=8)["choices"][0]["token_ids"]
    assert answer["medusa"]["acceptance"]["top_k"] == 1


def test_the_servers_repetition_penalty_goes_with_every_policy(every_graph: Exported) -> None:
    with serving(every_graph.engine, parameters={"repetition_penalty": 1.5}) as server:
        for temperature in (0, 0.9):
            answer = server.complete(PROMPT, max_tokens=2, temperature=temperature, seed=1)
            assert answer["medusa"]["acceptance"]["repetition_penalty"] == 1.5
