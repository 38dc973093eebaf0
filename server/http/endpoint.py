"""One POST route as an ASGI application: body in, checked request to a handler, and the watch over the connection."""

from collections.abc import Callable, Coroutine
from typing import Any

from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from octavo.configs.server import ServerConfig
from octavo.server.http.bodies import decode, read_body
from octavo.server.http.connection import StraightSend, while_connected
from octavo.server.http.workers import Workers

INLINE_BODY = 64 << 10  # bytes; a larger one is decoded in a thread


class Endpoint[M: BaseModel]:
    """Reads the body, and runs the handler until it is done or the client is gone.

    Args:
      model: what the body must hold.
      handler: gets the request, the X-Request-Id and ASGI's `send`, and answers.
      config: limits of size and time.
      workers: threads for large bodies.
    """

    def __init__(
        self,
        model: type[M],
        handler: Callable[[M, str, Send], Coroutine[Any, Any, None]],
        config: ServerConfig,
        workers: Workers,
    ) -> None:
        self._model = model
        self._handler = handler
        self._config = config
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(
            scope, receive, max_size=self._config.max_body_size, timeout=self._config.request_timeout
        )
        if len(body) <= INLINE_BODY:
            request = decode(self._model, body)
        else:
            request = await self._workers.run(decode, self._model, body)
        handling = self._handler(request, scope["state"]["request_id"], StraightSend(scope, send))
        await while_connected(receive, handling)
