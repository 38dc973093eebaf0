"""Keys, request ids and bounds on headers, over real sockets."""

from collections.abc import Iterator

import pytest

from tests.references.http_app import MODEL, RunningApp
from tests.references.local_engine import LocalEngine

KEY, OTHER = "sk-one", "sk-two"


@pytest.fixture(scope="module")
def locked(engine: LocalEngine) -> Iterator[RunningApp]:
    with RunningApp(engine, api_key=(KEY, OTHER), allowed_origins=("https://a.example",)) as running:
        yield running


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_every_route_needs_a_key(locked: RunningApp) -> None:
    """A6: deny by default; only /health is open. The list is the document's, so a new route is in it."""
    document = locked.get("/openapi.json", authorization=f"Bearer {KEY}").json
    assert len(document["paths"]) > 8
    for path, operations in document["paths"].items():
        for method in operations:
            answer = locked.request(method.upper(), path.replace("{name}", MODEL))
            assert answer.status == (200 if path == "/health" else 401), (method, path)
    for path in ("/openapi.json", "/docs", "/redoc", "/nothing", "/", "/v1"):
        answer = locked.get(path)
        assert answer.status == 401, path
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {OTHER}", f"BEARER  {KEY} "])
def test_a_key_opens(locked: RunningApp, value: str) -> None:
    assert locked.get("/v1/models", authorization=value).status == 200


@pytest.mark.parametrize(
    "value",
    ["", KEY, "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} {KEY}",
     f"Bearer{KEY}", "Bearer \xe9\xff", f"Bearer {KEY},{OTHER}", "Bearer " + "x" * 10_000],
)  # fmt: skip
def test_a_wrong_key_does_not(locked: RunningApp, value: str) -> None:
    """A key that is not ASCII is a wrong one too, not an error of the server."""
    assert locked.get("/v1/models", authorization=value).status == 401


def test_two_keys_at_once_do_not(locked: RunningApp) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n"
    assert status_of(locked.raw(head.encode() + b"\r\n")) == 200
    assert status_of(locked.raw(head.encode() + b"Authorization: Bearer x\r\n\r\n")) == 401


@pytest.mark.parametrize(
    "line",
    [
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a/health?x=",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x/?",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Forwarded-Prefix: /health",
        "POST /v1/chat/completions?/health HTTP/1.1\r\nHost: x",
        "POST /v1/chat/completions#/health HTTP/1.1\r\nHost: x",
        "POST /health/../v1/chat/completions HTTP/1.1\r\nHost: x",
        "POST /health/ HTTP/1.1\r\nHost: x",
        "POST //v1/chat/completions HTTP/1.1\r\nHost: x",
        "POST /V1/chat/completions HTTP/1.1\r\nHost: x",
        "POST /%2Fv1/chat/completions HTTP/1.1\r\nHost: x",
        "POST /v1%2Fchat%2Fcompletions HTTP/1.1\r\nHost: x",
        "POST /v1/chat/completions/ HTTP/1.1\r\nHost: x",
        "POST http://x/v1/chat/completions HTTP/1.1\r\nHost: a/health",
        "POST /v1/chat/completions HTTP/1.0",
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x",
        "HEAD /v1/models HTTP/1.1\r\nHost: x",
    ],
)
def test_no_spelling_of_host_or_path_opens(locked: RunningApp, line: str) -> None:
    """The key is asked for by the path that is routed (CVE-2026-48746)."""
    answer = locked.raw(f"{line}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
    assert status_of(answer) == 401, answer[:200]


def test_a_preflight_needs_no_key_and_errors_have_the_headers(locked: RunningApp) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    answer = locked.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert locked.request("OPTIONS", "/v1/models", headers=asked | {"origin": "https://b.example"}).status == 400
    refused = locked.get("/v1/models", origin="https://a.example")
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_metrics_can_be_opened(engine: LocalEngine, locked: RunningApp) -> None:
    assert locked.get("/metrics").status == 401
    with RunningApp(engine, api_key=(KEY,), open_metrics=True, root_path="/api") as running:
        assert running.get("/metrics").status == running.get("/api/metrics").status == 200
        assert running.get("/health").status == running.get("/api/health").status == 200
        assert running.get("/api/version").status == running.get("/version").status == 401
        assert running.get("/api/version", authorization=f"Bearer {KEY}").json["version"]


def test_request_ids_are_echoed(server: RunningApp) -> None:
    """B025: two at once with one id both complete; the engine's own ids differ."""
    given = "trace-1:/ab=="
    body = b'{"prompt": "a", "temperature": 0}'
    answers = [server.send("/v1/completions", body, **{"x-request-id": given}) for _ in range(2)]
    for answer in answers:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == given
        assert answer.json["id"] == f"cmpl-{given}"
    made = [server.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2


@pytest.mark.parametrize(
    "header",
    [b"X-Request-Id: a b", b"X-Request-Id:", b"X-Request-Id: \x1b[31mred", b"X-Request-Id: \xff",
     b"X-Request-Id: " + b"x" * 129, b"X-Request-Id: a\r\nX-Request-Id: b", b"X-Request-Id: " + b"x" * 50_000],
)  # fmt: skip
def test_a_request_id_that_could_forge_a_log_line_is_refused(server: RunningApp, header: bytes) -> None:
    answer = server.raw(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n")
    assert status_of(answer) == 400
    assert b"red" not in answer and b"x" * 129 not in answer


@pytest.mark.parametrize(
    "headers", [b"X-Big: " + b"y" * (1 << 20), b"\r\n".join(b"X-%d: 1" % i for i in range(10_000))]
)
def test_huge_headers(server: RunningApp, headers: bytes) -> None:
    try:
        answer = server.raw(b"GET /version HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n")
    except ConnectionError:
        return  # closed while we were still sending
    assert status_of(answer) in (400, 431)
