"""/tokenize, /detokenize, /v1/models, /version, /health, /metrics, /reset_prefix_cache."""

from typing import Any

import pytest

from octavo.server.openai.service import VERSION
from tests.references.byte_tokenizer import byte_ids
from tests.references.http_app import MODEL, RunningApp
from tests.references.local_engine import LocalEngine


def test_tokenize_a_prompt(server: RunningApp) -> None:
    answer = server.post("/tokenize", model=MODEL, prompt="hé", return_token_strs=True).json
    assert answer["tokens"] == byte_ids("hé")
    assert (answer["count"], answer["max_model_len"]) == (3, 512)
    assert len(answer["token_strs"]) == 3
    assert server.post("/tokenize", prompt="x", add_special_tokens=False).json["token_strs"] is None


def test_tokenize_a_chat(server: RunningApp) -> None:
    """It is the prompt that a chat would run."""
    messages = [{"role": "user", "content": "hi"}]
    whole = server.post("/tokenize", messages=messages).json["tokens"]
    assert server.chat("hi", return_token_ids=True).json["prompt_token_ids"] == whole
    shorter = server.post("/tokenize", messages=messages, add_generation_prompt=False).json["tokens"]
    assert whole[: len(shorter)] == shorter and len(shorter) < len(whole)


@pytest.mark.parametrize("name", ["chat_template", "tools", "documents", "mm_processor_kwargs", "media_io_kwargs"])
@pytest.mark.parametrize("fields", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_what_tokenize_does_not_do_is_refused(server: RunningApp, name: str, fields: dict) -> None:
    """Beside a prompt too, where it would have no meaning."""
    answer = server.post("/tokenize", **fields, **{name: ["x"]})
    assert (answer.status, answer.error["param"]) == (400, name)


def test_detokenize(server: RunningApp) -> None:
    text = "a\U0001f642 é"
    assert server.post("/detokenize", tokens=byte_ids(text)).json == {"prompt": text}
    assert server.post("/detokenize", tokens=[]).json == {"prompt": ""}
    assert server.post("/detokenize", tokens=[2]).json == {"prompt": "</s>"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 500_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": [], "tools": [1]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 513}, "tokens"),  # CVE-2026-71486: bounded
    ],
)
def test_wrong_requests(server: RunningApp, path: str, fields: dict[str, Any], param: str) -> None:
    answer = server.post(path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert server.post(path, prompt="a", tokens=[5], model="other").status == 404


def test_models(engine: LocalEngine, server: RunningApp) -> None:
    """B135: aliases, and names with slashes, blanks and any script."""
    names = ("org/model", "a b", "模型", "x")
    with RunningApp(engine, served_model_name=names) as running:
        listed = running.get("/v1/models").json
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == list(names)
        assert all(model["object"] == "model" and model["root"] == "org/model" for model in listed["data"])
        assert listed["data"][0]["max_model_len"] == 512
        for path in ("org/model", "a%20b", "%E6%A8%A1%E5%9E%8B", "x"):
            assert running.get(f"/v1/models/{path}").status == 200
        for path in ("org", "", "org/model/", "../x", "%2e%2e/x"):
            assert running.get(f"/v1/models/{path}").error
        for name in names:
            assert running.complete("a", model=name).json["model"] == name


def test_version_health_and_metrics(server: RunningApp) -> None:
    assert server.get("/version").json == {"version": VERSION}
    assert server.get("/health").body == b""
    assert b"octavo:num_requests_running" in server.get("/metrics").body
    assert server.request("HEAD", "/health").status == 200


def test_resetting_the_prefix_cache_is_behind_a_flag(server: RunningApp, engine: LocalEngine) -> None:
    prompt = "a prompt to be forgotten, two blocks long and a"
    cached = []
    for _ in range(2):
        server.complete(prompt)
        cached.append(server.complete(prompt).json["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert server.post("/reset_prefix_cache").json == {"success": True}
        cached.append(server.complete(prompt).json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [32, 0, 32, 0]
    with RunningApp(engine, enable_reset_prefix_cache=False) as running:
        assert running.post("/reset_prefix_cache").status == 404
