"""How engine and parent die: killed, failed, never started. Every reader hears of it, and nothing is left."""

import asyncio
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest
import zmq

from octavo.configs.engine import EngineConfig
from octavo.engine import ConfigError, Engine, EngineDeadError, LoadError, SamplingParams
from octavo.engine import connection as connections
from octavo.engine.client import AsyncEngine
from octavo.engine.messages import Hello, Start, encode
from octavo.engine.request_stream import RequestStream
from tests.references.byte_tokenizer import byte_ids
from tests.references.table_model import TableModel

OPTIONS = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 640,
    "decode_rungs": (4,),
    "token_rungs": (48,),
    "warmup": "full",
}
(C,) = byte_ids("c")
ENDLESS = SamplingParams(temperature=0, max_tokens=2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TableModel(table={C: C}).write(tmp_path_factory.mktemp("endless")))


@pytest.fixture(autouse=True)
def no_child_is_left():
    yield
    assert psutil.Process().children() == []


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, repository: pathlib.Path):
    """A function that breaks every engine process from now on."""

    def break_it(fault: str) -> None:
        monkeypatch.setattr(connections, "MODULE", "tests.references.failing_process")
        monkeypatch.setenv("PYTHONPATH", str(repository))
        monkeypatch.setenv("OCTAVO_TEST_FAULT", fault)

    return break_it


async def start(model: str, **options: object) -> AsyncEngine:
    return await AsyncEngine.start(EngineConfig(model=model, **{**OPTIONS, **options}), progress=False)


async def expect_death(server: AsyncEngine, match: str) -> None:
    """Every way to ask says that it is dead."""
    with pytest.raises(EngineDeadError, match=match):
        server.check_health()
    with pytest.raises(EngineDeadError, match=match):
        server.submit(server.parse_prompt("c"), ENDLESS)
    with pytest.raises(EngineDeadError, match=match):
        await server.reset_prefix_cache()
    assert server.num_unfinished == 0
    await server.drain(0)
    await server.close()
    assert len(asyncio.all_tasks()) == 1


def test_killed_under_open_streams(model: str) -> None:
    async def scenario() -> None:
        server = await start(model)
        slow = server.submit(server.parse_prompt("c"), ENDLESS)
        readers = [asyncio.create_task(server.submit(server.parse_prompt("c"), ENDLESS).output()) for _ in range(16)]
        dead = asyncio.create_task(server.wait_dead())
        await anext(slow)
        await asyncio.sleep(0.05)
        os.kill(server._connection.pid, signal.SIGKILL)
        in_flight = server.submit(server.parse_prompt("c"), ENDLESS)  # nobody knows yet
        call = asyncio.create_task(server.reset_prefix_cache())
        began = time.monotonic()
        results = await asyncio.gather(*readers, call, return_exceptions=True)
        await dead
        assert time.monotonic() - began < 1.5
        for result in results:
            assert isinstance(result, EngineDeadError) and "was killed by SIGKILL" in str(result)
        for stream in (slow, in_flight):
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                await asyncio.wait_for(_read(stream), 1)
        await expect_death(server, "was killed by SIGKILL")

    asyncio.run(scenario())


def test_a_device_that_fails(model: str, faulty, capfd: pytest.CaptureFixture[str]) -> None:
    faulty("device fails")

    async def scenario() -> None:
        server = await start(model)
        streams = [server.submit(server.parse_prompt("c"), ENDLESS) for _ in range(3)]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="INTERNAL: the device is gone"):
                await asyncio.wait_for(_read(stream), 20)
        await asyncio.wait_for(server.wait_dead(), 1)
        await expect_death(server, "INTERNAL: the device is gone")

    asyncio.run(scenario())
    assert "Traceback" in capfd.readouterr().err  # in the log, for the operator


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("exits before it connects", r"ended with exit status 3 before it connected"),
        ("dies while it loads", r"was killed by SIGKILL while it started"),
        ("has no memory", r"the engine stopped: MemoryError: RESOURCE_EXHAUSTED"),
    ],
)
def test_a_start_that_fails(model: str, faulty, fault: str, match: str) -> None:
    faulty(fault)
    with pytest.raises(EngineDeadError, match=match):
        asyncio.run(start(model))


@pytest.mark.parametrize("fault", ["speaks another version", "shows a wrong token"])
def test_a_process_that_is_not_ours(faulty, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is not listened to."""
    faulty(fault)
    words = "a message of version 99, this is" if "version" in fault else "not the process that was started"

    async def scenario() -> None:
        connection = connections.EngineConnection(lambda message: None, lambda what: None)
        opening = asyncio.create_task(connection.open())
        while not any(words in record.message for record in caplog.records):
            assert not opening.done()
            await asyncio.sleep(0.05)
        opening.cancel()
        await connection.close(kill=True)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_process_that_is_too_slow(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(connections, "HELLO_TIMEOUT", 0.2)
    with pytest.raises(EngineDeadError, match="did not connect within 0 s"):
        asyncio.run(start(model))


def test_without_ipc_it_is_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: False)

    async def scenario() -> None:
        ends: list[str] = []
        connection = connections.EngineConnection(lambda message: None, ends.append)
        await connection.open()
        listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        connection.send(Start(EngineConfig(model="/nowhere"), None, False, 0))
        while not ends:
            await asyncio.sleep(0.05)
        assert ends == ["ended with exit status 1"]
        await connection.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_wrong_options_and_models_say_what_engine_says(model: str, tmp_path: pathlib.Path, capfd) -> None:
    """In this process or in the other: the same error, without a traceback."""
    broken = TableModel(table={C: C}).write(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"junk")
    for options, kind in (
        ({"model": str(tmp_path / "nowhere")}, LoadError),
        ({"model": str(broken)}, LoadError),
        ({"model": model, "max_model_len": 10**6}, ConfigError),
        ({"model": model, "num_gpu_blocks_override": None, "gpu_memory_utilization": 1e-9}, ConfigError),
    ):
        with pytest.raises(kind) as here:
            Engine(progress=False, **{**OPTIONS, **options})
        with pytest.raises(kind) as there:
            asyncio.run(start(**{"model": model, **options}))
        assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))
    assert "Traceback" not in capfd.readouterr().err


def test_options_that_cannot_be_sent(model: str) -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        asyncio.run(start(model, hf_overrides={"x": object()}))


def test_a_start_that_is_cancelled(model: str) -> None:
    for seconds in (0.05, 1.5):
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(start(model), seconds))


def test_strangers_and_signals(model: str, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """While the socket is there to be found, what strangers send is logged and dropped; then it is gone.

    SIGINT and SIGTERM are the parent's business. Where the system does not end the child with its parent,
    the end of its standard input does.
    """
    bind, seen = connections.EngineConnection._bind, []
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)

    def bind_and_send(self: connections.EngineConnection) -> str:
        address = bind(self)
        folder = pathlib.Path(address.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        seen.append(folder)
        socket.connect(address)
        for junk in (pickle.dumps({"a": 1}), b"\x00" * 100_000, b"", encode(Hello("guess"))):
            socket.send(junk)
        socket.send_multipart([b"a", b"b"])
        return address

    monkeypatch.setattr(connections.EngineConnection, "_bind", bind_and_send)

    async def scenario() -> None:
        server = await start(model)
        assert not seen[0].exists()
        socket.send(b"more junk")
        output = await server.submit(server.parse_prompt("c"), SamplingParams(temperature=0, max_tokens=4)).output()
        assert output.outputs[0].text == "cccc"
        assert not socket.poll(100)  # and it is told nothing
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(server._connection.pid, number)
        await server.submit(server.parse_prompt("c"), SamplingParams(temperature=0, max_tokens=4)).output()
        server._connection._process.stdin.close()
        await asyncio.wait_for(server.wait_dead(), 5)
        await expect_death(server, "ended with exit status 1")

    try:
        asyncio.run(scenario())
    finally:
        socket.close()
        context.term()
    assert any("that are no message" in record.message for record in caplog.records)


@pytest.mark.parametrize("stage", ["while it starts", "under load"])
def test_a_killed_parent_leaves_no_orphan(model: str, repository: pathlib.Path, stage: str) -> None:
    """Under -O, which the child must run under as well."""
    command = [sys.executable, "-O", "-m", "tests.references.engine_parent", model, json.dumps(OPTIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=repository, text=True) as parent:
        if parent.stdout is None:
            raise RuntimeError("no pipe")
        pid, folder = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        assert "-O" in child.cmdline()
        if stage == "under load":
            assert parent.stdout.readline() == "ready 1\n"
            time.sleep(0.2)
        parent.kill()
        began = time.monotonic()
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - began < 2, "the engine process lives on"
            time.sleep(0.01)
    assert folder == "None"  # it was gone before


async def _read(stream: RequestStream) -> None:
    async for _ in stream:
        pass
