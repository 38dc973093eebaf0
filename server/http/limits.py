"""Bounds on a request's line and headers: 431 before anything reads them."""

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.http.errors import ApiError


class HeaderLimitMiddleware:
    """Refuses requests with too many or too large headers, or too long a path.

    Args:
      app: what is inside.
      max_size: bytes of path, query and headers.
      max_count: headers.
    """

    def __init__(self, app: ASGIApp, *, max_size: int, max_count: int) -> None:
        self.app = app
        self._max_size = max_size
        self._max_count = max_count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            if len(headers) > self._max_count:
                raise ApiError(431, f"the request has {len(headers)} headers, at most {self._max_count}")
            size = sum(len(name) + len(value) for name, value in headers)
            size += len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
            if size > self._max_size:
                raise ApiError(431, f"the request's line and headers are {size} bytes, at most {self._max_size}")
        await self.app(scope, receive, send)
