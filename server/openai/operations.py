"""Routes for those who run the server: /health, /version, /metrics, /reset_prefix_cache."""

from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.connection import json_response
from octavo.server.openai.responses import Done, Version
from octavo.server.openai.service import VERSION, Service


class Exposition(Protocol):
    """The server's metrics, as far as a route needs them."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type, in the form that the header Accept asks for."""


async def health(service: Service, request: Request) -> Response:
    """200 without a body while the engine lives. Raises EngineDeadError, which is 503."""
    service.engine.check_health()
    return Response()


async def version(service: Service, request: Request) -> Response:
    """The server's version."""
    return json_response(Version(VERSION))


async def metrics(exposition: Exposition, request: Request) -> Response:
    """For Prometheus."""
    body, content_type = exposition.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forgets cached prefixes; no success while something runs."""
    return json_response(Done(await service.engine.reset_prefix_cache()))
