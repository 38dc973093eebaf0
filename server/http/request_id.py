"""X-Request-Id: taken from the client if it is plain, made here otherwise, and sent back with every answer.

It names the request to people. The engine's own ids are always fresh, so two requests with one X-Request-Id never
meet. Refuses (400) what could forge a log line, and more than one.
"""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.errors import ApiError, send_error

HEADER = b"x-request-id"
MAX_LENGTH = 128
_PLAIN = re.compile(rb"[!-~]{1,%d}" % MAX_LENGTH)


class RequestIdMiddleware:
    """Puts the id into `scope["state"]["request_id"]` and into the answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == HEADER]
        plain = len(given) == 1 and _PLAIN.fullmatch(given[0]) is not None
        request_id = given[0] if plain else uuid.uuid4().hex.encode()

        async def naming_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        if given and not plain:
            text = f"X-Request-Id must be one header of 1 to {MAX_LENGTH} visible ASCII characters"
            await send_error(naming_send, ApiError(400, text, param="X-Request-Id"))
            return
        scope.setdefault("state", {})["request_id"] = request_id.decode("ascii")
        await self.app(scope, receive, naming_send)
