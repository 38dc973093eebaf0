"""`octavo serve`: the life of the server, from the port to the exit status.

The port is bound before the model loads, so what is wrong with it shows at once. The engine is a process of its
own; the port listens when it is ready. SIGTERM or SIGINT: no new connection, running requests may finish for
`drain_timeout` seconds, the rest is aborted, status 0; a second signal ends at once. The engine dies: open
requests get an error, /health says 503 for a moment, status 1. Refuses to outlive its engine.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

from octavo.configs.engine import EngineConfig
from octavo.configs.errors import ConfigError
from octavo.configs.server import ServerConfig
from octavo.engine.client import AsyncEngine
from octavo.engine.text.chat_template import ChatTemplate
from octavo.server.access import Access
from octavo.server.http.app import make_app
from octavo.server.http_server import FLUSH_SECONDS, HttpServer, limits_of, uvicorn_config
from octavo.server.metrics import Metrics
from octavo.server.sockets import bind, is_loopback, raise_file_limit, tls_context, url
from octavo.server.stats_log import StatsLog

log = logging.getLogger("octavo.serve")

DEAD_SECONDS = 1.0  # that a server without an engine answers 503 before it ends
CLOSE_SECONDS = 5.0  # for the engine to end by itself: a compilation cannot be interrupted


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serves until it is told to stop or the engine dies.

    Returns:
      The exit status: 0 after a signal, 128 + its number after a second one, 1 when the engine died.

    Raises:
      ConfigError, LoadError: it cannot start with these options.
    """
    connections = raise_file_limit()
    tls = tls_context(config)
    with contextlib.closing(bind(config)) as sock, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(engine_config, config, sock, tls, connections))


class Signals:
    """SIGTERM and SIGINT: the first one asks, the second one insists."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.number = 0

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.number = number
        (self.insisted if self.asked.is_set() else self.asked).set()


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    connections: int,
) -> int:
    signals = Signals()
    signals.install()
    metrics = Metrics(config.served_model_name[0] if config.served_model_name else engine_config.model)
    if config.chat_template is not None:
        ChatTemplate(config.chat_template)  # what is wrong with it should not wait for the model
    start = AsyncEngine.start(
        engine_config,
        max_num_queued_reqs=config.max_num_queued_reqs,
        observer=metrics,
        chat_template=config.chat_template,
    )
    engine = await _unless(signals.asked, start)
    if engine is None:
        log.info("stopped by %s before the engine was ready", signal.Signals(signals.number).name)
        return 0
    try:
        metrics.describe(engine_config, engine.facts)
        app = make_app(engine, config, metrics)
        access = Access(
            app,
            app.routes,
            metrics.http,
            root_path=config.root_path,
            write_log=not config.disable_uvicorn_access_log,
        )
        server = HttpServer(uvicorn_config(access, config, tls, limits_of(config, connections)))
        return await Service(engine, server, config, signals).run(sock, metrics.stats_log)
    finally:
        await _close(engine, signals)


class Service:
    """A ready engine behind a listening server, until one of them ends."""

    def __init__(self, engine: AsyncEngine, server: HttpServer, config: ServerConfig, signals: Signals) -> None:
        self._engine = engine
        self._server = server
        self._config = config
        self._signals = signals

    async def run(self, sock: socket.socket, stats_log: StatsLog) -> int:
        """Returns the exit status. Raises ConfigError: the server could not listen."""
        serving = asyncio.ensure_future(_listen(self._server, sock))
        dead = asyncio.ensure_future(self._engine.wait_dead())
        asked = asyncio.ensure_future(self._signals.asked.wait())
        tasks = [serving, dead, asked, asyncio.ensure_future(self._announce(sock))]
        if not self._config.disable_log_stats:
            tasks.append(asyncio.ensure_future(stats_log.run(self._config.log_stats_interval)))
        try:
            await asyncio.wait((serving, dead, asked), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                status = await self._drain(serving)
            elif dead.done():
                status = await self._bury(serving)
            else:
                await serving
                status = 1
            return 1 if dead.done() and status == 0 else status
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._server.abandon()

    async def _announce(self, sock: socket.socket) -> None:
        await self._server.listening.wait()
        gc.collect()
        gc.freeze()  # what is there now stays: collections need not look at it again
        log.info("listening on %s", url(sock, self._config))
        if not self._config.api_key and not is_loopback(sock):
            log.warning("no api_key: everybody who can reach this address may use the server")

    async def _drain(self, serving: asyncio.Future[None]) -> int:
        seconds = self._config.drain_timeout
        name = signal.Signals(self._signals.number).name
        log.info("%s: %d requests have %g s to finish", name, self._engine.num_unfinished, seconds)
        self._server.should_exit = True
        ended = await _unless(self._signals.insisted, self._finish(serving, seconds))
        if ended is None:
            self._server.force_exit = True
            log.warning("a second signal: ended at once")
            return 128 + self._signals.number
        log.info("stopped")
        return 0

    async def _finish(self, serving: asyncio.Future[None], seconds: float) -> bool:
        await self._engine.drain(seconds)
        await asyncio.wait((serving,), timeout=FLUSH_SECONDS)
        return True

    async def _bury(self, serving: asyncio.Future[None]) -> int:
        """The engine is dead: every open request hears of it, and so does whoever asks for /health."""
        log.critical("the engine died; the server ends")
        await _unless(self._signals.insisted, asyncio.sleep(DEAD_SECONDS))
        self._server.should_exit = True
        await _unless(self._signals.insisted, asyncio.wait((serving,), timeout=FLUSH_SECONDS))
        return 1


async def _listen(server: HttpServer, sock: socket.socket) -> None:
    try:
        await server.serve(sockets=[sock])
    except OSError as error:  # another server was quicker to listen on the port that both have bound
        raise ConfigError(f"cannot listen on {sock.getsockname()}: {error.strerror}") from None
    except SystemExit:  # uvicorn's way to say that the application did not start; the log says why
        raise ConfigError("the HTTP application did not start") from None


async def _close(engine: AsyncEngine, signals: Signals) -> None:
    """Ends the engine's process; by force if that takes long, or after a second signal."""
    closing = asyncio.ensure_future(engine.close())
    insisted = asyncio.ensure_future(signals.insisted.wait())
    await asyncio.sleep(0)  # it must have begun, to do by force what it was about to do
    await asyncio.wait((closing, insisted), timeout=CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in (closing, insisted):
        task.cancel()
    await asyncio.gather(closing, insisted, return_exceptions=True)


async def _unless[T](event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None if the event comes first, and `work` is cancelled."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        return None
    finally:
        task.cancel()
        waiting.cancel()


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop
