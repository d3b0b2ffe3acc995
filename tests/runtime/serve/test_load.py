"""Many requests at once: exact answers, a bounded queue, sessions that are reused, clients that leave."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from serving import Serving, serving, wait_until

if TYPE_CHECKING:
    from tiny_models import Exported

PROMPT = [5, 1, 4]
CLIENTS = 8
PROMPTS_PER_CLIENT = 20


class Gate:
    """Holds passes until it is opened, and counts those that came."""

    def __init__(self) -> None:
        self.passes = 0
        self.threads: set[int] = set()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.passes += 1
        self.threads.add(threading.get_ident())
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


@pytest.fixture
def server(own_heads: Exported) -> Iterator[Serving]:
    with serving(own_heads.engine, sessions=2, max_queue=2) as server:
        yield server


@pytest.fixture
def gate(server: Serving) -> Iterator[Gate]:
    """Closed, before every pass of the server."""
    gate = Gate()
    undo = server.watch_passes(gate)
    yield gate
    gate.open()
    wait_until(lambda: server.pool.running == 0)
    undo()


def test_eight_clients_get_the_ids_of_the_serial_run(own_heads: Exported) -> None:
    random = np.random.default_rng(8)
    shared = random.integers(0, 61, 12).tolist()  # many begin alike, as chats behind one system prompt do
    prompts = [
        [*shared[: random.integers(0, 13)], *random.integers(0, 61, random.integers(1, 30)).tolist()]
        for _ in range(CLIENTS * PROMPTS_PER_CLIENT)
    ]
    serial = [own_heads.engine.generate(prompt_ids=prompt, max_new_tokens=8).token_ids for prompt in prompts]
    with serving(own_heads.engine, sessions=3, max_queue=CLIENTS) as server:

        def client(number: int) -> list[list[int]]:
            answers = []
            for index in range(number, len(prompts), CLIENTS):
                if index % 2:
                    answer = server.openai.completions.create(model="tiny", prompt=prompts[index], max_tokens=8)
                    answers.append(answer.model_dump()["choices"][0]["token_ids"])
                else:
                    stream = server.openai.completions.create(
                        model="tiny", prompt=prompts[index], max_tokens=8, stream=True
                    )
                    answers.append([token for part in stream for token in part.model_dump()["choices"][0]["token_ids"]])
            return answers

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(client, range(CLIENTS)))
        assert [answers[index % CLIENTS][index // CLIENTS] for index in range(len(prompts))] == serial
        assert server.figure('medusa_requests_total{endpoint="/v1/completions",status="200"}') == len(prompts)
        assert server.figure("medusa_generated_tokens_total") == 8 * len(prompts)
        assert server.figure("medusa_queue_depth") == server.figure("medusa_running_answers") == 0


def test_full_queue_is_429_and_those_in_it_are_answered_in_order(server: Serving, gate: Gate) -> None:
    ended: list[int] = []

    def request(number: int) -> dict[str, Any]:
        document = server.complete([number, 1, 4], max_tokens=4)
        ended.append(number)
        return document

    with ThreadPoolExecutor(4) as pool:
        waiting = []
        for number in range(4):
            waiting.append(pool.submit(request, number))
            wait_until(lambda number=number: server.pool.running + server.pool.waiting == number + 1)  # type: ignore[misc]
        assert server.figure("medusa_queue_depth") == server.figure("medusa_running_answers") == 2

        response = server.post("/v1/completions", prompt=PROMPT)
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "queue_full", None)
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model="tiny", prompt=PROMPT)
        assert server.post("/v1/completions", prompt="x").status_code == 400, "a bad request need not wait to be told"

        gate.open()
        for number, future in enumerate(waiting):
            assert future.result()["choices"][0]["prompt_token_ids"] == [number, 1, 4]
    assert {0, 1} <= set(ended[:3])
    assert server.complete(PROMPT)["usage"]["completion_tokens"] == 16


def test_openais_client_tries_again_and_is_answered(server: Serving, gate: Gate) -> None:
    with ThreadPoolExecutor(5) as pool:
        for number in range(4):
            pool.submit(server.complete, [number], max_tokens=2)
        wait_until(lambda: server.pool.running + server.pool.waiting == 4)
        patient = server.openai.with_options(max_retries=5)
        answer = pool.submit(patient.completions.create, model="tiny", prompt=PROMPT, max_tokens=4)
        refused = 'medusa_requests_total{endpoint="/v1/completions",status="429"}'
        wait_until(lambda: server.figure(refused) > 0)
        gate.open()
        assert answer.result().usage.completion_tokens == 4


def test_passes_run_on_other_threads_and_health_is_answered_meanwhile(server: Serving, gate: Gate) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.complete, PROMPT, max_tokens=4, stream=None) for _ in range(2)]
        wait_until(lambda: gate.passes == 2)
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.http.get("/v1/models").status_code == 200
        assert not any(future.done() for future in waiting)
        gate.open()
        assert all(future.result()["usage"]["completion_tokens"] == 4 for future in waiting)
    assert server.loop_thread.ident not in gate.threads


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_stops_the_passes_and_leaves_the_session_exact(
    own_heads: Exported, server: Serving, gate: Gate, stream: bool
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 500, "stream": stream}
    if stream:
        gate.open()
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            events = (line for line in response.iter_lines() if line.startswith("data: "))
            assert next(events)
            gate.close()  # a pass of the middle of the answer waits here when the client has gone
            before = gate.passes
    else:
        with pytest.raises(openai.APITimeoutError):
            server.openai.with_options(timeout=0.3).completions.create(model="tiny", prompt=PROMPT, max_tokens=500)
        before = 0
    wait_until(lambda: gate.passes > before)
    server.wait_until_clients_have_left()
    gate.open()
    wait_until(lambda: server.pool.running == 0)
    passes = gate.passes
    assert passes <= before + 2, "at most the pass that ran, and one on its way"
    assert server.figure('medusa_answers_total{finish_reason="closed"}') == 1
    status = "200" if stream else "499"
    assert server.figure(f'medusa_requests_total{{endpoint="/v1/completions",status="{status}"}}') == 1

    again = [*PROMPT, *own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=1).token_ids, 7]
    document = server.complete(again, max_tokens=12)
    assert gate.passes > passes
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(PROMPT)
    expected = own_heads.engine.generate(prompt_ids=again, max_new_tokens=12).token_ids
    assert document["choices"][0]["token_ids"] == expected


def test_client_that_leaves_the_queue_makes_room(server: Serving, gate: Gate) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.complete, PROMPT, max_tokens=2) for _ in range(2)]
        wait_until(lambda: server.pool.running == 2)
        with pytest.raises(openai.APITimeoutError):
            server.openai.with_options(timeout=0.3).completions.create(model="tiny", prompt=PROMPT)
        wait_until(lambda: server.pool.waiting == 0)
        gate.open()
        assert all(future.result()["usage"]["completion_tokens"] == 2 for future in running)
    assert server.complete(PROMPT)["usage"]["completion_tokens"] == 16


def test_request_takes_the_session_that_shares_the_longest_prefix(own_heads: Exported) -> None:
    chats = [[1] * 20, [2] * 20, [3] * 20]
    with serving(own_heads.engine, sessions=3) as server:
        for chat in chats:
            assert cached(server.complete(chat, max_tokens=4)) == 0
        for _ in range(2):
            for chat in reversed(chats):
                document = server.complete([*chat, 9, 9], max_tokens=4)
                assert cached(document) >= 20
                expected = own_heads.engine.generate(prompt_ids=[*chat, 9, 9], max_new_tokens=4).token_ids
                assert document["choices"][0]["token_ids"] == expected
        # A prompt that shares with none takes the session that was used longest ago, that of the last chat.
        assert cached(server.complete([40] * 20, max_tokens=4)) == 0
        assert [cached(server.complete(chat, max_tokens=4)) for chat in (chats[0], chats[1])] == [19, 19]


def test_failing_pass_is_500_or_an_error_event_and_the_next_answer_is_right(
    own_heads: Exported, server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("as a broken graph might")

    undo = server.watch_passes(fail)
    response = server.post("/v1/completions", prompt=PROMPT)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" not in response.text
    wait_until(lambda: "broken graph" in caplog.text)  # logged behind the response
    caplog.clear()
    response = server.post("/v1/completions", prompt=PROMPT, stream=True)
    *_, event, rest = response.text.split("\n\n")
    assert (response.status_code, rest) == (200, "")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "broken graph" in caplog.text
    with pytest.raises(openai.APIError, match="the server failed"):
        list(server.openai.completions.create(model="tiny", prompt=PROMPT, stream=True))
    undo()
    assert server.figure('medusa_answers_total{finish_reason="error"}') == 3
    expected = own_heads.engine.generate(prompt_ids=PROMPT, max_new_tokens=16).token_ids
    for _ in range(2):
        assert server.complete(PROMPT)["choices"][0]["token_ids"] == expected


def test_answers_that_the_server_has_no_time_for_are_told_so(
    own_heads: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    with serving(own_heads.engine, shutdown_seconds=0) as server, ThreadPoolExecutor(2) as pool:
        server.watch_passes(gate)
        whole, stream = (
            pool.submit(server.post, "/v1/completions", prompt=PROMPT, max_tokens=500, stream=stream)
            for stream in (False, True)
        )
        wait_until(lambda: gate.passes == 2)
        server.end()
        wait_until(lambda: "Cancel 2 running" in caplog.text)
        gate.open()
        assert (whole.result().status_code, whole.result().json()["error"]["type"]) == (503, "server_error")
        *_, event, rest = stream.result().text.split("\n\n")
        assert (stream.result().status_code, rest) == (200, "")
        assert "shutting down" in json.loads(event.removeprefix("data: "))["error"]["message"]
    assert gate.passes == 2 and "Traceback" not in caplog.text


def test_every_figure_is_counted(own_heads: Exported) -> None:
    with serving(own_heads.engine, sessions=1) as server:
        first = server.complete(PROMPT, max_tokens=10)
        second = server.complete(PROMPT, max_tokens=10)
        server.post("/v1/completions", prompt=[])
        server.http.get("/nowhere")
        rounds = len(first["medusa"]["published_per_round"]) + len(second["medusa"]["published_per_round"])
        expected = {
            'medusa_requests_total{endpoint="/v1/completions",status="200"}': 2,
            'medusa_requests_total{endpoint="/v1/completions",status="400"}': 1,
            'medusa_requests_total{endpoint="other",status="404"}': 1,
            'medusa_answers_total{finish_reason="length"}': 2,
            "medusa_prompt_tokens_total": 6,
            "medusa_cached_tokens_total": 2,
            "medusa_generated_tokens_total": 20,
            "medusa_round_tokens_sum": 20,
            "medusa_round_tokens_count": rounds,
            "medusa_round_seconds_count": rounds,
            "medusa_time_to_first_token_seconds_count": 2,
            "medusa_queue_seconds_count": 2,
            'medusa_request_seconds_count{endpoint="/v1/completions"}': 3,
            "medusa_queue_depth": 0,
            "medusa_running_answers": 0,
        }
        assert {line: server.figure(line) for line in expected} == expected
        assert server.http.get("/metrics").headers["content-type"].startswith("text/plain")


def cached(document: dict[str, Any]) -> int:
    tokens: int = document["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens
