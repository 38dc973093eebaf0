"""Fixtures for tests of the application: one scripted engine, one server; each test must leave nothing behind.

A folder imports them into its conftest.
"""

import time
from collections.abc import Iterator

import pytest

from tests.references.http_app import Client, RunningApp, scripted_engine
from tests.references.local_engine import LocalEngine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    yield from scripted_engine(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def server(engine: LocalEngine) -> Iterator[RunningApp]:
    with RunningApp(engine, max_body_size=1 << 20, request_timeout=5.0) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """The canary: the server answers as before, and no request is left over."""
    yield
    if "server" not in request.fixturenames:
        return
    server: Client = request.getfixturevalue("server")
    end = time.monotonic() + 5
    while server.num_unfinished and time.monotonic() < end:
        time.sleep(0.01)
    assert server.num_unfinished == 0
    assert server.get("/health").status == 200
    assert server.complete("a").json["choices"][0]["text"] == "hello world"
