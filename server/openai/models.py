"""GET /v1/models: the names under which the one model is served."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.http.connection import json_response
from octavo.server.openai.responses import Model, ModelList
from octavo.server.openai.service import Service


async def list_models(service: Service, request: Request) -> Response:
    """All names; the first one is what answers say by default."""
    return json_response(ModelList([_model(service, name) for name in service.names]))


async def get_model(service: Service, request: Request) -> Response:
    """One of them. Raises ApiError (404)."""
    return json_response(_model(service, service.model_name(request.path_params["name"])))


def _model(service: Service, name: str) -> Model:
    return Model(name, service.created, service.names[0], service.engine.facts.max_model_len)
