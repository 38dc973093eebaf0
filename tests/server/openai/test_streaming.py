"""Streams: the same as whole answers, in the order that clients expect."""

import json
import socket
import time
from typing import Any

import pytest

from tests.references.http_app import Answer, RunningApp

EMOJI = {"role": "user", "content": "u"}


def joined(events: list[Any], chat: bool) -> dict[int, dict[str, Any]]:
    """By choice: text, log-probabilities, reasons; the order of chunks is checked on the way."""
    out: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert "finish_reason" in choice  # B017: always there, null until the last one
            if index not in out:
                out[index] = {"text": "", "logprobs": [], "finish_reason": None, "stop_reason": None}
                if chat:
                    assert choice["delta"]["role"] == "assistant"  # B019
            elif chat:
                assert "role" not in choice["delta"]
            mine = out[index]
            assert mine["finish_reason"] is None, "a chunk behind the last one"
            mine["text"] += (choice["delta"].get("content", "") if chat else choice["text"]) or ""
            mine["finish_reason"] = choice["finish_reason"]
            mine["stop_reason"] = choice.get("stop_reason")
            if logprobs := choice.get("logprobs"):
                mine["logprobs"] += logprobs["content"] if chat else list(zip(*logprobs.values(), strict=True))
    return out


def whole(answer: Answer, chat: bool) -> dict[int, dict[str, Any]]:
    out = {}
    for choice in answer.json["choices"]:
        logprobs = choice["logprobs"]
        entries = (
            [] if logprobs is None else logprobs["content"] if chat else list(zip(*logprobs.values(), strict=True))
        )
        out[choice["index"]] = {
            "text": choice["message"]["content"] if chat else choice["text"],
            "logprobs": entries,
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
    return out


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("a", {}),
        ("a", {"n": 3}),
        (["a", "u", "o"], {"n": 2}),
        (["a", "xa"], {"echo": True, "logprobs": 2, "n": 2}),
        ("u", {"logprobs": 1}),
        ("u", {"max_tokens": 1}),  # B016: half of an emoji
        ("u", {"max_tokens": 1, "logprobs": 0}),
        ("o", {"stop": "vation"}),
        ("o", {"stop": "vation", "include_stop_str_in_output": True, "logprobs": 1}),
        ("o", {"stop": ["x", "Servation: "]}),
        ("a", {"skip_special_tokens": False}),
        ("a", {"stop_token_ids": [270]}),
        ("e", {"max_tokens": 200, "stop": "never"}),
        ("e", {"max_tokens": 60, "temperature": 1.0, "seed": 3, "logprobs": 3, "logit_bias": {"300": 15, "267": 15}}),
        ("a", {"max_tokens": 0, "echo": True, "logprobs": 1}),
    ],
)
def test_a_streamed_completion_is_the_whole_one(server: RunningApp, prompt: Any, fields: dict[str, Any]) -> None:
    """Section 0 of the cases: text, entries, reasons and usage are equal."""
    answer = server.complete(prompt, **fields)
    assert answer.status == 200, answer.body
    events = server.complete(prompt, stream=True, stream_options={"include_usage": True}, **fields).events
    assert joined(events, False) == whole(answer, False)
    usage = events[-1]["usage"]
    assert {k: v for k, v in usage.items() if k != "prompt_tokens_details"} == {
        k: v for k, v in answer.json["usage"].items() if k != "prompt_tokens_details"
    }
    if "logprobs" in fields and not fields.get("echo"):
        entries = sum(len(choice["logprobs"]) for choice in joined(events, False).values())
        assert entries == usage["completion_tokens"]
    for choice in joined(events, False).values():
        places = [entry[3] for entry in choice["logprobs"]]
        assert places == sorted(places)  # B031


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"stop": "s i"}, {"max_tokens": 1},
     {"max_tokens": 0}, {"temperature": 1.0, "seed": 1, "ignore_eos": True, "max_tokens": 40}],
)  # fmt: skip
def test_a_streamed_chat_is_the_whole_one(server: RunningApp, fields: dict[str, Any]) -> None:
    answer = server.chat("hi", **fields)
    events = server.chat("hi", stream=True, stream_options={"include_usage": True}, **fields).events
    assert joined(events, True) == whole(answer, True)
    assert events[-1]["usage"]["completion_tokens"] == answer.json["usage"]["completion_tokens"]


def test_the_order_of_chunks(server: RunningApp) -> None:
    """B019, B135: the role, text, the reason without text, the usage without choices; one id and time for all."""
    events = server.chat("hi", stream=True, stream_options={"include_usage": True}).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["delta"] == {}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    for name in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({event[name] for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert "usage" not in server.chat("hi", stream=True).events[0]


def test_the_usage_so_far(server: RunningApp) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = server.complete(["e", "e"], max_tokens=5, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 10
    assert all(event["usage"]["prompt_tokens"] == 2 for event in events)


def test_streamed_headers(server: RunningApp) -> None:
    answer = server.chat("hi", stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"]


def test_choices_come_in_between_each_other(server: RunningApp) -> None:
    """B022: each has its own first and last chunk, and [DONE] comes once."""
    answer = server.complete(["e", "e"], n=2, max_tokens=30, stream=True)
    assert answer.body.count(b"[DONE]") == 1
    order = [event["choices"][0]["index"] for event in answer.events]
    assert set(order) == {0, 1, 2, 3}
    assert order != sorted(order)


def test_a_reader_that_comes_late_gets_everything(server: RunningApp) -> None:
    """B020: what waits for it is joined; the text is the same, in fewer chunks."""
    fields = {"prompt": ["e"] * 4, "temperature": 0, "max_tokens": 400, "logprobs": 5, "stream": True}
    quick = server.post("/v1/completions", **fields)
    with server.open("/v1/completions", **fields) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        time.sleep(1.0)
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(1 << 16)
    body = unchunked(data.partition(b"\r\n\r\n")[2])
    events = [json.loads(part[6:]) for part in body.decode().split("\n\n") if part.startswith("data: {")]
    assert joined(events, False) == joined(quick.events, False)


def unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        out, data = out + rest[:length], rest[length + 2 :]
    return out
