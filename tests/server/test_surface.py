"""The HTTP surface over a real engine process: the client, streams against whole answers, and clients that go away.

What needs no process boundary is in tests/server/http and tests/server/openai.
"""

import concurrent.futures
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.references.byte_tokenizer import byte_ids
from tests.references.servers import ENDLESS, HELLO, Server

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True, max_retries=0
    ) as client:
        yield client


def whole(client: openai.OpenAI, prompt: str, **fields: Any) -> str:
    return client.completions.create(model="table", prompt=prompt, temperature=0, **fields).choices[0].text


def is_idle(server: Server) -> bool:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(value == 0 for name, value in server.metrics().items() if any(gauge in name for gauge in gauges))


def wait_until_idle(server: Server) -> None:
    """Within two seconds, as the bar has it."""
    end = time.monotonic() + 2
    while not is_idle(server):
        assert time.monotonic() < end, server.metrics()
        time.sleep(0.02)


def test_chats_and_completions(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="other name", messages=HI, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in chat.choices] == ["Paris is"] * 2
    assert [entry.token for entry in chat.choices[1].logprobs.content] == ["Pari", "s is", "</s>"]
    chunks = list(
        client.chat.completions.create(
            model="table", messages=HI, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Paris is"
    assert chunks[-1].usage.total_tokens == chat.usage.prompt_tokens + 3
    assert whole(client, HELLO, stop="wor") == "hello "


def test_echo_with_prompt_logprobs(server: Server) -> None:
    body = {"prompt": "b" + HELLO, "echo": True, "logprobs": 1, "temperature": 0, "n": 2}
    choices = json.loads(server.request("/v1/completions", body)[1])["choices"]
    assert [choice["text"] for choice in choices] == ["bahello world"] * 2
    for choice in choices:
        assert choice["logprobs"]["tokens"] == ["b", "a", "hello", " world", "</s>"]
        assert choice["logprobs"]["token_logprobs"][0] is None


def test_token_ids_there_and_back(server: Server) -> None:
    ids = json.loads(server.request("/tokenize", {"prompt": "hé"})[1])["tokens"]
    assert ids == byte_ids("hé")
    assert json.loads(server.request("/detokenize", {"tokens": ids})[1]) == {"prompt": "hé"}
    assert json.loads(server.request("/reset_prefix_cache", {})[1])["error"]["code"] is None  # not without the flag


def test_refusals_say_why_and_leave_nothing(server: Server) -> None:
    for body, status in (
        ({"prompt": [400]}, 400), ({"prompt": "a", "n": 10**9}, 400), ({"prompt": ["a", [-1]]}, 400),
        ({"prompt": "a", "model": "x"}, 404), ({"prompt": "a", "stop_token_ids": [2**31]}, 400),
        ({"prompt": "a", "max_tokens": None, "min_tokens": 9000}, 400), ({"prompt": "x" * 20_000}, 400),
    ):  # fmt: skip
        answer = server.request("/v1/completions", body)
        assert answer[0] == status
        assert set(json.loads(answer[1])["error"]) == {"message", "type", "param", "code"}
    wait_until_idle(server)


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_goes_away_frees_everything(server: Server, stream: bool) -> None:
    """In a stream, in a whole answer, and in the queue: more of them than run at once."""
    body = json.dumps({"prompt": ENDLESS, "max_tokens": 8000, "temperature": 0, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with contextlib.ExitStack() as connections:
        for _ in range(12):
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            connection.sendall(head % len(body) + body)
        end = time.monotonic() + 5
        while sum(v for k, v in server.metrics().items() if "num_requests_" in k) < 12:
            assert time.monotonic() < end
            time.sleep(0.01)
    wait_until_idle(server)


def test_streams_among_others_that_vanish(server: Server, client: openai.OpenAI) -> None:
    """Bar 1 in short: what stays says what it says alone."""
    alone = whole(client, ENDLESS, max_tokens=400)
    drops = random.Random(0)

    def one(number: int) -> str | None:
        stream = client.chat.completions.create(
            model="table",
            messages=[*HI, {"role": "assistant", "content": ENDLESS}],
            temperature=0,
            max_tokens=400,
            stream=True,
            extra_body={"continue_final_message": True},
        )
        text, leaves = "", drops.randrange(1, 300) if number % 4 == 0 else None
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if leaves is not None and len(text) > leaves:
                stream.close()
                return None
        return text

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(one, range(24)))
    assert [text for text in texts if text is not None] == [alone] * 18
    wait_until_idle(server)
