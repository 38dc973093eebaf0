"""The HTTP application on a real port, in a thread of this process, over a LocalEngine with a scripted model."""

import abc
import asyncio
import dataclasses
import http.client
import json
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

from octavo.configs.server import ServerConfig
from octavo.server.http.app import make_app
from octavo.server.http_server import HttpServer, limits_of, uvicorn_config
from octavo.server.metrics import Metrics
from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.local_engine import LocalEngine
from tests.references.servers import Server
from tests.references.table_model import EOS, TableModel, chain

MODEL = "scripted"
OPTIONS = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 1024,
    "decode_rungs": (8,),
    "token_rungs": (256,),
    "warmup": "full",
    "max_logprobs": 5,
}
SCRIPT: dict[int, Any] = {
    **chain(*byte_ids("a"), piece_id(b"hello"), piece_id(b" world"), EOS),
    **chain(*byte_ids("\n"), piece_id(b"Pari"), piece_id(b"s is"), EOS),  # an assistant's turn
    **chain(*byte_ids("o"), piece_id(b"ObSer"), piece_id(b"vation: x"), EOS),
    **chain(*byte_ids("u"), piece_id(b"\xf0\x9f"), piece_id(b"\x99\x82"), EOS),  # an emoji in two halves
    **chain(*byte_ids("efge")),  # goes on for ever
}


def write_model(directory: pathlib.Path) -> str:
    """The scripted model's directory."""
    return str(TableModel(table=SCRIPT).write(directory))


@dataclasses.dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose form is checked."""
        (error,) = [self.json["error"]]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and error["message"]
        for leak in ("Traceback", "/work", "/tmp", "site-packages", " at 0x", "object at"):
            assert leak not in error["message"], error
        return error

    @property
    def events(self) -> list[Any]:
        """The chunks of a stream that ended with [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream")
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [json.loads(part[6:]) for part in parts[:-2]]


class Client(abc.ABC):
    """Asks a server at `port`, which serves the scripted model."""

    port: int

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Requests in its engine."""

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def send(self, path: str, body: bytes, **headers: str) -> Answer:
        """A POST of bytes."""
        return self.request("POST", path, body, {"content-type": "application/json"} | headers)

    def post(self, path: str, **fields: Any) -> Answer:
        """A POST of an object."""
        return self.send(path, json.dumps(fields).encode())

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """A greedy completion."""
        return self.post("/v1/completions", **{"model": MODEL, "prompt": prompt, "temperature": 0} | fields)

    def chat(self, *messages: Any, **fields: Any) -> Answer:
        """A greedy chat; texts are a user's."""
        listed = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return self.post("/v1/chat/completions", **{"model": MODEL, "messages": listed, "temperature": 0} | fields)

    def raw(self, data: bytes, timeout: float = 10) -> bytes:
        """What the server says to these bytes until it closes or falls silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: _receive(connection), b""))

    def open(self, path: str, **fields: Any) -> socket.socket:
        """A POST whose answer is still to be read."""
        body = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(head.encode() + body)
        return connection


class RunningApp(Client):
    """The application of an engine, served until it is closed.

    Args:
      engine: started; it may be shared with others.
      options: of ServerConfig.
    """

    def __init__(self, engine: Any, **options: Any) -> None:
        self.engine = engine
        self.config = ServerConfig(**{"served_model_name": (MODEL,), "enable_reset_prefix_cache": True} | options)
        self.app = make_app(engine, self.config, Metrics(MODEL))
        self.server = HttpServer(uvicorn_config(self.app, self.config, None, limits_of(self.config, 1000)))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self.server.serve(sockets=[self.socket]))
        await self.server.listening.wait()
        self._ready.set()
        await serving

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteApp(Client):
    """The same application in a real server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.port = server.port

    @property
    def num_unfinished(self) -> int:
        return int(sum(self._server.load[:2]))


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return b""


def scripted_engine(directory: pathlib.Path) -> Iterator[LocalEngine]:
    """An engine with the script; it must be left without work."""
    engine = LocalEngine(write_model(directory), **OPTIONS)
    try:
        yield engine
        assert engine.is_clean
    finally:
        engine.core.close()
