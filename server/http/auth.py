"""Keys: every path needs one but those that are named open. Decides on scope["path"] alone, the path that is routed.

(What a Host header says about the URL, or a second reading of the raw path, must not open a door.) Where no key is
configured, nothing is asked for. Keys are compared in constant time, as bytes.
"""

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.http.errors import ApiError


class AuthMiddleware:
    """Answers 401 to a request without one of the keys.

    Args:
      app: what is inside.
      keys: none turns it off.
      open_paths: exact paths that need none.
    """

    def __init__(self, app: ASGIApp, *, keys: Collection[str], open_paths: Collection[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # nothing here speaks it
            await send({"type": "websocket.close", "code": 1008})
            return
        closed = scope["type"] == "http" and scope["path"] not in self._open_paths
        if closed and self._digests and not self._has_key(scope):
            raise ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        await self.app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = hashlib.sha256(key.strip(b" ")).digest()
        # Every key is compared, so the time does not say which one came close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
