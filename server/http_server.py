"""uvicorn as Octavo runs it: its options from ours, and its signals left to `server/serve.py`."""

import asyncio
import contextlib
import functools
import math
import socket
import ssl
from collections.abc import Generator
from typing import Any, cast

import uvicorn

from octavo.configs.server import ServerConfig
from octavo.server.protocol import BoundedProtocol, Limits

FLUSH_SECONDS = 3.0  # for the last bytes of answers that are complete
ABANDON_SECONDS = 0.1  # for requests to notice that their clients were cut off
TICK_SECONDS = 1.0
STALL_SECONDS = 300.0  # that a client may leave its answer unread
BACKLOG = 2048  # connections that wait to be accepted


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and an event for the moment from which it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        super().__init__(config)
        self.listening = asyncio.Event()
        self._is_shut = False

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """Until it should exit. uvicorn looks ten times a second, which wakes an idle server and costs a busy one."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # sets the Date header too
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), TICK_SECONDS)

    @property
    def should_exit(self) -> bool:
        """May be set from any thread."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._is_shut = True

    async def abandon(self) -> None:
        """After `serve` was cancelled: closes what is open, quietly. Does nothing after an orderly end."""
        if not self.listening.is_set() or self._is_shut:
            return
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its request sees the client go, and ends
        await asyncio.sleep(ABANDON_SECONDS)
        await self.lifespan.shutdown()


def uvicorn_config(app: Any, config: ServerConfig, tls: ssl.SSLContext | None, limits: Limits) -> uvicorn.Config:
    """The options of a server for an ASGI application.

    Args:
      app: to be served.
      config: of `octavo serve`.
      tls: None for plain HTTP.
      limits: of each connection.
    """
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], functools.partial(BoundedProtocol, limits=limits)),  # only ever called
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=False,  # server/access.py writes it
        server_header=False,
        forwarded_allow_ips=list(config.forwarded_allow_ips),
        backlog=BACKLOG,
        timeout_keep_alive=cast(int, config.timeout_keep_alive),  # goes to call_later
        timeout_graceful_shutdown=math.ceil(config.drain_timeout + FLUSH_SECONDS),
        ssl_context_factory=None if tls is None else lambda _config, _default: tls,
    )


def limits_of(config: ServerConfig, connections: int) -> Limits:
    """What a connection may do, by the options; `connections` fit into this process."""
    return Limits(
        header_bytes=config.max_header_size,
        header_count=config.max_header_count,
        request_seconds=config.request_timeout,
        stall_seconds=STALL_SECONDS,
        connections=connections,
    )
