"""B2 of the failure cases: what streams joins to the text of all ids, however it is cut."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.text.detokenizer import make_detokenizer
from octavo.engine.text.tokenizer import Tokenizer
from tests.references import byte_tokenizer as bt
from tests.references import piece_tokenizer as pt

BYTE_IDS = st.lists(st.integers(0, 340), max_size=60)  # some ids have no token
# Any pieces and special tokens; bytes only in runs that are UTF-8 as a whole.
PIECE_IDS = st.lists(
    st.one_of(
        st.integers(0, 2).map(lambda i: [i]),
        st.integers(pt.FIRST_PIECE, pt.FIRST_PIECE + len(pt.PIECES)).map(lambda i: [i]),
        st.text(min_size=1, max_size=3).map(lambda s: [*pt.byte_ids(s.encode()), pt.piece_id("a")]),
    ),
    max_size=30,
).map(lambda runs: [i for run in runs for i in run])


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: bool) -> list[str]:
    """The pieces when ids come cut at `cuts`."""
    detokenizer = make_detokenizer(tokenizer, **options)
    bounds = [0, *sorted({c for c in cuts if c < len(ids)}), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


@given(BYTE_IDS, st.lists(st.integers(0, 60)), st.booleans())
def test_byte_level_equals_decoding_all(byte_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    text = "".join(stream(byte_tokenizer, ids, cuts, skip_special_tokens=skip))
    assert text == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@given(PIECE_IDS, st.lists(st.integers(0, 60)), st.booleans())
def test_pieces_equal_decoding_all(piece_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    text = "".join(stream(piece_tokenizer, ids, cuts, skip_special_tokens=skip))
    assert text == piece_tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, pt.FIRST_PIECE + len(pt.PIECES)), max_size=60), st.lists(st.integers(0, 60)))
def test_pieces_do_not_depend_on_the_cuts(piece_tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """Also for runs of bytes that are no UTF-8."""
    assert "".join(stream(piece_tokenizer, ids, cuts)) == "".join(stream(piece_tokenizer, ids, list(range(60))))


@given(st.text(max_size=40))
def test_no_replacement_characters_in_valid_text(byte_tokenizer: Tokenizer, text: str) -> None:
    """B010: emoji, CJK and letters of several tokens, one token at a time."""
    ids = bt.byte_ids(text)
    pieces = stream(byte_tokenizer, ids, list(range(len(ids))))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_when_its_last_byte_does(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    smile = "🙂".encode()
    assert stream(byte_tokenizer, bt.byte_ids(smile), [1, 2, 3]) == ["", "", "", "🙂", ""]
    assert stream(piece_tokenizer, pt.byte_ids(smile), [1, 2, 3]) == ["", "", "", "🙂", ""]
    assert stream(piece_tokenizer, pt.byte_ids(b"\n"), []) == ["\n", ""]


def test_split_pieces(byte_tokenizer: Tokenizer) -> None:
    """Tokens that hold half an emoji and parts of two characters."""
    ids = [bt.piece_id(p) for p in (b"\xf0\x9f", b"\x99\x82", b"\xe6\x97", b"\xa5\xe6\x9c\xac", b"\xc4\x8f")]
    assert stream(byte_tokenizer, ids, [1, 2, 3, 4]) == ["", "🙂", "", "日本", "ď", ""]


@pytest.mark.parametrize("kind", ["byte", "piece"])
def test_lone_continuation_bytes_come_at_once_and_fast(
    kind: str, byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer
) -> None:
    """B012: 4,000 bytes that begin no character."""
    tokenizer, first = (byte_tokenizer, bt.FIRST_BYTE) if kind == "byte" else (piece_tokenizer, pt.FIRST_BYTE)
    detokenizer = make_detokenizer(tokenizer)
    begin = time.perf_counter()
    pieces = [detokenizer.push([first + 0x82]) for _ in range(4000)]
    assert time.perf_counter() - begin < 1
    assert pieces == ["\ufffd"] * 4000
    assert detokenizer.flush() == ""


def test_leading_spaces(piece_tokenizer: Tokenizer) -> None:
    """B013: at the start a space is dropped once, as the decoder does; behind a prompt it stays."""
    ids = [pt.piece_id("▁"), pt.piece_id("▁leading"), pt.piece_id("▁the")]
    assert "".join(stream(piece_tokenizer, ids, [1, 2])) == piece_tokenizer.decode(ids) == " leading the"
    assert "".join(stream(piece_tokenizer, ids, [1, 2], after_text=True)) == "  leading the"
    special = [2, pt.piece_id("▁the")]
    kept = "".join(stream(piece_tokenizer, special, [1], skip_special_tokens=False))
    assert kept == piece_tokenizer.decode(special, skip_special_tokens=False)
    assert "".join(stream(piece_tokenizer, special, [1])) == piece_tokenizer.decode(special) == "the"


def test_prompt_and_output_join(piece_tokenizer: Tokenizer) -> None:
    prompt = piece_tokenizer.encode("hello")
    output = [pt.piece_id("▁the"), pt.piece_id("▁leading")]
    text = "".join(stream(piece_tokenizer, output, [1], after_text=True))
    assert piece_tokenizer.decode(prompt) + text == piece_tokenizer.decode(prompt + output)


def test_the_end_in_the_middle_of_a_character(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    """B016: what is left comes once, as U+FFFD, streamed or not."""
    ids = bt.byte_ids("a🙂".encode()[:3])
    assert stream(byte_tokenizer, ids, [1, 2]) == ["a", "", "", "\ufffd"]
    assert "".join(stream(byte_tokenizer, ids, [])) == byte_tokenizer.decode(ids)
    ids = [pt.piece_id("a"), *pt.byte_ids("🙂".encode()[:2])]
    assert "".join(stream(piece_tokenizer, ids, [1])) == piece_tokenizer.decode(ids) == "a\ufffd\ufffd"
