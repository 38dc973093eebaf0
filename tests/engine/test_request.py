"""SamplingParams and Request refuse what is out of range, and name the field."""

import math

import msgspec
import pytest

from octavo.engine.errors import RequestError
from octavo.engine.request import Request, SamplingParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", True, None, [1.0], 10**400]
NOT_INTEGERS = ["1", 1.0, True, [1], math.nan]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", [1, 16384], [0, -1, 16385, 10**9, None, *NOT_INTEGERS]),
        ("presence_penalty", [-2, 2.0, 0], [-2.1, 2.1, *NOT_NUMBERS]),
        ("frequency_penalty", [-2, 2.0, 0], [-2.1, 2.1, *NOT_NUMBERS]),
        ("repetition_penalty", [0.1, 1, 5.0], [0, -1, *NOT_NUMBERS]),
        ("temperature", [0, 1e-6, 2.0, 100], [-0.1, *NOT_NUMBERS]),
        ("top_p", [1e-9, 1], [0, 1.1, -1, *NOT_NUMBERS]),
        ("top_k", [-1, 0, 1, 2**40], [-2, None, *NOT_INTEGERS]),
        ("min_p", [0, 1.0], [-0.1, 1.1, *NOT_NUMBERS]),
        ("seed", [None, 0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, *NOT_INTEGERS]),
        ("max_tokens", [None, 0, 1, 10**9], [-1, *NOT_INTEGERS]),
        ("min_tokens", [0, 16], [-1, 17, None, *NOT_INTEGERS]),
        ("logprobs", [None, 0, 20], [-1, *NOT_INTEGERS]),
        ("prompt_logprobs", [None, 0, 20], [-1, *NOT_INTEGERS]),
        ("stop", [None, [], "a", ["a", "b"]], ["", [""], ["a", ""], [1], 5, ("a",), {"a": 1}]),
        ("stop_token_ids", [None, [], [0, 5]], [[-1], [1.0], [True], ["1"], 5, list(range(129))]),
        ("bad_words", [None, [], ["a"]], [[""], "a", [1], ["a"] * 129]),
        ("allowed_token_ids", [None, [3]], [[], [-1], [1.5], [False], "3"]),
        ("ignore_eos", [True, False], [1, None, "yes"]),
        ("detokenize", [True, False], [0, "no"]),
        ("include_stop_str_in_output", [True], [1]),
        (
            "logit_bias",
            [None, {}, {5: -100, 6: 100.0}],
            [{5: 101}, {5: math.nan}, {-1: 5}, {"a": 1}, {"5": 1}, {5: True}, [5], dict.fromkeys(range(1025), 0)],
        ),
    ],
)  # fmt: skip
def test_ranges(field: str, good: list, bad: list) -> None:
    for value in good:
        SamplingParams(**{field: value})
    for value in bad:
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{field: value})
        assert refusal.value.field == field, value
        assert field in str(refusal.value)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop=["a"], detokenize=False)
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="a").stop_strings == ["a"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]


def test_what_a_request_needs_of_the_device() -> None:
    plain = [{}, {"temperature": 0.0}, {"seed": 1}, {"top_p": 1}, {"top_k": -1}, {"temperature": 0, "top_k": 3}]
    for params in (SamplingParams(**p) for p in plain):
        assert not (params.changes_logits or params.cuts_tail or params.needs_constrained_row)
    for params in (SamplingParams(**p) for p in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1})):
        assert params.cuts_tail and not params.changes_logits
    for params in (SamplingParams(**p) for p in ({"logit_bias": {1: 1}}, {"bad_words": ["a"]}, {"min_tokens": 1})):
        assert params.changes_logits and not (params.cuts_tail or params.needs_constrained_row)
    rows = [{"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}, {"allowed_token_ids": [1]}]
    assert all(SamplingParams(**p).changes_logits and SamplingParams(**p).needs_constrained_row for p in rows)


def test_decoded_params_are_checked_as_well() -> None:
    """msgspec turns the refusal into its own error, which is a ValueError too."""
    encoded = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(encoded, type=SamplingParams)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("priority", 1.5),
        ("priority", True),
        ("priority", 2**40),
        ("arrival_time", math.nan),
        ("cache_salt", 5),
    ],
)
def test_request_fields(field: str, value: object) -> None:
    good = {"request_id": "a", "prompt_token_ids": [1], "params": SamplingParams()}
    Request(**good)
    with pytest.raises(RequestError) as refusal:
        Request(**{**good, field: value})
    assert refusal.value.field == field


def test_an_open_max_tokens_does_not_reach_the_engine() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=None))


@pytest.mark.parametrize("field", ["n", "top_k", "temperature", "max_tokens", "seed", "logprobs"])
def test_numbers_too_long_to_print_are_refused_like_others(field: str) -> None:
    with pytest.raises(RequestError, match="more than 200 bits"):
        SamplingParams(**{field: 10**5000})
