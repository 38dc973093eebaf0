"""Errors as HTTP answers in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

What a message may say is what the caller sent and which limit it broke. An error that nobody foresaw is logged here
and answered with a fixed text: no path, no representation of an object and no traceback leaves the process.
"""

import logging
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.errors import EngineDeadError, OctavoError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters
RETRY_AFTER = 1  # seconds
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|<[\w.]+ object>")
_PHRASES = {404: "there is nothing at this path", 405: "this path does not take the method"}


class ApiError(OctavoError):
    """One answer that is an error.

    Args:
      status: of HTTP.
      message: for the caller.
      param: the field that is wrong.
      code: a word for programs, such as model_not_found.
      headers: more of the answer's headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = clean(message)
        self.param = None if param is None else clean(param)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class ClientGone(OctavoError):
    """The client hung up, so nothing is answered."""


def clean(text: str) -> str:
    """`text` as an error may show it: bounded, without addresses, and something that UTF-8 can hold."""
    text = _ADDRESS.sub("", text)
    text = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."
    return text.encode(errors="replace").decode()


def as_api_error(error: Exception) -> ApiError:
    """What the caller is told of any error; the unforeseen ones are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", headers={"retry-after": str(RETRY_AFTER)})
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine stopped", code="engine_dead")
    logger.error("an unforeseen error in a request", exc_info=error)
    return ApiError(500, "something went wrong in the server; its log says what", code="internal_error")


async def send_error(send: Send, error: ApiError) -> None:
    """Answers with an error, whole."""
    body = error.body
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class ErrorMiddleware:
    """Turns what the application raises into an answer; once one has begun, the connection is closed instead."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except ClientGone:
            return
        except Exception as error:
            answer = as_api_error(error)
            if not started:
                await send_error(send, answer)


async def answer_http_exception(_: Request, error: Exception) -> Response:
    """What Starlette raises by itself (no such path, no such method), in our form."""
    if not isinstance(error, HTTPException):
        raise error
    answer = ApiError(error.status_code, _PHRASES.get(error.status_code, "the request is refused"))
    return Response(answer.body, error.status_code, headers=error.headers, media_type="application/json")
