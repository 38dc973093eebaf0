"""uvicorn's HTTP protocol with bounds: header bytes and count, arrival time, stalled readers, open connections.

The parser below it (llhttp) accumulates without a limit and uvicorn times out nothing but idle connections
that have had a response, so a client could hold memory or a socket for ever. Refuses with an error body in
OpenAI's form. Requests on one connection run one after the other; if it breaks, all of them are told.
"""

import asyncio
import dataclasses
import re
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.server.http.errors import ApiError

LINGER = 1.0  # seconds
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one connection may do.

    Attributes:
      header_bytes: of a request's line and headers together, and of whatever a body is framed with.
      header_count: headers of a request, trailers included.
      request_seconds: from a request's first byte to its last.
      stall_seconds: that a client may leave a full write buffer unread.
      connections: open at once.
    """

    header_bytes: int
    header_count: int
    request_seconds: float
    stall_seconds: float
    connections: int


class Refused(Exception):
    """Ends parsing; httptools wraps it, and `status` of the protocol says what to answer."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limits` come from `functools.partial`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits
        self.access_log = False  # uvicorn's shows query strings; server/access.py has its own
        self._refusal = (400, "the request is not valid HTTP")
        self._refused = False
        self._unframed = 0  # bytes since the last piece of a body: line, headers, chunk sizes, trailers
        self._header_bytes = 0
        self._header_count = 0
        self._past_headers = False
        self._arriving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    # Connections.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(503, f"more than {self.limits.connections} connections are open")
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._stalled, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._arriving = self._stalled = self.timeout_keep_alive_task = None
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._unframed += len(data)
        super().data_received(data if self._arriving else without_upgrade(data))
        if self._refused or self.transport.is_closing():
            return
        if self._unframed > self.limits.header_bytes:
            self._refuse(431, f"a request's headers must have at most {self.limits.header_bytes} bytes")
        elif self._arriving is None and self.timeout_keep_alive_task is None and not self._busy:
            self._wait_for_request()  # blank lines between requests do not extend the wait for ever

    # Parser callbacks.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_count = 0
        self._past_headers = False
        if self._arriving is None:
            self._arriving = self.loop.call_later(self.limits.request_seconds, self._too_slow)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._past_headers:  # a trailer must not pass for a header that a proxy has let through
            super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        self._header_count += 1
        if self._header_count > self.limits.header_count:
            self._fail(431, f"a request must have at most {self.limits.header_count} headers")

    def on_headers_complete(self) -> None:
        self._past_headers = True
        if self.parser.should_upgrade():  # the headers came in pieces; httptools would drop the body
            self._fail(400, "this server speaks plain HTTP/1.1: no CONNECT, and no Upgrade header")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unframed = 0
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        super().on_message_complete()

    # Writing.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for anything that the parser, or a callback above, does not take."""
        self._refuse(*self._refusal)

    # Below: our own.

    @property
    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.limits.header_bytes:
            self._fail(431, f"a request's headers must have at most {self.limits.header_bytes} bytes")

    def _fail(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise Refused(message)

    def _wait_for_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _too_slow(self) -> None:
        self._arriving = None
        self._refuse(408, f"a request must arrive within {self.limits.request_seconds:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless that could be taken for another request's answer, and closes."""
        self._refused = True
        for timer in (self._arriving, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._arriving = self.timeout_keep_alive_task = None
        cycle = self.cycle
        if self._busy:
            unanswered = cycle is self._running and cycle.more_body and not cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        else:
            unanswered = cycle is None or not cycle.more_body
        if not unanswered:
            self.transport.close()
            return
        self.transport.write(refusal(status, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # What the client has sent and nobody has read would make the kernel reset the connection, and the answer
        # would be lost: it is read and dropped for a moment.
        self.loop.call_later(LINGER, self.transport.abort)


def without_upgrade(data: bytes) -> bytes:
    """The first bytes of a request, asking for no other protocol: a server may ignore that, httptools cannot.

    (Java's client asks for HTTP/2 in its first request, whatever it is.)
    """
    end = data.find(b"\r\n\r\n")
    if end < 0 or _UPGRADE.search(data, 0, end) is None:
        return data
    return _UPGRADE.sub(b"\r\nx-upgrade:", data[:end]) + data[end:]


def refusal(status: int, message: str) -> bytes:
    """A whole response that ends its connection."""
    body = ApiError(status, message).body
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, REASONS[status], len(body)) + body
