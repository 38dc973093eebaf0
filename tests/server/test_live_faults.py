"""Faults through a real server: a small pool, a short queue, a slow reader, a device that fails, signals."""

import asyncio
import concurrent.futures
import json
import pathlib
import signal
import socket
import statistics
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.http_streams import Answer, ask, parse, post
from tests.references.servers import ENDLESS, HELLO, TABLE, Server, running
from tests.references.table_model import TableModel, chain

POISONED = "p"  # continues "hello world" and then fails
QUEUED = 16
STREAM = {"prompt": ENDLESS, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few blocks and a short queue, whose model can fail; each test must leave it idle."""
    folder = tmp_path_factory.mktemp("small")
    poison = piece_id(b" the")
    table = TABLE | chain(*byte_ids(POISONED), piece_id(b"Observ"), poison)
    model = TableModel(table=table, poison=poison).write(folder / "model")
    flags = ["--served-model-name", "table", "--max-body-size", str(64 << 20), "--drain-timeout", "1"]
    options = {"num-gpu-blocks-override": 40, "max-num-queued-reqs": QUEUED}
    with running(model, folder / "log", *flags, options=options) as server:
        yield server
        server.wait_until_idle()
        assert server.request("/v1/completions", {"prompt": HELLO, "temperature": 0})[0] == 200
        assert "Traceback" not in server.log


def together(server: Server, *bodies: dict) -> list[Answer]:
    """The answers to completions that are asked for at once."""

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*(ask(server.port, "/v1/completions", body) for body in bodies))

    return asyncio.run(all_of_them())


def cycle(count: int) -> str:
    """What follows ENDLESS."""
    return ("yx" * count)[:count]


def test_more_than_the_pool_holds(small: Server) -> None:
    """Rows that do not fit together take turns; a request that could never fit is refused by name."""
    answers = together(small, *[STREAM | {"max_tokens": 300}] * 12)
    assert [answer.choices[0].text for answer in answers] == [cycle(300)] * 12
    assert {answer.choices[0].finish_reason for answer in answers} == {"length"}
    assert any(name.startswith("octavo:num_preemptions_total") and value for name, value in small.metrics().items())
    status, body, _ = small.request("/v1/completions", {"prompt": ENDLESS * 640, "max_tokens": 1})
    assert status == 400 and json.loads(body)["error"]["param"] in ("prompt", "max_tokens"), body
    small.wait_until_idle()


def test_a_burst_beyond_the_queue(small: Server) -> None:
    """Some run, some wait, the others are told to come back; then everything is as before."""
    answers = together(small, *[STREAM | {"max_tokens": 60}] * 60)
    refused = [answer for answer in answers if answer.status != 200]
    assert len(answers) - len(refused) >= 8 + QUEUED
    assert refused
    for answer in refused:
        assert answer.status == 503 and answer.error is not None and answer.error["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert all(answer.choices[0].text == cycle(60) for answer in answers if answer.status == 200)
    small.wait_until_idle()
    assert {answer.status for answer in together(small, *[STREAM | {"max_tokens": 5}] * QUEUED)} == {200}


def test_a_request_that_fails_on_the_device(small: Server) -> None:
    """An error event behind what came, a 500 for a whole answer; nobody beside it notices."""
    failing = {"prompt": POISONED, "temperature": 0, "max_tokens": 50}
    stream, whole, beside = together(small, failing | {"stream": True}, failing, STREAM | {"max_tokens": 50})
    assert stream.status == 200 and stream.done and stream.choices[0].text.startswith("Observ")
    assert stream.choices[0].finish_reason is None
    assert stream.error is not None and stream.error["code"] == "generation_failed"
    assert (whole.status, whole.error and whole.error["code"]) == (500, "generation_failed")
    assert beside.choices[0].text == cycle(50)
    small.wait_until_idle()


def test_a_large_prompt_holds_nobody_up(small: Server) -> None:
    """B135: ten megabytes are refused quickly and off the event loop."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        large = pool.submit(small.request, "/v1/completions", {"prompt": "x" * (10 << 20)})
        waits = []
        while not large.done():
            asked = time.monotonic()
            assert small.status("/version") == 200
            waits.append(time.monotonic() - asked)
        assert large.result()[0] == 400
    assert time.monotonic() - began < 10
    assert max(waits) < 1


def test_two_live_requests_with_one_id(server: Server) -> None:
    """B025: both are whole, each with its name."""

    async def both() -> list[Answer]:
        body = STREAM | {"max_tokens": 200}
        headers = {"X-Request-Id": "mine"}
        return await asyncio.gather(*(ask(server.port, "/v1/completions", body, headers) for _ in range(2)))

    for answer in asyncio.run(both()):
        assert answer.headers["x-request-id"] == "mine"
        assert b'"id":"cmpl-mine"' in answer.body
        assert answer.choices[0].text == cycle(200)


def test_a_body_in_chunks_of_one_byte(server: Server) -> None:
    body = json.dumps({"prompt": HELLO, "temperature": 0, "user": "u" * 2000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for byte in body:
            connection.sendall(b"1\r\n%c\r\n" % byte)
        connection.sendall(b"0\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert data.startswith(b"HTTP/1.1 200 ") and b"hello world" in data


@pytest.mark.parametrize("length", [1200, pytest.param(8000, marks=pytest.mark.slow)])
def test_a_slow_reader(server: Server, length: int) -> None:
    """One byte a second of more than any buffer holds: others are as quick as ever, and it has all at the end."""
    body = STREAM | {"max_tokens": length, "n": 4, "logprobs": 20}
    others = [STREAM | {"max_tokens": 60}] * 16
    process = psutil.Process(server.process.pid)
    quick = quickly_read(server, body, others)
    before = process.memory_info().rss
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(60)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(post("/v1/completions", body))
        time.sleep(0.2)
        data, rounds = bytearray(), []
        while not data or server.load[0]:
            answers = together(server, *others)
            assert all(answer.choices[0].text == cycle(60) for answer in answers)
            rounds.append(statistics.median(answer.seconds for answer in answers))
            data += reader.recv(1)
        assert process.memory_info().rss - before < (100 << 20) * (1 + length // 4000)
        while part := reader.recv(1 << 16):
            data += part
    assert statistics.median(rounds) < 2 * quick + 1
    answer = parse(bytes(data))
    assert answer.body.count(b"data: ") < 4 * length  # what it left unread was joined
    assert answer.done and [choice.text for choice in answer.choices.values()] == [cycle(length)] * 4
    assert all(len(choice.logprobs) == length for choice in answer.choices.values())
    server.wait_until_idle()


def quickly_read(server: Server, body: dict, others: list[dict]) -> float:
    """The median time of others beside the same request that is read at once."""
    answers = together(server, body, *others)
    return statistics.median(answer.seconds for answer in answers[1:])


def test_a_signal_under_load(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """SIGTERM with 64 requests, most of them queued: each ends as a whole or says why not, within the drain."""
    with running(served_model, tmp_path / "log", options={"drain-timeout": 1}) as server:

        async def load() -> list[Answer]:
            bodies = [STREAM | {"max_tokens": 8000 if i % 2 else 20, "stream": i % 3 > 0} for i in range(64)]
            tasks = [asyncio.ensure_future(ask(server.port, "/v1/completions", body)) for body in bodies]
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

        began = time.monotonic()
        answers = asyncio.run(load())
        assert server.wait() == 0
        assert time.monotonic() - began < 15
        assert "Traceback" not in server.log
    for answer in answers:
        if answer.error is None:
            assert answer.status == 200 and (answer.done or b'"finish_reason":"length"' in answer.body)
        else:
            assert answer.error["code"] == "aborted" and (answer.status == 503 or answer.done), answer


def test_a_device_that_fails(served_model: pathlib.Path, tmp_path: pathlib.Path, repository: pathlib.Path) -> None:
    """The engine cannot go on: every client hears of it, and the server ends."""
    environment = {
        "OCTAVO_TEST_ENGINE": "tests.references.failing_process",
        "OCTAVO_TEST_FAULT": "device fails",
        "PYTHONPATH": str(repository),
    }
    module = "tests.references.instrumented_server"
    with Server(served_model, tmp_path / "log", environment=environment, module=module) as server:
        server.wait_until_ready()
        answers = together(server, *[STREAM | {"max_tokens": 8000}] * 16)
        assert {answer.error and answer.error["code"] for answer in answers} == {"engine_dead"}
        assert {answer.status for answer in answers} == {200, 503}
        assert server.wait() == 1
        assert "the device is gone" in server.log
