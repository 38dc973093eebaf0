"""The access log and the HTTP metrics take nothing from a client as it is."""

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from octavo.server.access import Access, Templates, printable
from octavo.server.metrics import HttpMetrics


async def answer(_: Any) -> PlainTextResponse:
    return PlainTextResponse("x", headers={"x-request-id": 'a"b\x9bc'})


async def fail(_: Any) -> PlainTextResponse:
    raise RuntimeError("inside")


ROUTES = [
    Route("/health", answer),
    Route("/v1/models/{name:path}", answer),
    Route("/fail", fail),
    Mount("/static", Starlette()),
]


class Exchange:
    """One wrapped application and what its metrics say."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        app = Starlette(routes=ROUTES)
        options = {"root_path": "", "write_log": True} | options
        self.access = Access(app, app.routes, HttpMetrics(self.registry), **options)

    def request(self, path: str, method: str = "GET", query: bytes = b"", gone: bool = False) -> None:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query,
            "headers": [],
            "client": ("1.2.3.4\n5", 9),
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"} if gone else {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            pass

        asyncio.run(self.access(scope, receive, send))

    def count(self, handler: str, method: str, status: str) -> float | None:
        labels = {"handler": handler, "method": method, "status": status}
        return self.registry.get_sample_value("octavo:http_requests_total", labels)

    def series(self) -> int:
        return sum(len(metric.samples) for metric in self.registry.collect())


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


def test_labels_are_from_fixed_sets(exchange: Exchange) -> None:
    """PYSEC-2026-4325: nothing that a client chooses makes a new series."""
    for path, method in (("/health", "GET"), ("/v1/models/x", "GET"), ("/x", "BREW"), ("/static/x", "GET")):
        exchange.request(path, method)
    before = exchange.series()
    for i in range(300):
        exchange.request(f"/nothing/{i}", f"BREW{i}")
        exchange.request(f"/v1/models/{i}/é")
        exchange.request(f"/static/{i}")
    assert exchange.series() == before
    assert exchange.count("/v1/models/{name:path}", "GET", "2xx") == 301
    assert exchange.count("other", "other", "4xx") == 301


def test_a_line_shows_no_secret_and_forges_nothing(exchange: Exchange, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    exchange.request('/v1/models/a\r\nFAKE "line" \x1b[31m\u202e', query=b"api_key=secret")
    exchange.request("/v1/models/a")
    line, plain = caplog.messages
    assert line.isascii()
    assert line.isprintable()
    assert "secret" not in line
    assert line.startswith('1.2.3.4\\n5:9 "GET /v1/models/a\\r\\nFAKE\\x20\\x22line')
    assert plain.endswith("s id=a\\x22b\\x9bc")


def test_probes_are_silent_until_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    Exchange().request("/health")
    Exchange(write_log=False).request("/v1/models/x")
    assert not caplog.messages
    Exchange().request("/health", "POST")
    assert " 405 " in caplog.messages[0]


def test_errors_are_counted_and_go_on(exchange: Exchange) -> None:
    with pytest.raises(RuntimeError, match="inside"):
        exchange.request("/fail")
    assert exchange.count("/fail", "GET", "5xx") == 1


def test_a_broken_metric_hurts_nobody(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpMetrics, "observe", lambda *_: 1 / 0)
    exchange.request("/health")


def test_the_root_path_is_cut_off() -> None:
    templates = Templates(ROUTES, "/api")
    assert templates.of("/api/health") == templates.of("/health") == "/health"
    assert templates.of("/apihealth") == templates.of("/api/api/health") == "other"


def test_printable_is_bounded() -> None:
    assert len(printable("x" * 10_000)) == len(printable("\x00" * 10_000)) == 201
    assert printable("a b\\") == "a\\x20b\\x5c"
