"""The OpenAPI document, from the classes that read requests and write answers."""

from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from octavo.configs.server import ServerConfig
from octavo.server.openai import responses as r
from octavo.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.openai.service import VERSION

_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ANSWERS = (r.ChatCompletion, r.Completion, r.ModelList, r.Model, r.Tokens, r.Text, r.Version, r.Done, r.Error)
_REF = "#/components/schemas/"
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No valid key.",
    "404": "No such model.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "431": "The headers are too large.",
    "500": "The request failed in the engine.",
    "503": "Too many requests wait (then with Retry-After), or the engine is dead.",
}


def document(config: ServerConfig) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _post("Answer a conversation.", "ChatRequest", "ChatCompletion", stream=True)},
        "/v1/completions": {"post": _post("Continue prompts.", "CompletionRequest", "Completion", stream=True)},
        "/tokenize": {"post": _post("The token ids of a prompt or a conversation.", "TokenizeRequest", "Tokens")},
        "/detokenize": {"post": _post("The text of token ids.", "DetokenizeRequest", "Text")},
        "/v1/models": {"get": _get("The model's names.", "ModelList")},
        "/v1/models/{name}": {"get": _get("One of them.", "Model", missing=True) | {"parameters": [_NAME]}},
        "/health": {"get": {"summary": "Whether the engine lives.", "responses": {"200": _OK} | _errors("503")}},
        "/version": {"get": _get("The server's version.", "Version")},
        "/metrics": {"get": {"summary": "For Prometheus.", "responses": {"200": _OK} | _errors("401")}},
    }
    if config.enable_reset_prefix_cache:
        paths["/reset_prefix_cache"] = {"post": _get("Forget cached prefixes.", "Done", engine=True)}
    if config.api_key:
        for path, operations in paths.items():
            if path != "/health" and not (path == "/metrics" and config.open_metrics):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": VERSION, "description": "OpenAI's API, with vLLM's additions."},
        "servers": [{"url": config.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


_OK = {"description": "It does."}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _post(summary: str, request: str, answer: str, *, stream: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + answer}}}
    if stream:
        content["text/event-stream"] = {}  # chunks, of which OpenAPI 3.1 has no way to speak
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + request}}}},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(*_ERRORS),
    }


def _get(summary: str, answer: str, *, missing: bool = False, engine: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + answer}}}
    errors = _errors("400", "401", "431", *(["404"] if missing else []), *(["503"] if engine else []))
    return {"summary": summary, "responses": {"200": {"description": "The answer.", "content": content}} | errors}


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


def _schemas() -> dict[str, Any]:
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF + "{model}")
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF + "{name}")
    return requests["$defs"] | answers
