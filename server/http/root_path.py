"""The prefix under which a proxy shows this server: cut off before routing, if the proxy has left it on."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Tells the router the prefix. (uvicorn's own option would put it in front of paths that the proxy has cut.)"""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self.app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._root_path
        await self.app(scope, receive, send)
