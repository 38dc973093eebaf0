"""POST /v1/completions through the real HTTP stack, on a scripted model."""

from typing import Any

import pytest

from tests.references.byte_tokenizer import byte_ids, piece_id
from tests.references.http_app import MODEL, RunningApp
from tests.references.local_engine import LocalEngine

HELLO, WORLD, EOS = piece_id(b"hello"), piece_id(b" world"), 2


def choices(server: RunningApp, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    answer = server.complete(prompt, **fields)
    assert answer.status == 200, answer.body
    return answer.json["choices"]


def test_a_completion(server: RunningApp) -> None:
    answer = server.complete("a").json
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-")
    assert answer["system_fingerprint"].startswith("octavo-")
    assert answer["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_prompts_times_n(server: RunningApp) -> None:
    """B057: index = prompt * n + sample, in order; the usage counts a prompt once."""
    answer = server.complete(["a", [*byte_ids("xa")], "u"], n=2, echo=True).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [c["text"] for c in answer["choices"]] == ["ahello world"] * 2 + ["xahello world"] * 2 + ["u\U0001f642"] * 2
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 18


def test_one_string_in_a_list_is_that_string(server: RunningApp) -> None:
    assert choices(server, ["a"]) == choices(server, "a") == choices(server, byte_ids("a"))


def test_one_wrong_prompt_runs_none(server: RunningApp) -> None:
    """B057: nothing is left running."""
    before = server.engine.submitted
    answer = server.complete(["e", "e", [400]], max_tokens=400)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert server.engine.submitted == before + 2  # and these two were aborted: the canary sees to that


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], "", [""], [-1], [320], [5279552648203111001], [[-1]], [1.5], [True], [1, "a"], {}, None, 1,
     ["a", ""], {"prompt": "a"}],
)  # fmt: skip
def test_wrong_prompts(server: RunningApp, prompt: Any) -> None:
    """B054, B055."""
    answer = server.complete(prompt)
    assert (answer.status, answer.error["param"]) == (400, "prompt"), answer.body


def test_max_tokens(server: RunningApp) -> None:
    """OpenAI's default of 16 where it is left out; null is as many as fit; what does not fit is refused."""
    assert server.complete("e").json["usage"]["completion_tokens"] == 16
    assert server.complete("e", max_tokens=None).json["usage"]["total_tokens"] == 512
    assert server.complete("x" * 504 + "e").json["usage"]["total_tokens"] == 512
    answer = server.complete("e", max_tokens=512)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert "512" in answer.error["message"]
    answer = server.complete("e" * 513)
    assert (answer.status, answer.error["param"]) == (400, "prompt")


def test_no_output_at_all(server: RunningApp) -> None:
    """B053: with echo it is the prompt, without it nothing."""
    for echo, text in ((True, "xyz"), (False, "")):
        answer = server.complete("xyz", max_tokens=0, echo=echo).json
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        events = server.complete("xyz", max_tokens=0, echo=echo, stream=True).events
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_echoed_logprobs(server: RunningApp) -> None:
    """B032: one entry for each token of the prompt and the output, none for the first."""
    (choice,) = choices(server, "ba", echo=True, logprobs=2)
    logprobs = choice["logprobs"]
    assert choice["text"] == "bahello world"
    assert logprobs["tokens"] == ["b", "a", "hello", " world", "</s>"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == pytest.approx(-20, abs=0.1)
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2, 2, 2, 2]
    assert logprobs["text_offset"] == [0, 1, 2, 7, 13]
    (prompt_only,) = choices(server, "ba", echo=True, logprobs=2, max_tokens=0)
    assert prompt_only["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:2]


def test_logprobs_zero_is_the_chosen_alone(server: RunningApp) -> None:
    """B033."""
    (choice,) = choices(server, "a", logprobs=0)
    assert choice["logprobs"]["tokens"] == ["hello", " world", "</s>"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [["hello"], [" world"], ["</s>"]]


def test_masked_tokens_have_finite_logprobs(server: RunningApp) -> None:
    """B029."""
    for extra in ({"top_k": 1, "temperature": 1}, {"logit_bias": {str(HELLO): -100}}, {"allowed_token_ids": [7]}):
        answer = server.complete("a", **{"logprobs": 5, "echo": True, "max_tokens": 2} | extra)
        assert answer.status == 200
        assert b"NaN" not in answer.body and b"Infinity" not in answer.body


def test_prompt_logprobs(server: RunningApp) -> None:
    (choice,) = choices(server, "ba", prompt_logprobs=1, return_token_ids=True)
    assert choice["prompt_token_ids"] == byte_ids("ba")
    assert choice["token_ids"] == [HELLO, WORLD, EOS]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second[str(byte_ids("a")[0])]["decoded_token"] == "a"
    assert set(second[str(EOS)]) == {"logprob", "rank", "decoded_token"}  # of the likeliest
    for field, value in (("logprobs", 6), ("prompt_logprobs", 6), ("logprobs", 10**6)):
        answer = server.complete("a", **{field: value})
        assert (answer.status, answer.error["param"]) == (400, field)
        assert "5" in answer.error["message"]


def test_stop_strings(server: RunningApp) -> None:
    """B001, B005: found across tokens; in the answer only on demand."""
    (choice,) = choices(server, "o", stop="Serva")
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Ob", "stop", "Serva")
    (choice,) = choices(server, "o", stop=["zzz", "Serva"], include_stop_str_in_output=True)
    assert choice["text"] == "ObServa"
    (choice,) = choices(server, "a", stop_token_ids=[WORLD])
    assert (choice["text"], choice["stop_reason"]) == ("hello", WORLD)
    assert choices(server, "a", stop=[])[0]["text"] == choices(server, "a", stop=None)[0]["text"] == "hello world"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 1, {}, ["x" * 2000], ["x"] * 65, [None], True])
def test_wrong_stops(server: RunningApp, stop: Any) -> None:
    """B009."""
    answer = server.complete("a", stop=stop)
    assert (answer.status, answer.error["param"]) == (400, "stop")


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [[320], [319, 2**31], [-1], [1.5], ["1"], [True], 1, "x", [2**70]])
def test_ids_outside_of_the_vocabulary(server: RunningApp, field: str, value: Any) -> None:
    """A3: checked against the logits' width before anything runs."""
    answer = server.complete("a", **{field: value})
    assert (answer.status, answer.error["param"].partition("[")[0]) == (400, field), answer.body


@pytest.mark.parametrize(
    "bias", [{"320": 1}, {"191222": -100}, {"-1": 5}, {"abc": 1}, {"5": 1e9}, {"5": -101}, {"5": "1"}, [], "x",
             {"5": None}, {str(i): 0 for i in range(1025)}]
)  # fmt: skip
def test_wrong_logit_bias(server: RunningApp, bias: Any) -> None:
    """B044."""
    answer = server.complete("a", logit_bias=bias)
    assert (answer.status, answer.error["param"].partition(".")[0]) == (400, "logit_bias"), answer.body


def test_logit_bias_and_bad_words_change_the_output(server: RunningApp) -> None:
    seven = byte_ids("7")[0]
    assert choices(server, "a", logit_bias={str(seven): 100}, max_tokens=3)[0]["text"] == "777"
    assert choices(server, "a", allowed_token_ids=[seven], max_tokens=3)[0]["text"] == "777"
    assert choices(server, "o", ignore_eos=True, max_tokens=4)[0]["finish_reason"] == "length"
    assert server.complete("a", bad_words=["x" * 2000]).status == 400


def test_prompts_are_cut_on_demand(server: RunningApp) -> None:
    assert server.complete("xxxa", truncate_prompt_tokens=2, echo=True).json["choices"][0]["text"] == "xahello world"
    answer = server.complete("x" * 5_000 + "a", truncate_prompt_tokens=-1, max_tokens=5).json
    assert answer["usage"]["prompt_tokens"] == 507
    for wrong in (0, -2, 5000, "1", 1.5):
        refused = server.complete("a", truncate_prompt_tokens=wrong)
        assert refused.status == 400, wrong


def test_there_is_an_end_to_what_is_cut(engine: LocalEngine) -> None:
    """While a tokenizer lists the ids of a very long text, nobody else is answered."""
    with RunningApp(engine, max_body_size=1 << 23) as running:
        answer = running.complete("x" * ((4 << 20) + 1), truncate_prompt_tokens=1)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert "can be truncated" in answer.error["message"]


def test_cached_tokens(server: RunningApp) -> None:
    """B097: none at first, then whole blocks; the salt keeps prompts apart (CVE-2025-46570)."""
    prompt = "a cached prompt of more than two blocks, ending in a"
    cached = [
        server.complete(prompt, **extra).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for extra in ({}, {}, {"cache_salt": "x"}, {"cache_salt": "x"}, {"n": 2})
    ]
    assert cached == [0, 48, 0, 48, 48]


@pytest.mark.parametrize(("salt", "status"), [("\0", 200), ("\U0001f642", 200), ("", 400), ("x" * 2000, 400), (1, 400)])
def test_odd_salts(server: RunningApp, salt: Any, status: int) -> None:
    """CVE-2026-105756."""
    assert server.complete("a", cache_salt=salt).status == status


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 0), ("n", 129), ("n", 10**9), ("best_of", 10**9), ("max_tokens", -1), ("seed", 2**64), ("top_p", 0),
     ("top_p", 1.5), ("top_k", -2), ("temperature", -0.1), ("presence_penalty", 3), ("min_tokens", 17),
     ("priority", 2**40), ("suffix", "x"), ("user", 1), ("echo", "yes"), ("stream", 1), ("stream_options", []),
     ("model", 5), ("request_id", "a\nb")],
)  # fmt: skip
def test_values_out_of_range(server: RunningApp, field: str, value: Any) -> None:
    """B059, B050: documented refusals, with the field's name."""
    answer = server.complete("a", **{field: value})
    assert (answer.status, answer.error["param"]) == (400, field), answer.body


def test_too_many_prompts(server: RunningApp) -> None:
    """CVE-2026-73559."""
    answer = server.complete([[5]] * 257)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert "256" in answer.error["message"]
    assert server.complete([[5]] * 200, max_tokens=1).status == 200


def test_seeds_and_samples(server: RunningApp) -> None:
    """B043: equal seeds give equal texts, also at once; samples of one request differ."""
    fields = {"temperature": 1.0, "logit_bias": {str(HELLO): -20}, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    first, second = (choices(server, "a", n=2, **fields) for _ in range(2))
    assert first == second
    assert first[0]["text"] != first[1]["text"]


def test_unknown_fields_and_users_are_ignored(server: RunningApp) -> None:
    assert choices(server, "a", foo={"x": [1]}, user="me", length_penalty=2.0) == choices(server, "a")


def test_models(server: RunningApp) -> None:
    """B135: unknown is 404, absent and null are the served one."""
    assert server.post("/v1/completions", prompt="a").json["model"] == MODEL
    assert server.complete("a", model=None).json["model"] == MODEL
    for name in ("other", "", "../x", "\U0001f642", "x" * 100_000):
        answer = server.complete("a", model=name)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert len(answer.body) < 2000
