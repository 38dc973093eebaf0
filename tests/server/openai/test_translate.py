"""From fields to SamplingParams, without a server."""

from typing import Any

import pytest

from octavo.engine.errors import RequestError
from octavo.engine.request import SamplingParams
from octavo.server.http.bodies import decode
from octavo.server.http.errors import ApiError
from octavo.server.openai import translate as t
from octavo.server.openai.requests import ChatRequest, CompletionRequest

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=99)
USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "a"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": USER} | fields)


def test_defaults_are_the_models_and_null_is_absent() -> None:
    params = t.completion_params(completion(temperature=None, stop=None, logit_bias=None, seed=None), DEFAULTS)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    assert params.max_tokens is None


def test_every_sampling_field_arrives() -> None:
    """B051: nothing is lost between the route and the sampler."""
    given = {
        "n": 2, "temperature": 0.5, "top_p": 0.7, "top_k": 5, "min_p": 0.1, "presence_penalty": 1.5,
        "frequency_penalty": -1.5, "repetition_penalty": 1.1, "seed": -7, "stop": ["x", "y"], "stop_token_ids": [3],
        "bad_words": ["z"], "allowed_token_ids": [1, 2], "ignore_eos": True, "min_tokens": 1,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    same = given | {"max_tokens": 7, "prompt_logprobs": 2}
    expected = SamplingParams(**same, logit_bias={5: -100.0}, logprobs=3)
    bias = {"logit_bias": {"5": -100}}
    assert t.completion_params(completion(**same, **bias, logprobs=3), DEFAULTS) == expected
    assert t.chat_params(chat(**same, **bias, logprobs=True, top_logprobs=3), DEFAULTS) == expected


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 2, "echo": True}, 2, 2),
        ({"logprobs": 0, "echo": True}, 0, 0),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 3}, 2, 3),
        ({"echo": True}, None, None),
    ],
)
def test_logprobs_of_completions(fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None) -> None:
    params = t.completion_params(completion(**fields), DEFAULTS)
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False, "top_logprobs": 0}, None), ({"logprobs": True}, 0),
     ({"logprobs": True, "top_logprobs": 4}, 4)],
)  # fmt: skip
def test_logprobs_of_chats(fields: dict[str, Any], logprobs: int | None) -> None:
    request = chat(**fields)
    t.check_chat(request)
    assert t.chat_params(request, DEFAULTS).logprobs == logprobs


def test_the_newer_name_of_max_tokens_wins() -> None:
    """B059."""
    assert t.chat_params(chat(max_tokens=5, max_completion_tokens=3), DEFAULTS).max_tokens == 3
    assert t.chat_params(chat(max_tokens=5), DEFAULTS).max_tokens == 5


@pytest.mark.parametrize(
    ("asked", "default", "room", "expected"),
    [(7, 3, 5, 7), (0, None, 5, 0), (None, 3, 5, 3), (None, 9, 5, 5), (None, None, 5, 5), (None, None, 0, 1)],
)
def test_room(asked: int | None, default: int | None, room: int, expected: int) -> None:
    assert t.with_room(SamplingParams(max_tokens=asked), default, room).max_tokens == expected


def test_min_tokens_is_checked_once_max_tokens_is_known() -> None:
    """B058 (CVE-2026-114051): more than a null max_tokens becomes."""
    params = t.completion_params(completion(min_tokens=50, max_tokens=None), DEFAULTS)
    with pytest.raises(RequestError, match="min_tokens"):
        t.with_room(params, None, 40)


@pytest.mark.parametrize("key", ["abc", "-1", "1.0", " 1", "", "٣", "9" * 30, "0x1", "1_0"])
def test_logit_bias_keys(key: str) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        t.completion_params(completion(logit_bias={key: 1}), DEFAULTS)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "(a+)+b"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"documents": [{}]}, "documents"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template": ""}, "chat_template"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_is_not_built_or_contradicts_itself(fields: dict[str, Any], field: str) -> None:
    """Never ignored: a 400 that names the field."""
    with pytest.raises(RequestError) as caught:
        t.check_chat(chat(**fields))
    assert caught.value.field == field
    assert field in str(caught.value)


def test_what_asks_for_nothing_is_accepted() -> None:
    t.check_chat(
        chat(tools=[], tool_choice="auto", functions=[], function_call="none", response_format={"type": "text"},
             best_of=1, use_beam_search=False, modalities=["text"], parallel_tool_calls=True, documents=[],
             structured_outputs=None, user="me", logprobs=None, top_logprobs=0)
    )  # fmt: skip
    with pytest.raises(RequestError, match="suffix is not built yet"):
        t.check_completion(completion(suffix="x"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("x", ["x"]), ("", [""]), ([1, 2], [[1, 2]]), (["x", "y"], ["x", "y"]), ([[1], [2, 3]], [[1], [2, 3]]),
     (["x", [1]], ["x", [1]]), ([[]], [[]]), ([""], [""])],
)  # fmt: skip
def test_prompts(prompt: Any, expected: Any) -> None:
    """B057: a list of one string is that string, and both kinds may be mixed."""
    assert t.split_prompts(prompt, 5) == expected


@pytest.mark.parametrize(
    "prompt",
    [None, 1, 1.5, True, {}, {"prompt": "x"}, [], [1.5], [True], [1, "a"], ["a", 1], [[1.5]], [["a"]], [[[1]]],
     [None], [[None]], [{}], [[True]], list(range(6)), [[1] * 6]],
)  # fmt: skip
def test_what_is_no_prompt(prompt: Any) -> None:
    """B055."""
    with pytest.raises(RequestError, match="prompt"):
        t.split_prompts(prompt, 5)


@pytest.mark.parametrize("counts", [(3, 1), (1, 11), (2, 10**9), (2048, 3)])
def test_too_many_samples(counts: tuple[int, int]) -> None:
    """CVE-2026-34756 and CVE-2026-73559: before anything is allocated."""
    most = 4096 if counts[0] > 100 else 2
    with pytest.raises(RequestError, match=r"at most|more than"):
        t.check_samples(*counts, max_prompts=most, max_n=10)


def test_a_priority_that_nobody_heeds() -> None:
    t.check_priority(None, "fcfs")
    t.check_priority(0, "fcfs")
    t.check_priority(-3, "priority")
    with pytest.raises(RequestError, match="scheduling_policy"):
        t.check_priority(1, "fcfs")


def test_many_prompts_with_long_masks() -> None:
    t.check_allowed_ids([1] * 1000, 256)
    with pytest.raises(RequestError, match="allowed_token_ids"):
        t.check_allowed_ids([1] * 10_000, 256)


@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n", "top_k",
     "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "best_of", "truncate_prompt_tokens",
     "priority"],
)  # fmt: skip
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "[]", "{}", "1" * 400, "-1e30"]
)
def test_numbers_are_numbers(field: str, value: str) -> None:
    """B049, B133: for each numeric field."""
    body = f'{{"prompt": "a", "{field}": {value}}}'.encode()
    with pytest.raises((ApiError, RequestError)) as caught:
        request = decode(CompletionRequest, body)
        t.check_completion(request)
        t.completion_params(request, DEFAULTS)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "error", "message", "field"),
    [
        ({}, ("max_tokens is 9", "max_tokens"), "max_tokens is 9", "max_tokens"),
        ({"max_completion_tokens": 9}, ("max_tokens is 9", "max_tokens"), "max_completion_tokens is 9",
         "max_completion_tokens"),
        ({}, ("logprobs must be 3, prompt_logprobs not", "logprobs"), "top_logprobs must be 3, prompt_logprobs not",
         "top_logprobs"),
        ({}, ("the prompt is too long", "prompt"), "the prompt is too long", "messages"),
        ({}, ("messages[0] is wrong", "messages[0]"), "messages[0] is wrong", "messages[0]"),
        ({}, ("it is wrong", None), "it is wrong", None),
    ],
)  # fmt: skip
def test_chats_have_names_of_their_own(
    fields: dict[str, Any], error: tuple[str, str | None], message: str, field: str | None
) -> None:
    """The engine's names are those of completions."""
    told = t.in_chat_words(RequestError(*error), chat(**fields))
    assert (str(told), told.field) == (message, field)
