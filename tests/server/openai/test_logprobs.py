"""Both schemas of log-probabilities, on a tokenizer of bytes."""

import json
import math

import msgspec
import pytest

from octavo.engine.text.hf_tokenizer import tokenizer_from_directory
from octavo.engine.text.output import Logprob
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.openai.logprobs import CompletionTokens, TokenNames, chat_logprobs, likeliest, prompt_logprobs
from tests.references.byte_tokenizer import byte_ids, piece_id, write_tokenizer

HALF, REST = piece_id(b"\xf0\x9f"), piece_id(b"\x99\x82")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, 280)
    return tokenizer_from_directory(folder)


def table(*entries: tuple[int, float, int]) -> dict[int, Logprob]:
    return {token: Logprob(value, rank) for token, value, rank in entries}


def test_a_chat_entry_has_the_chosen_and_the_likeliest(tokenizer: Tokenizer) -> None:
    """B033, B036: the chosen token is there with its own value though it is not among the likeliest."""
    a, b, c = byte_ids("abc")
    names = TokenNames(tokenizer, as_ids=False)
    tables = [table((c, -9.0, 3), (a, -0.1, 1), (b, -2.0, 2))]
    (entry,) = chat_logprobs([c], tables, names, 2)
    assert (entry.token, entry.logprob, entry.bytes) == ("c", -9.0, [99])
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("a", -0.1), ("b", -2.0)]
    (bare,) = chat_logprobs([c], tables, names, 0)
    assert bare.top_logprobs == []


def test_parts_of_a_character_keep_their_bytes(tokenizer: Tokenizer) -> None:
    """B014: each alternative alone, and bytes that the client can join."""
    names = TokenNames(tokenizer, as_ids=False)
    tables = [table((HALF, -0.1, 1), (REST, -3.0, 2)), table((REST, -0.1, 1))]
    first, second = chat_logprobs([HALF, REST], tables, names, 2)
    assert bytes(first.bytes + second.bytes).decode() == "\U0001f642"
    assert first.top_logprobs[1].bytes == list(b"\x99\x82")
    assert all(entry.token for entry in first.top_logprobs)


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_json_cannot_say(tokenizer: Tokenizer, value: float) -> None:
    """B029."""
    names = TokenNames(tokenizer, as_ids=False)
    tables = [table((9, value, 5), (8, 0.0, 1))]
    text = msgspec.json.encode([chat_logprobs([9], tables, names, 2), prompt_logprobs([None, *tables])]).decode()
    assert "-9999" in text
    json.loads(text, parse_constant=pytest.fail)
    entries = CompletionTokens(tokenizer, names, frozenset()).take([9], tables, 1)
    assert entries.token_logprobs == [-9999.0]


def test_ties_keep_their_number() -> None:
    """B036: as many as asked for, whatever the ranks say."""
    tables = table((5, -1.0, 1), (6, -1.0, 2), (7, -1.0, 1))
    assert len(likeliest(tables, 2)) == 2


def test_offsets_are_places_in_the_text(tokenizer: Tokenizer) -> None:
    """B031: also behind half a character and behind tokens that the text leaves out."""
    names = TokenNames(tokenizer, as_ids=False)
    ids = [2, *byte_ids("é"), HALF, REST, *byte_ids("x")]
    entries = CompletionTokens(tokenizer, names, tokenizer.special_ids)
    tables = [table((i, -1.0, 1)) for i in ids]
    whole = entries.take(ids, tables, 0).text_offset
    assert whole == [0, 0, 0, 1, 1, 2]
    pieces = CompletionTokens(tokenizer, names, tokenizer.special_ids)
    assert [pieces.take([i], [t], 0).text_offset[0] for i, t in zip(ids, tables, strict=True)] == whole


def test_an_echoed_prompt_comes_first(tokenizer: Tokenizer) -> None:
    """B032: N and the generated ones, and nothing for the first."""
    names = TokenNames(tokenizer, as_ids=False)
    entries = CompletionTokens(tokenizer, names, frozenset())
    prompt = byte_ids("ab")
    first = entries.prompt(prompt, [None, table((prompt[1], -2.0, 2), (9, -0.5, 1))], "ab", 1)
    assert first.token_logprobs == [None, -2.0]
    assert first.top_logprobs == [None, {"b": -2.0, names.text(9): -0.5}]
    assert first.text_offset == [0, 1]
    assert entries.take([piece_id(b"hello")], [table((piece_id(b"hello"), 0.0, 1))], 0).text_offset == [2]


def test_tokens_as_ids(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer, as_ids=True)
    assert chat_logprobs([7], [table((7, 0.0, 1))], names, 1)[0].top_logprobs[0].token == "token_id:7"
    assert TokenNames(None, as_ids=False).text(7) == "token_id:7"


def test_prompt_logprobs_by_id() -> None:
    result = prompt_logprobs([None, {3: Logprob(-1.0, 2, "x")}])
    assert msgspec.to_builtins(result) == [None, {"3": {"logprob": -1.0, "rank": 2, "decoded_token": "x"}}]
    assert prompt_logprobs(None) is None
