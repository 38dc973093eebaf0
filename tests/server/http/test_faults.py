"""Clients that go away at every stage, a full queue, an engine that dies: everything ends, nothing is left."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.references.http_app import RunningApp
from tests.references.local_engine import LocalEngine

ENDLESS = {"prompt": "e", "temperature": 0, "max_tokens": 500}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def paused(engine: LocalEngine) -> Iterator[LocalEngine]:
    engine.paused = True
    yield engine
    engine.paused = False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"prompt": ["e", "e", "a"]}, {"n": 3}])
def test_gone_while_it_waits(server: RunningApp, paused: LocalEngine, stream: bool, fields: dict) -> None:
    """B026: before the first step, whatever kind of answer it waits for."""
    connection = server.open("/v1/completions", **ENDLESS | fields, stream=stream)
    wait_for(lambda: paused.num_unfinished == len(fields.get("prompt", "e")))
    connection.close()
    wait_for(lambda: paused.num_unfinished == 0)


@pytest.mark.parametrize("fields", [{}, {"prompt": ["e", "e", "a"]}, {"n": 3}])
def test_gone_in_the_middle_of_a_stream(server: RunningApp, engine: LocalEngine, fields: dict) -> None:
    connection = server.open("/v1/completions", **ENDLESS | fields, stream=True)
    assert b" 200 " in connection.recv(100)
    engine.paused = True
    assert engine.num_unfinished > 0
    connection.close()
    wait_for(lambda: engine.num_unfinished == 0)
    engine.paused = False


def test_gone_in_the_middle_of_a_whole_answer(server: RunningApp, engine: LocalEngine) -> None:
    connection = server.open("/v1/completions", **ENDLESS)
    wait_for(lambda: engine.num_unfinished == 1)
    connection.close()
    wait_for(lambda: engine.num_unfinished == 0)


def test_gone_while_the_template_is_rendered(server: RunningApp, engine: LocalEngine) -> None:
    """Its request never reaches the engine."""
    rendering, release, before = threading.Event(), threading.Event(), engine.render_chat
    submitted = engine.submitted

    def slow(messages, **options):
        rendering.set()
        release.wait(10)
        return before(messages, **options)

    engine.render_chat = slow
    try:
        connection = server.open("/v1/chat/completions", **CHAT)
        assert rendering.wait(5)
        connection.close()
        time.sleep(0.1)
        release.set()
        time.sleep(0.1)
    finally:
        engine.render_chat = before
    assert engine.submitted == submitted


def test_gone_while_it_sends(server: RunningApp, engine: LocalEngine) -> None:
    submitted = engine.submitted
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head)
    time.sleep(0.05)
    connection.close()
    assert server.complete("a").status == 200
    assert engine.submitted == submitted + 1


def test_the_same_id_again_after_a_disconnect(server: RunningApp, engine: LocalEngine) -> None:
    """B025."""
    connection = server.open("/v1/completions", **ENDLESS, stream=True, request_id="mine")
    assert b" 200 " in connection.recv(100)
    connection.close()
    answer = server.complete("a", request_id="mine")
    assert answer.json["id"] == "cmpl-mine"
    wait_for(lambda: engine.num_unfinished == 0)


def test_survivors_are_not_disturbed(server: RunningApp, engine: LocalEngine) -> None:
    """B024: streams beside others that are dropped say what they say alone."""
    alone = server.complete("e", max_tokens=300).json["choices"][0]["text"]
    kept = [server.open("/v1/completions", **ENDLESS | {"max_tokens": 300}) for _ in range(4)]
    dropped = [server.open("/v1/completions", **ENDLESS, stream=True) for _ in range(8)]
    for connection in dropped:
        time.sleep(0.01)
        connection.close()
    for connection in kept:
        data = b""
        while not data.endswith(b"}"):
            data += connection.recv(1 << 16)
        assert alone.encode() in data
        connection.close()


def test_a_full_queue(server: RunningApp, paused: LocalEngine) -> None:
    """503 with Retry-After, for streams too; a batch that only half fits runs not at all."""
    paused.max_queued = 2
    try:
        waiting = [server.open("/v1/completions", **ENDLESS | {"max_tokens": 1})]
        wait_for(lambda: paused.num_unfinished == 1)
        for fields in ({"prompt": ["a", "a"]}, {"prompt": ["a", "a"], "stream": True}):
            answer = server.post("/v1/completions", **fields)
            assert answer.status == 503
            assert answer.error["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
            assert paused.num_unfinished == 1
        paused.paused = False
        assert b" 200 " in waiting[0].recv(100)
        waiting[0].close()
    finally:
        paused.max_queued = 10_000


def test_a_batch_that_no_queue_holds(engine: LocalEngine) -> None:
    """Not a 503, which would say that it fits later."""
    with RunningApp(engine, max_num_queued_reqs=4) as running:
        room = engine.facts.max_num_seqs + 4
        assert running.complete(["a"] * room, max_tokens=1).status == 200
        answer = running.complete(["a"] * (room + 1), max_tokens=1)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert "max_num_queued_reqs" in answer.error["message"]


def test_the_engine_dies_under_streams(engine: LocalEngine) -> None:
    """B021: one error event and the end; whole answers get a 503; /health says so."""
    with RunningApp(engine) as running:
        streams = [running.open("/v1/completions", **ENDLESS, stream=True) for _ in range(4)]
        for connection in streams:
            assert b" 200 " in connection.recv(100)
        engine.paused = True
        whole = running.open("/v1/completions", **ENDLESS)
        waiting = running.open("/v1/chat/completions", **CHAT, stream=True)
        wait_for(lambda: engine.num_unfinished == 6)
        running.loop.call_soon_threadsafe(engine.die, "the device failed at /secret/path")
        for connection in streams:
            data = b""
            while b"[DONE]" not in data:
                data += connection.recv(1 << 16)
            assert data.count(b'data: {"error"') == 1
            assert b"engine_dead" in data and b"secret" not in data
        for connection in (whole, waiting):
            data = connection.recv(1 << 16)
            assert data.startswith(b"HTTP/1.1 503 ")
        assert running.get("/health").status == 503
        assert running.complete("a").error["code"] == "engine_dead"
        assert running.get("/version").status == 200
        for connection in (*streams, whole, waiting):
            connection.close()
    engine.revive()
    engine.paused = False


def test_the_server_ends_requests_when_it_stops(engine: LocalEngine) -> None:
    """What a drain aborts did not finish: an error event for streams, a 503 for whole answers."""
    with RunningApp(engine) as running:
        stream = running.open("/v1/completions", **ENDLESS, stream=True)
        assert b" 200 " in stream.recv(100)
        whole = running.open("/v1/completions", **ENDLESS, n=2)
        wait_for(lambda: engine.num_unfinished == 2)
        running.loop.call_soon_threadsafe(engine.abort_all)
        data = b""
        while b"[DONE]" not in data:
            data += stream.recv(1 << 16)
        assert data.count(b'data: {"error"') == 1
        assert b'"finish_reason":"abort"' not in data
        assert whole.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        stream.close()
        whole.close()


def test_an_error_that_nobody_foresaw(engine: LocalEngine, caplog: pytest.LogCaptureFixture) -> None:
    """500 with a fixed text; what happened is in the log only."""
    before = engine.render_chat

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("at /secret/path <object at 0x7f00>")

    engine.render_chat = broken
    try:
        with RunningApp(engine) as running:
            answer = running.chat("hi")
            assert answer.status == 500
            assert answer.error["code"] == "internal_error"
            assert "secret" not in answer.error["message"]
            assert running.complete("a").status == 200
    finally:
        engine.render_chat = before
    assert "secret" in caplog.text
