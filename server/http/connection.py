"""What an answer needs of its connection: whole bodies, server-sent events, and work that ends when the client goes.

Everything here is plain ASGI messages, since a frame for every streamed token has to cost next to nothing.
"""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.server.http.errors import ApiError, ClientGone

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect events
]
DONE = b"data: [DONE]\n\n"
_STRAIGHT = "octavo.straight_send"


async def send_json(send: Send, value: Any) -> None:
    """Answers with `value` as JSON."""
    body = msgspec.json.encode(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def json_response(value: Any) -> Response:
    """The same for a route that returns its answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class StraightSend:
    """ASGI's `send` for a handler: the head passes all layers, and the body none of them but the outermost's `send`.

    No layer looks at a body, and each would cost every streamed token a coroutine.

    Args:
      scope: of the request; `open_way` has been called with it, or all messages take the same way.
      send: the layers'.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._straight: Send = scope["state"].get(_STRAIGHT, send)

    def __call__(self, message: Message) -> Awaitable[None]:
        return (self._straight if message["type"] == "http.response.body" else self._send)(message)


def open_way(scope: Scope, send: Send) -> None:
    """Called by the outermost layer, with the server's own `send`."""
    scope.setdefault("state", {})[_STRAIGHT] = send


class EventStream:
    """An answer of server-sent events. Its head is sent with the first event, so an error before it is a plain answer.

    Args:
      send: of ASGI.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Sends finished events, `data: …` and an empty line each; waits while the client reads too slowly."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes = b"") -> None:
        """Sends the last events and [DONE], and closes."""
        if not self.started:
            await self.write(b"")
        await self._send({"type": "http.response.body", "body": events + DONE})

    async def fail(self, error: ApiError) -> None:
        """Says in the middle of a stream what went wrong, and closes."""
        await self.finish(b"data: " + error.body + b"\n\n")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` and cancels it as soon as the client hangs up.

    Raises:
      ClientGone: it did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
