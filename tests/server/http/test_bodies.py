"""Bodies: what counts as JSON, and how what is wrong with a field is said."""

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from pydantic import BaseModel, Field

from octavo.server.http.bodies import MAX_COMMAS, MAX_DEPTH, decode, parse_json, read_body
from octavo.server.http.errors import ApiError, ClientGone


class Sample(BaseModel):
    model_config = {"strict": True}

    number: int | None = Field(None, ge=0, le=10)
    part: float | None = Field(None, gt=0, le=1)
    flag: bool | None = None
    words: list[str] | None = None


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(Sample, body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b'{"number": 1,}', "not JSON"),
        (b"{'number': 1}", "not JSON"),
        (b'{"number": 1} {}', "not JSON"),
        (b'{"number": NaN}', "NaN"),
        (b'{"number": -Infinity}', "Infinity"),
        (b'{"part": 1e999}', "too large"),
        (b'{"part": -1e999}', "too large"),
        (b'{"number": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"number": 1, "number": 2}', "occurs twice"),
        (b'{"x": {"y": 1, "y": 1}}', "occurs twice"),
        (b'\xef\xbb\xbf{"number": 1}', "byte order mark"),
        ('{"number": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"words": ["\xff"]}', "not UTF-8 at byte"),
        (b'{"words": ["\xed\xa0\x80"]}', "not UTF-8"),
        (rb'{"words": ["\ud800"]}', "surrogate"),
        (rb'{"\udfff": 1}', "surrogate"),
        (b'{"words": ["a\nb"]}', "not JSON"),
        (b"[" * 100_000, "nested"),
        (b'{"x":' * 100_000, "nested"),
        (b"[" * 500 + b"]" * 500, "nested"),
        (b"[]", "object, got a list"),
        (b'"x"', "object, got a string"),
        (b"1", "object, got 1"),
        (b"null", "object, got null"),
        (b"true", "object, got true or false"),
    ],
)
def test_what_is_no_request(body: bytes, words: str) -> None:
    """B133, B049: hostile JSON is refused with one sentence."""
    error = refusal(body)
    assert error.status == 400
    assert words in error.message
    assert len(error.message) < 200


def test_nesting_has_one_limit() -> None:
    nest = b'{"x":' + b"[" * (MAX_DEPTH - 1) + b"1" + b"]" * (MAX_DEPTH - 1) + b"}"
    decode(Sample, nest)
    assert "nested" in refusal(nest.replace(b"[1]", b"[[1]]")).message


def test_both_halves_of_a_pair_are_one_character() -> None:
    assert parse_json(rb'["\ud83d\ude42 \\ud800"]') == ["\U0001f642 \\ud800"]


def test_a_flood_of_values_is_refused_before_it_is_read() -> None:
    body = b'{"words":[' + b"0," * MAX_COMMAS + b"0,0]}"
    tracemalloc.start()
    assert "commas" in refusal(body).message
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({"number": "1"}, "number", "must be an integer, got a string"),
        ({"number": True}, "number", "must be an integer, got true or false"),
        ({"number": 1.5}, "number", "must be an integer, got 1.5"),
        ({"number": -1}, "number", "must be at least 0, got -1"),
        ({"number": 11}, "number", "must be at most 10, got 11"),
        ({"number": 10**400}, "number", "more than 200 bits"),
        ({"part": 0}, "part", "must be above 0"),
        ({"part": "0.5"}, "part", "must be a number"),
        ({"part": True}, "part", "must be a number"),
        ({"flag": 1}, "flag", "must be true or false"),
        ({"flag": "true"}, "flag", "must be true or false"),
        ({"words": "x"}, "words", "must be a list"),
        ({"words": ["x", 1]}, "words[1]", "must be a string"),
    ],
)
def test_what_is_wrong_with_a_field(value: Any, field: str, words: str) -> None:
    """B133: true and "1" are no numbers; the message has the field and the limit."""
    error = refusal(json.dumps(value).encode())
    assert (error.status, error.param) == (400, field)
    assert words in error.message
    assert error.message.startswith(field)


def test_unknown_fields_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """B059. What is logged cannot forge a line."""
    with caplog.at_level("INFO"):
        assert decode(Sample, rb'{"number": 3, "a\nFAKE": 1}').number == 3
    (record,) = caplog.records
    assert "\n" not in record.getMessage()


def read(messages: list[dict[str, Any]], *, content_type: str = "application/json", **headers: str) -> bytes:
    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    pairs = {"content-type": content_type} | {k.replace("_", "-"): v for k, v in headers.items()}
    scope = {"headers": [(k.encode(), v.encode()) for k, v in pairs.items()]}
    return asyncio.run(read_body(scope, receive, max_size=100, timeout=0.2))


def chunk(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_comes_in_pieces() -> None:
    assert read([*(chunk(b"x") for _ in range(99)), chunk(b"y", more=False)]) == b"x" * 99 + b"y"


@pytest.mark.parametrize(
    ("messages", "headers", "status"),
    [
        ([chunk(b"x" * 101)], {}, 413),
        ([chunk(b"x") for _ in range(200)], {}, 413),  # stops at 101
        ([], {"content_length": "101"}, 413),  # not even read
        ([chunk(b"x")], {}, 408),
    ],
)
def test_too_large_and_too_slow(messages: list[dict[str, Any]], headers: dict[str, str], status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read(messages, **headers)
    assert caught.value.status == status


def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientGone):
        read([chunk(b"x"), {"type": "http.disconnect"}])


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 5000, "abc"])
def test_a_length_that_is_no_number_does_not_matter(length: str) -> None:
    assert read([chunk(b"{}", more=False)], content_length=length) == b"{}"


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", 'application/json;charset="UTF-8"']
)
def test_json_content_types(content_type: str) -> None:
    assert read([chunk(b"{}", more=False)], content_type=content_type) == b"{}"


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("text/plain", ""),
        ("application/x-www-form-urlencoded", ""),
        ("application/json; charset=utf-16", ""),
        ("", ""),
        ("application/json", "gzip"),
    ],
)
def test_other_content_types(content_type: str, encoding: str) -> None:
    with pytest.raises(ApiError) as caught:
        read([chunk(b"{}", more=False)], content_type=content_type, content_encoding=encoding or "identity")
    assert caught.value.status == 415
