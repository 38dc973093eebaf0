"""The outermost ASGI layer: one log line and the HTTP metrics of each request.

Neither ever holds a query string, a header or a body, and what a client chose (path, address, id) is escaped in
the log. Labels come from fixed sets: a path that is no route's counts as `other`, and so does an odd method.
"""

import logging
import re
import time
from collections.abc import Sequence

from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.connection import open_way
from octavo.server.metrics import HttpMetrics

log = logging.getLogger("octavo.access")

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
QUIET = frozenset({"/health", "/metrics"})  # asked every few seconds: logged only when they fail
CLIENT_GONE = 499  # no response: nginx's number for it
SHOWN = 200  # characters of anything in a log line


class Access:
    """Wraps an application.

    Args:
      app: what to wrap.
      routes: of the application, for their templates.
      metrics: gets one observation a request.
      root_path: a proxy's prefix, cut off before a path is looked up.
      write_log: write a line for each request.
    """

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], metrics: HttpMetrics, *, root_path: str, write_log: bool
    ) -> None:
        self._app = app
        self._templates = Templates(routes, root_path)
        self._metrics = metrics
        self._write_log = write_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE
        request_id = b""

        async def watch(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = next((value for name, value in message.get("headers", ()) if name == b"x-request-id"), b"")
            await send(message)

        open_way(scope, send)
        began = time.perf_counter()
        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = 500 if status == CLIENT_GONE else status
            raise
        finally:
            self._report(scope, status, request_id, time.perf_counter() - began)

    def _report(self, scope: Scope, status: int, request_id: bytes, seconds: float) -> None:
        template = self._templates.of(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else OTHER
        try:
            self._metrics.observe(template, method, status, seconds)
        except Exception:  # a request must not fail for a number about it
            log.exception("the HTTP metrics failed")
        if not self._write_log or (template in QUIET and status == 200):
            return
        client = scope.get("client")
        log.info(
            '%s "%s %s" %d %.3fs%s',
            printable(f"{client[0]}:{client[1]}") if client else "-",
            printable(scope["method"]),
            printable(scope["path"]),
            status,
            seconds,
            f" id={printable(request_id.decode('latin-1'))}" if request_id else "",
        )


class Templates:
    """From paths to the templates of routes, which are few."""

    def __init__(self, routes: Sequence[BaseRoute], root_path: str) -> None:
        self._root_path = root_path
        self._fixed: frozenset[str] = frozenset(
            route.path for route in routes if isinstance(route, Route) and "{" not in route.path
        )
        self._patterns: list[tuple[re.Pattern[str], str]] = [
            (route.path_regex, route.path)
            for route in routes
            if isinstance(route, Route | Mount) and route.path not in self._fixed
        ]

    def of(self, path: str) -> str:
        """The template, or `other`."""
        if self._root_path and path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        if path in self._fixed:
            return path
        return next((template for pattern, template in self._patterns if pattern.match(path)), OTHER)


def printable(text: str) -> str:
    """What a client sent, as printable ASCII without blanks or quotes, at most `SHOWN` characters."""
    cut = text[: SHOWN + 1]
    safe = "".join(c if " " < c < "\x7f" and c not in '"\\' else ascii_escape(c) for c in cut)
    return safe if len(safe) <= SHOWN else safe[:SHOWN] + "…"


def ascii_escape(character: str) -> str:
    r"""\x1b and the like."""
    return character.encode("unicode_escape").decode("ascii") if character not in '" \\' else f"\\x{ord(character):02x}"
