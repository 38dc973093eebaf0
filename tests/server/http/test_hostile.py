"""Hostile and broken requests over real sockets: always a 4xx in our form, never a 500, and nobody else is hurt."""

import concurrent.futures
import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references.http_app import MODEL, OPTIONS, Client, RemoteApp, RunningApp, write_model
from tests.references.local_engine import LocalEngine
from tests.references.servers import Server

SERVER_FLAGS = ["--served-model-name", MODEL, "--max-body-size", str(1 << 20), "--request-timeout", "5"]
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
ALLOWED = {200, 400, 404, 413, 415}


@pytest.fixture(scope="module", params=["", pytest.param("-O", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """The application in this process; and in a real server under `python -O`, where an assertion checks nothing."""
    if not request.param:
        with RunningApp(engine, max_body_size=1 << 20, request_timeout=5.0) as running:
            yield running
        return
    folder = tmp_path_factory.mktemp("optimized")
    options = {name.replace("_", "-"): words_of(value) for name, value in OPTIONS.items()}
    with Server(write_model(folder / "model"), folder / "log", SERVER_FLAGS, options=options, python=["-O"]) as real:
        yield RemoteApp(real.wait_until_ready())
        assert real.stop() == 0
        assert "Traceback" not in real.log


def words_of(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"[]", 400), (b'"x"', 400), (b"1", 400), (b"null", 400), (b"{}", 400), (b"{", 400),
        (b'{"messages":{},"prompt":{},"tokens":{}}', 400), (b"[" * 100_000, 400), (b'{"a":' * 50_000, 400),
        (b'\xef\xbb\xbf{"prompt":"a"}', 400), (b"\x80\x04\x95.", 400), (gzip.compress(b"{}"), 400),
        (b'{"prompt":"a","prompt":"b"}', 400), (b'{"x":"' + b"y" * (1 << 20) + b'"}', 413),
    ],
)  # fmt: skip
def test_bodies(server: Client, path: str, body: bytes, status: int) -> None:
    """B133, also over 100k levels of nesting."""
    answer = server.send(path, body)
    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
def test_other_content(server: Client, path: str) -> None:
    """A form, and so any page in a browser without CORS, cannot post here."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = server.request("POST", path, b"{}", {"content-type": kind})
        assert (answer.status, answer.error["param"]) == (415, "Content-Type")
    answer = server.request("POST", path, b"{}", {"content-type": "application/json", "content-encoding": "gzip"})
    assert answer.status == 415


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND"])
def test_other_methods(server: Client, method: str) -> None:
    answer = server.request(method, "/v1/completions")
    assert answer.status in (405, 400)
    if method != "HEAD" and answer.status == 405:
        assert answer.error and answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/nope", "/%00", "/\xff"])
def test_other_paths(server: Client, path: str) -> None:
    """No redirect that repeats the Host header."""
    data = f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode("latin-1")
    answer = server.raw(data)
    assert answer.split(b" ", 2)[1] in (b"404", b"400")
    assert b"evil.example" not in answer


def post(path: str, headers: str, body: bytes = b"") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}\r\n\r\n"
    )
    return head.encode() + body


def test_a_body_in_chunks_of_one_byte(server: Client) -> None:
    body = json.dumps({"prompt": "a" * 2000, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    answer = server.raw(post("/v1/completions", "Transfer-Encoding: chunked", chunks + b"0\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"max_model_len" in answer


def test_an_endless_chunked_body_is_cut_off(server: Client) -> None:
    """Memory is bounded by max_body_size, whatever comes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(post("/v1/completions", "Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(20):
                connection.sendall(chunk)
        except ConnectionError:
            pass
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ("Content-Length: 99999999999", b"", b"413"),
        ("Content-Length: 5", b'{"prompt":"a"}', b"400"),  # the rest is no request
        ("Content-Length: -1", b"", b"400"),
        ("Content-Length: abc", b"", b"400"),
        ("Content-Length: 2\r\nContent-Length: 3", b"{}", b"400"),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", b"{}", b"400"),
        ("Transfer-Encoding: chunked", b"zz\r\n", b"400"),
        ("Transfer-Encoding: chunked", b"fffffffffffffffff\r\n", b"400"),
    ],
)
def test_lengths_that_lie(server: Client, headers: str, body: bytes, status: bytes) -> None:
    answer = server.raw(post("/v1/completions", headers, body))
    assert answer.split(b" ", 2)[1] == status, answer[:300]


def test_a_body_that_never_ends_times_out(engine: LocalEngine) -> None:
    with RunningApp(engine, request_timeout=0.5) as running:
        began = time.monotonic()
        answer = running.raw(post("/v1/completions", "Content-Length: 100", b"{"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 5


def test_a_large_prompt_holds_nobody_up(engine: LocalEngine) -> None:
    """B135: ten megabytes are refused quickly, and others hardly notice."""
    with RunningApp(engine, max_body_size=64 << 20) as running:
        body = json.dumps({"prompt": "x" * (10 << 20)}).encode()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            large = pool.submit(running.send, "/v1/completions", body)
            slowest = 0.0
            while not large.done():
                asked = time.monotonic()
                assert running.get("/version").status == 200
                slowest = max(slowest, time.monotonic() - asked)
            assert large.result().status == 400
            assert "characters" in large.result().error["message"]
            assert time.monotonic() - began < 5
            assert slowest < 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["model", "prompt", "messages", "tokens", "n", "best_of", "stream", "stream_options", "temperature", "top_p",
     "top_k", "min_p", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "seed", "logprobs",
     "top_logprobs", "prompt_logprobs", "echo", "min_tokens", "tools", "tool_choice", "response_format", "user",
     "cache_salt", "priority", "truncate_prompt_tokens", "chat_template_kwargs", "continue_final_message",
     "add_generation_prompt", "return_token_ids", "request_id", "skip_special_tokens", "chat_template"]
)  # fmt: skip
GOOD = {"prompt": "a", "messages": [{"role": "user", "content": "hi"}], "tokens": [5], "max_tokens": 2}


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), wrong=st.dictionaries(NAMES, JSON, min_size=1, max_size=3))
def test_any_value_in_any_field(server: Client, path: str, wrong: dict[str, Any]) -> None:
    fields = (GOOD if path != "/tokenize" else {"prompt": "a"}) | wrong
    answer = server.send(path, json.dumps(fields).encode())
    assert answer.status in ALLOWED, (answer.status, answer.body)
    if answer.status != 200:
        assert answer.error


def test_many_idle_connections(server: Client) -> None:
    """B135."""
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        assert server.complete("a").status == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_connection_is_kept(server: Client) -> None:
    """Requests follow each other on one connection, behind errors too."""
    one = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    bodies = [b'{"prompt":"a","temperature":0}', b"{", b'{"prompt":"a","temperature":0}']
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for body in bodies:
            connection.sendall(one % (len(body), body))
            answer = connection.recv(1 << 16)
            while answer.count(b"}") < 1:
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 400" if body == b"{" else b"HTTP/1.1 200")
