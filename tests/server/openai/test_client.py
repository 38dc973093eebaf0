"""The newest `openai` client with strict validation of every answer."""

from collections.abc import Iterator

import openai
import pytest

from tests.references.http_app import MODEL, RunningApp
from tests.references.local_engine import LocalEngine

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: RunningApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", _strict_response_validation=True, max_retries=0
    ) as client:
        yield client


def test_chats(client: openai.OpenAI, server: RunningApp) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, temperature=0, logprobs=True, top_logprobs=1, n=2, extra_body={"top_k": 1}
    )
    assert [choice.message.content for choice in answer.choices] == ["Paris is"] * 2
    assert answer.choices[0].logprobs.content[0].token == "Pari"
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id


def test_streamed_chats(client: openai.OpenAI, server: RunningApp) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Paris is"
    assert chunks[-1].usage.completion_tokens == 3
    with client.chat.completions.stream(model=MODEL, messages=HI, temperature=0) as events:
        assert events.get_final_completion().choices[0].message.content == "Paris is"


def test_completions(client: openai.OpenAI, server: RunningApp) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "u"], temperature=0, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["hello world", "\U0001f642"]
    # The client's types have no null finish_reason in a completion, which OpenAI itself sends while it streams.
    with openai.OpenAI(base_url=client.base_url, api_key="none") as lenient:
        chunks = list(lenient.completions.create(model=MODEL, prompt="a", temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"


def test_models(client: openai.OpenAI, server: RunningApp) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "octavo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_errors(client: openai.OpenAI, server: RunningApp, engine: LocalEngine) -> None:
    """B021: before the first token an error is an HTTP error, for a stream as well."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HI, temperature=-1, stream=stream)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="x" * 5000, stream=stream)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4", messages=HI, stream=stream)
    with pytest.raises(openai.BadRequestError, match="tools is not built yet"):
        client.chat.completions.create(
            model=MODEL, messages=HI, tools=[{"type": "function", "function": {"name": "f"}}]
        )
