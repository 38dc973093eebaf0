"""Streams over raw sockets: many at once, read whole or slowly, or left at any moment; nothing but asyncio between."""

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

STAGES = ("sending", "queue", "prefill", "stream")


@dataclasses.dataclass
class Choice:
    """What the chunks of one choice join to."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)  # between the two likeliest, where both are known
    finish_reason: str | None = None


@dataclasses.dataclass
class Answer:
    """One answer, streamed or not."""

    status: int
    headers: dict[str, str]
    body: bytes
    choices: dict[int, Choice] = dataclasses.field(default_factory=dict)
    error: dict[str, Any] | None = None  # of the answer, or of an event in it
    done: bool = False  # the last event was [DONE]
    seconds: float = 0.0


async def ask(port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """POSTs, and reads until the server closes."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(path, body, headers))
        data = await reader.read(-1)
    finally:
        writer.transport.abort()
    answer = parse(data)
    answer.seconds = time.monotonic() - began
    return answer


async def leave(port: int, path: str, body: Mapping[str, Any], stage: str, rng: random.Random) -> None:
    """POSTs, and goes away: in the middle of the request, at once behind it, a moment later, or while reading."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = post(path, body)
    writer.write(data[: rng.randrange(1, len(data))] if stage == "sending" else data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    if stage == "prefill":
        await asyncio.sleep(rng.uniform(0, 0.05))
    if stage == "stream":
        await reader.read(rng.randrange(1, 2000))
        await asyncio.sleep(rng.uniform(0, 0.2))
    if rng.random() < 0.5:  # the connection is reset instead of closed
        option = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
    writer.transport.abort()


def post(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request behind which the connection closes."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


def parse(data: bytes) -> Answer:
    """All that a server sent."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    answer = Answer(int(first.split(" ", 2)[1]) if first else 0, headers, body)
    if not headers.get("content-type", "").startswith("text/event-stream"):
        answer.error = json.loads(body).get("error") if body else None
        return answer
    *events, rest = body.decode().split("\n\n")
    assert rest == "" and all(event.startswith("data: ") for event in events), body[-200:]
    for event in events:
        assert not answer.done, "an event behind [DONE]"
        if event == "data: [DONE]":
            answer.done = True
        else:
            _file(answer, json.loads(event[6:]))
    return answer


def _joined(body: bytes) -> bytes:
    """The content of chunks; the last one may be missing."""
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def _file(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    for part in chunk["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        assert choice.finish_reason is None, "a chunk behind the last one"
        choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
        choice.token_ids += part.get("token_ids") or []
        choice.finish_reason = part["finish_reason"]
        if (logprobs := part["logprobs"]) is None:
            continue
        if "content" in logprobs:
            choice.logprobs += [entry["logprob"] for entry in logprobs["content"]]
            tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in logprobs["content"]]
        else:
            choice.logprobs += logprobs["token_logprobs"]
            tops = [list((top or {}).values()) for top in logprobs["top_logprobs"]]
        choice.gaps += [_gap(top) for top in tops]


def _gap(top: list[float]) -> float:
    best = sorted(top, reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
