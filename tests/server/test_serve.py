"""The life of a real server: ports, signals, a dying engine, a dying server. Nothing hangs, nothing is left behind."""

import asyncio
import pathlib
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.references.http_streams import Answer, ask
from tests.references.servers import ENDLESS, HELLO, Server, running


def test_a_thousand_idle_connections(server: Server) -> None:
    """B135: they cost nobody else anything."""
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    try:
        began = time.monotonic()
        assert server.request("/v1/completions", {"prompt": HELLO, "temperature": 0})[0] == 200
        assert server.status("/health") == 200
        assert time.monotonic() - began < 5
    finally:
        for connection in crowd:
            connection.close()


def test_only_one_port_is_open(server: Server) -> None:
    """A5: nobody but the API listens; what the processes say to each other is out of reach."""
    family = [psutil.Process(server.process.pid), server.engine]
    listening = [
        entry.laddr
        for process in family
        for entry in process.net_connections("all")
        if entry.status == psutil.CONN_LISTEN
    ]
    assert [(entry.ip, entry.port) for entry in listening] == [("127.0.0.1", server.port)]
    paths = {pathlib.Path(c.laddr) for p in family for c in p.net_connections("unix") if "octavo" in str(c.laddr)}
    assert all(not path.exists() or path.parent.stat().st_mode & 0o777 == 0o700 for path in paths)


def test_metrics_of_a_request(server: Server) -> None:
    label = '{model_name="table"}'
    before = server.metrics()
    body = {"prompt": [HELLO, HELLO], "temperature": 0, "max_tokens": 5}
    assert server.request("/v1/completions", body)[0] == 200
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"octavo:{name}"] - before[f"octavo:{name}"]

    assert grown("prompt_tokens_total" + label) == 2
    assert grown("generation_tokens_total" + label) == 6
    assert grown('request_success_total{finished_reason="stop",model_name="table"}') == 2
    assert grown("time_to_first_token_seconds_count" + label) == 2
    assert grown("inter_token_latency_seconds_count" + label) >= 2
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert grown(f"{name}_seconds_count{label}") == 2
        assert grown(f"{name}_seconds_sum{label}") >= 0
    assert grown("request_params_max_tokens_sum" + label) == 10
    assert after["octavo:num_requests_running" + label] == after["octavo:num_requests_waiting" + label] == 0
    assert after["octavo:kv_cache_usage_perc" + label] == 0
    handler = 'octavo:http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
    assert after[handler] - before[handler] == 1
    assert any(name.startswith("octavo:cache_config_info{") and 'block_size="16"' in name for name in after)
    assert all(value >= 0 for value in after.values())


def test_running_requests_finish_and_then_it_ends(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """SIGTERM: no new connection, the open stream is whole, exit 0; a stream that takes too long is aborted."""
    with running(served_model, tmp_path / "log", options={"drain-timeout": 2}) as server:
        short, long = server.open_stream(max_tokens=500), server.open_stream()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.status("/health") == 0
        whole, cut = short.rest(), long.rest()
        assert whole.count('"text":"') >= 1
        assert '"finish_reason":"length"' in whole
        assert whole.endswith("data: [DONE]\n\n")
        assert '"error"' in cut or '"finish_reason":"abort"' in cut
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_a_second_signal_ends_at_once(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Server(served_model, tmp_path / "log") as server:
        server.wait_until_ready()
        stream = server.open_stream()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        assert time.monotonic() - began < 3
        stream.rest()
        assert "Traceback" not in server.log


@pytest.mark.parametrize("python", [[], pytest.param(["-O"], marks=pytest.mark.slow)], ids=["", "-O"])
def test_the_engine_dies(served_model: pathlib.Path, tmp_path: pathlib.Path, python: list[str]) -> None:
    """Bar 2, B131: 32 open streams, most of them queued: each has an error within 5 s, exit not 0 within 10 s."""
    with Server(served_model, tmp_path / "log", python=python) as server:
        server.wait_until_ready()
        answers, health, seconds = asyncio.run(killed_under_streams(server))
        assert seconds[0] < 5 and seconds[1] < 10
        assert [answer.error and answer.error["code"] for answer in answers] == ["engine_dead"] * 32
        assert sorted(answer.status for answer in answers) == [200] * 8 + [503] * 24
        assert all(answer.done and answer.choices for answer in answers if answer.status == 200)
        assert 503 in health and 200 not in health
        assert server.wait() == 1
        assert "the engine process was killed by SIGKILL" in server.log


async def killed_under_streams(server: Server) -> tuple[list[Answer], set[int], list[float]]:
    """32 answers, what /health said behind the kill, and seconds until all answers and the exit were there."""
    body = {"prompt": ENDLESS, "max_tokens": 8000, "temperature": 0, "stream": True}
    streams = asyncio.gather(*(ask(server.port, "/v1/completions", body) for _ in range(32)))
    while (await asyncio.to_thread(lambda: server.load))[:2] != (8, 24):
        await asyncio.sleep(0.02)
    server.engine.send_signal(signal.SIGKILL)
    began = time.monotonic()
    answers = await streams
    answered = time.monotonic() - began
    health = set()
    while server.process.poll() is None:
        health.add(await asyncio.to_thread(server.status, "/health"))
        await asyncio.sleep(0.05)
    return answers, health, [answered, time.monotonic() - began]


@pytest.mark.slow
def test_the_server_dies(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The engine goes with it."""
    with Server(served_model, tmp_path / "log") as server:
        server.wait_until_ready()
        stream = server.open_stream()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        assert "[DONE]" not in stream.rest()


def test_a_signal_while_it_loads(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Server(served_model, tmp_path / "log") as server:
        family: list[psutil.Process] = []
        while not family:
            family = psutil.Process(server.process.pid).children()
            time.sleep(0.01)
        assert server.stop() == 0
        assert not psutil.wait_procs(family, timeout=5)[1]
        assert "before the engine was ready" in server.log


def test_what_is_wrong_shows_before_the_model_loads(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Server(served_model, tmp_path / "log", options={"port": port}) as server:
            assert server.process.wait(60) == 1
            assert f"octavo: port {port} of 127.0.0.1 is in use" in server.log
            assert "Loading" not in server.log
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    with Server(served_model, tmp_path / "log", ["--chat-template", str(template)]) as server:
        assert server.process.wait(60) == 1
        assert "chat template does not compile" in server.log
        assert "Loading" not in server.log


def test_a_model_that_does_not_load(tmp_path: pathlib.Path) -> None:
    with Server(tmp_path / "nothing", tmp_path / "log") as server:
        assert server.process.wait(60) == 1
        assert server.log.strip().splitlines()[-1].startswith("octavo: ")
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_keys_and_tls(served_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Under -O as well, where an assertion would not check anything."""
    command = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    made = subprocess.run(
        ["openssl", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl makes no certificate here")
    flags = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    environment = {"OCTAVO_API_KEY": "secret"}
    with Server(served_model, tmp_path / "log", flags, python=["-O"], environment=environment) as server:
        while "listening on https://" not in server.log:
            assert server.process.poll() is None, server.log
            time.sleep(0.1)
        url = server.log.partition("listening on ")[2].split()[0]

        def curl(path: str, *more: str) -> str:
            command = ["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", url + path, *more]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout

        assert curl("/health") == "200"
        assert curl("/v1/models") == curl("/metrics") == curl("/openapi.json") == curl("/nothing") == "401"
        assert curl("/v1/models", "-H", "Authorization: Bearer secret") == "200"
        assert curl("/v1/models?api_key=secret") == "401"
        assert "secret" not in server.log
        assert server.stop() == 0


def test_help_imports_neither_jax_nor_the_server() -> None:
    code = "import sys; from octavo.server.cli import make_parser; make_parser()\n"
    code += "assert not {'jax', 'fastapi', 'uvicorn', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
