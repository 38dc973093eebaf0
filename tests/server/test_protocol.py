"""Raw sockets against the bounds of one connection, with an application that does next to nothing."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from octavo.configs.server import ServerConfig
from octavo.server.http_server import HttpServer, uvicorn_config
from octavo.server.protocol import Limits
from octavo.server.sockets import bind

LIMITS = Limits(header_bytes=4096, header_count=20, request_seconds=0.6, stall_seconds=0.6, connections=40)


class App:
    """Answers a POST with the length of its body, /stream with more than any buffer holds."""

    def __init__(self) -> None:
        self.disconnects = 0
        self.stopped = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": message["type"] + ".complete"})
            return
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        names = [name.decode("latin-1") for name, _ in scope["headers"]]
        answer = {"size": size, "path": scope["path"], "headers": names}
        if scope["path"] == "/stream":
            for _ in range(2000):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnects += 1
            return
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


class Running:
    """A server on a thread of its own."""

    def __init__(self) -> None:
        self.app = App()
        self.sock = bind(ServerConfig(port=0))
        self.port = self.sock.getsockname()[1]
        config = uvicorn_config(self.app, ServerConfig(timeout_keep_alive=1.0, drain_timeout=0), None, LIMITS)
        self.server = HttpServer(config)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.server.serve(sockets=[self.sock]))

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture
def ask(running: Running) -> Callable[..., bytes]:
    """Sends bytes, and returns everything that comes until the server closes or `seconds` are over."""

    def ask(*parts: bytes, pause: float = 0.0, seconds: float = 3.0) -> bytes:
        return asyncio.run(exchange(running.port, parts, pause, seconds))

    return ask


async def exchange(port: int, parts: tuple[bytes, ...], pause: float, seconds: float) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def read() -> None:
        while data := await reader.read(65536):
            answer.extend(data)

    reading = asyncio.ensure_future(read())
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    await asyncio.wait((reading,), timeout=seconds)
    reading.cancel()
    with contextlib.suppress(ConnectionError, asyncio.CancelledError):
        await reading
    writer.transport.abort()
    return bytes(answer)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


GET = b"GET /%s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


def test_plain_requests(ask: Callable[..., bytes]) -> None:
    answer = ask(GET % b"a%20b" + b"\r\n")
    assert (status(answer), b'"path": "/a b"' in answer) == (200, True)
    answer = ask(
        b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"
    )
    assert b'"size": 3' in answer


def test_an_upgrade_that_is_not_spoken_is_a_plain_request(ask: Callable[..., bytes]) -> None:
    """Java's client asks for HTTP/2 in its first request."""
    head = b"POST / HTTP/1.1\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\n"
    assert b'"size": 3' in ask(head + b"abc", seconds=0.5)
    assert b'"size": 3' in ask(head, b"abc", pause=0.1, seconds=0.5)
    answer = ask(head[:40], head[40:], b"abc", pause=0.1)
    assert (status(answer), b"Upgrade header" in answer) == (400, True)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(GET % b"" + b"a: " + b"x" * 5000 + b"\r\n\r\n", id="large"),
        pytest.param(GET % b"" + b"a: " + b"x" * 2_000_000, id="never-ending"),
        pytest.param(GET % b"" + b"".join(b"a%d: 1\r\n" % i for i in range(20)) + b"\r\n", id="many"),
        pytest.param(GET % b"" + b"".join(b"a%d: 1\r\n" % i for i in range(10_000)) + b"\r\n", id="thousands"),
        pytest.param(b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", id="path"),
        pytest.param(b"GET /" + b"x" * 500_000, id="never-ending-path"),
    ],
)
def test_headers_are_bounded(ask: Callable[..., bytes], request_bytes: bytes) -> None:
    """CVE-2025-48956: refused with an answer that arrives, although most of the request was never read."""
    answer = ask(request_bytes)
    assert status(answer) == 431
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert str(LIMITS.header_bytes) in error["message"] or str(LIMITS.header_count) in error["message"]
    assert error["type"] == "invalid_request_error"


def test_framing_is_bounded(ask: Callable[..., bytes]) -> None:
    head = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert status(ask(head, b"1;" + b"x" * 100_000)) == 431
    trailers = b"".join(b"a%d: 1\r\n" % i for i in range(1000))
    assert b'"size"' not in ask(head + b"1\r\na\r\n0\r\n" + trailers + b"\r\n")
    chunks = b"1\r\na\r\n" * 20_000  # small chunks are no crime
    assert b'"size": 20000' in ask(head + chunks + b"0\r\n\r\n")


def test_trailers_are_no_headers(ask: Callable[..., bytes]) -> None:
    """What a proxy removes or sets among the headers cannot come in behind the body."""
    head = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = ask(head + b"1\r\na\r\n0\r\nauthorization: Bearer a\r\nx-forwarded-for: 1.2.3.4\r\n\r\n")
    assert b'"headers": ["connection", "transfer-encoding"]}' in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x80\x04\x95 pickled\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\na\r\n b: c\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -3\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffffff\r\n",
    ],
)
def test_nonsense_is_400(ask: Callable[..., bytes], request_bytes: bytes) -> None:
    answer = ask(request_bytes)
    assert status(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_slow_requests_are_ended(ask: Callable[..., bytes]) -> None:
    """Slow loris, in the headers and in the body; each byte is early enough for a keep-alive timeout."""
    answer = ask(b"GET / HTTP/1.1\r\na: b", *([b"x"] * 12), pause=0.1)
    assert status(answer) == 408
    answer = ask(b"POST / HTTP/1.1\r\ncontent-length: 99\r\n\r\n", *([b"x"] * 12), pause=0.1)
    assert (status(answer), answer.count(b"HTTP/1.1")) == (408, 1)


@pytest.mark.parametrize("parts", [[], [b"\r\n"] * 20], ids=["silent", "blank-lines"])
def test_idle_connections_are_ended(running: Running, ask: Callable[..., bytes], parts: list[bytes]) -> None:
    assert ask(*parts, pause=0.1, seconds=2.0) == b""
    assert not running.server.server_state.connections


def test_a_reader_that_stalls_is_cut_off(running: Running) -> None:
    async def stall() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        writer.write(GET % b"stream" + b"\r\n")
        await asyncio.sleep(0.3)
        assert running.server.server_state.connections
        await asyncio.sleep(1.5)
        assert not running.server.server_state.connections
        writer.transport.abort()

    asyncio.run(stall())


def test_a_client_that_goes_away_ends_what_it_queued(running: Running) -> None:
    """The running request hears of it even when another one came behind it on the same connection."""
    before = running.app.disconnects

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /wait HTTP/1.1\r\n\r\n" * 3)
        await asyncio.sleep(0.3)
        writer.transport.abort()
        await asyncio.sleep(0.3)

    asyncio.run(leave())
    assert running.app.disconnects == before + 1
    assert not running.server.server_state.tasks


def test_garbage_behind_a_request_does_not_answer_in_its_place(ask: Callable[..., bytes]) -> None:
    answer = ask(b"GET /wait HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", pause=0.2)
    assert answer.count(b"HTTP/1.1") == 1
    assert b"400" not in answer


def test_connections_are_bounded(running: Running) -> None:
    async def crowd() -> None:
        pairs = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(LIMITS.connections)]
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        answer = await asyncio.wait_for(reader.read(4096), 2)
        assert status(answer) == 503
        for _, other in [*pairs, (reader, writer)]:
            other.transport.abort()
        await asyncio.sleep(0.2)

    asyncio.run(crowd())
    assert not running.server.server_state.connections
