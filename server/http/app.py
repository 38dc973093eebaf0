"""The application: routes as a table, and the layers around them.

Outermost first: CORS (a preflight has no key), X-Request-Id, errors, limits on headers, keys. Every layer is plain
ASGI. A path that is not in the table is 404, and without a key 401 like all others.
"""

import contextlib
import functools
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from octavo.configs.server import ServerConfig
from octavo.engine.client import AsyncEngine
from octavo.server.http.auth import AuthMiddleware
from octavo.server.http.endpoint import Endpoint
from octavo.server.http.errors import ErrorMiddleware, answer_http_exception
from octavo.server.http.limits import HeaderLimitMiddleware
from octavo.server.http.openapi import document
from octavo.server.http.request_id import RequestIdMiddleware
from octavo.server.http.root_path import RootPathMiddleware
from octavo.server.openai import chat, completions, models, operations, tokenize
from octavo.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.openai.service import VERSION, Service, make_service


def make_app(engine: AsyncEngine, config: ServerConfig, metrics: operations.Exposition) -> FastAPI:
    """The ASGI application of one engine.

    Args:
      engine: started, with the operator's chat template.
      config: the server's options.
      metrics: for /metrics.
    """
    service = make_service(engine, config)
    docs = not config.disable_fastapi_docs
    app = FastAPI(
        title="Octavo",
        version=VERSION,
        redirect_slashes=False,  # a redirect would repeat what the Host header says
        openapi_url="/openapi.json" if docs else None,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        lifespan=functools.partial(_lifespan, service),
    )
    app.openapi = functools.partial(document, config)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, answer_http_exception)
    _add_routes(app, service, metrics)
    _add_layers(app, config)
    return app


def _add_routes(app: FastAPI, service: Service, metrics: operations.Exposition) -> None:
    config, workers = service.config, service.workers

    def post(path: str, endpoint: Callable[..., object]) -> None:
        app.add_route(path, endpoint, methods=["POST"], include_in_schema=False)  # type: ignore[arg-type]

    def get(path: str, function: Callable[[Request], object]) -> None:
        app.add_route(path, function, methods=["GET"], include_in_schema=False)  # type: ignore[arg-type]

    bind = functools.partial
    post("/v1/chat/completions", Endpoint(ChatRequest, bind(chat.create, service), config, workers))
    post("/v1/completions", Endpoint(CompletionRequest, bind(completions.create, service), config, workers))
    post("/tokenize", Endpoint(TokenizeRequest, bind(tokenize.tokenize, service), config, workers))
    post("/detokenize", Endpoint(DetokenizeRequest, bind(tokenize.detokenize, service), config, workers))
    get("/v1/models", bind(models.list_models, service))
    get("/v1/models/{name:path}", bind(models.get_model, service))
    get("/health", bind(operations.health, service))
    get("/version", bind(operations.version, service))
    get("/metrics", bind(operations.metrics, metrics))
    if config.enable_reset_prefix_cache:
        post("/reset_prefix_cache", bind(operations.reset_prefix_cache, service))


def _add_layers(app: FastAPI, config: ServerConfig) -> None:
    """The last one added is the outermost."""
    open_paths = ["/health", *(["/metrics"] if config.open_metrics else [])]
    open_paths += [config.root_path + path for path in open_paths]
    app.add_middleware(AuthMiddleware, keys=config.api_key, open_paths=open_paths)
    app.add_middleware(HeaderLimitMiddleware, max_size=config.max_header_size, max_count=config.max_header_count)
    if config.root_path:
        app.add_middleware(RootPathMiddleware, root_path=config.root_path)
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(RequestIdMiddleware)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id",),
        )


@contextlib.asynccontextmanager
async def _lifespan(service: Service, _: FastAPI) -> AsyncIterator[None]:
    yield
    service.workers.close()
