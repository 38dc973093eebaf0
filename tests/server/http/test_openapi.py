"""The OpenAPI document, and a fuzzer that follows it."""

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.references.http_app import RunningApp
from tests.references.local_engine import LocalEngine

CASES = [25, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
ROUTES = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/{name}"]
ROUTES += ["/health", "/version", "/metrics", "/reset_prefix_cache"]


def test_the_document_is_complete(server: RunningApp) -> None:
    document = server.get("/openapi.json").json
    served = {route.path for route in server.app.routes} - {"/openapi.json", "/docs", "/redoc"}
    served -= {"/docs/oauth2-redirect"}
    assert {path.replace("{name}", "{name:path}") for path in document["paths"]} == served
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]


def test_the_document_can_be_hidden(engine: LocalEngine) -> None:
    with RunningApp(engine, disable_fastapi_docs=True) as running:
        for path in ("/openapi.json", "/docs", "/redoc"):
            assert running.get(path).status == 404


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("route", ROUTES)
def test_requests_of_every_kind(server: RunningApp, route: str, cases: int) -> None:
    """Bar 3: no answer is a 5xx, each is one that the document knows, and what is wrong is refused."""
    document = server.get("/openapi.json").json
    schema = schemathesis.openapi.from_dict(document)
    for method in document["paths"][route]:
        operation = schema[route][method.upper()]

        @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        def run(case: Any) -> None:
            if isinstance(case.body, dict):  # long outputs are no errors, but take their time
                case.body |= {name: 2 for name in ("max_tokens", "max_completion_tokens") if name in case.body}
            # What no schema can say (that a prompt fits, say) makes some of its requests wrong ones.
            case.call_and_validate(
                base_url=f"http://127.0.0.1:{server.port}", excluded_checks=[positive_data_acceptance]
            )

        run()
