"""Prompts from callers: lengths and bad words."""

import time

import pytest

from octavo.engine.errors import RequestError
from octavo.engine.text.prompts import bad_words_token_ids, check_length, parse_prompt
from octavo.engine.text.tokenizer import Tokenizer
from tests.references import byte_tokenizer as bt
from tests.references import piece_tokenizer as pt


@pytest.mark.parametrize("word", ["\n", "\n\n", "\nx", "\tx", " ", "  ", "x", "x "])
def test_bad_words_keep_their_white_space(byte_tokenizer: Tokenizer, word: str) -> None:
    assert bad_words_token_ids(byte_tokenizer, [word]) == [bt.byte_ids(word)]


def test_bad_words_with_and_without_a_space(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    assert bad_words_token_ids(byte_tokenizer, [" x", "y"]) == [bt.byte_ids("x"), bt.byte_ids("y")]
    assert bad_words_token_ids(byte_tokenizer, [" \n"]) == [bt.byte_ids("\n")]
    bare = piece_tokenizer.encode("the", add_special_tokens=False)
    assert bad_words_token_ids(piece_tokenizer, ["the"])[0] == bare
    assert bad_words_token_ids(piece_tokenizer, ["\n"])[0][-1:] == pt.byte_ids(b"\n")


def test_a_bad_word_without_tokens(byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_tokenizer, "encode", lambda text, add_special_tokens: [])
    with pytest.raises(RequestError, match="'x' has no tokens") as caught:
        bad_words_token_ids(byte_tokenizer, ["x"])
    assert caught.value.field == "bad_words"


def test_text_that_cannot_fit_is_refused_at_once(byte_tokenizer: Tokenizer) -> None:
    longest = byte_tokenizer.longest_token
    assert longest == max(len(piece) for piece in bt.vocabulary(320))
    assert len(parse_prompt("a" * 8 * longest, byte_tokenizer, max_tokens=8).token_ids) == 8 * longest
    assert parse_prompt("a" * 1000, byte_tokenizer).text == "a" * 1000
    check_length("a" * 1000, byte_tokenizer, None)
    begin = time.perf_counter()
    with pytest.raises(RequestError, match=f"10000000 characters.*8 tokens is at most {8 * longest}") as caught:
        parse_prompt("a" * 10_000_000, byte_tokenizer, max_tokens=8)
    assert time.perf_counter() - begin < 0.5  # tokenising it takes 2 s
    assert caught.value.field == "prompt"
