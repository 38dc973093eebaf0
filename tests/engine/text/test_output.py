"""Events to outputs: B1 (stops), B2 at the end, B5 (log-probabilities) of the failure cases."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import FinishReason, SamplingParams, TokenEvent, TopLogprobs
from octavo.engine.text.output import OutputProcessor, Piece, RequestOutput
from octavo.engine.text.tokenizer import Tokenizer
from tests.references import byte_tokenizer as bt

EOS = 2


def pieces(*texts: bytes) -> list[int]:
    return [bt.piece_id(text) if text in bt.PIECES else bt.byte_ids(text)[0] for text in texts]


def run(
    tokenizer: Tokenizer | None,
    ids: list[int],
    params: SamplingParams,
    finish: FinishReason = FinishReason.LENGTH,
    step: int = 1,
    **last: object,
) -> tuple[RequestOutput, list[str], list[tuple[str, int]]]:
    """Sends ids `step` at a time; the output, the texts as they came, and who was to be aborted."""
    processor = OutputProcessor(tokenizer)
    processor.add("r", "prompt", [5], params)
    texts, aborted, outputs = [], [], []
    for start in range(0, len(ids), step):
        ends = start + step >= len(ids)
        extra = {"finish_reason": finish, **last} if ends else {}
        event = TokenEvent("r", 0, ids[start : start + step], **extra)  # type: ignore[arg-type]
        new, complete, over = processor.process([event])
        texts += [piece.text for piece in new]
        aborted += over
        outputs += complete
    assert len(outputs) == 1
    assert "".join(texts) == outputs[0].outputs[0].text
    return outputs[0], texts, aborted


def test_a_stop_string_over_three_tokens(byte_tokenizer: Tokenizer) -> None:
    """B001: nothing of it is given out, and the engine is told to end the request."""
    ids = pieces(b"A", b"Observ", b"ation", b":", b"x", b"y")
    output, texts, aborted = run(byte_tokenizer, ids, SamplingParams(stop="Observation:"))
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("A", "stop", "Observation:")
    assert sample.token_ids == ids[:4]
    assert texts == ["A", "", "", ""]
    assert aborted == [("r", 0)]


def test_a_stop_string_that_ends_inside_of_a_token(byte_tokenizer: Tokenizer) -> None:
    output, _, _ = run(byte_tokenizer, pieces(b"Pari", b"s is", b"x"), SamplingParams(stop=["Paris"]))
    assert output.outputs[0].text == ""
    output, _, _ = run(byte_tokenizer, pieces(b"a", b"Pari", b"s is", b"x"), SamplingParams(stop=["ris i"]))
    assert output.outputs[0].text == "aPa"


@pytest.mark.parametrize("tokens", [(b"\n\n",), (b"\n", b"\n"), (b".\n", b"\n")])
def test_newlines_however_they_are_cut(byte_tokenizer: Tokenizer, tokens: tuple[bytes, ...]) -> None:
    """B002"""
    output, _, aborted = run(byte_tokenizer, pieces(b"a", *tokens, b"b"), SamplingParams(stop=["\n\n"]))
    assert output.outputs[0].text.rstrip(".") == "a"
    assert output.outputs[0].stop_reason == "\n\n"
    assert aborted == [("r", 0)]


def test_a_stop_string_may_be_included_once(byte_tokenizer: Tokenizer) -> None:
    """B005"""
    params = SamplingParams(stop=["s i"], include_stop_str_in_output=True)
    output, texts, _ = run(byte_tokenizer, pieces(b"Pari", b"s is", b"x"), params)
    assert output.outputs[0].text == "Paris i"
    assert texts == ["Pari", "s i"]


def test_no_stop_before_min_tokens(byte_tokenizer: Tokenizer) -> None:
    """B007"""
    ids = pieces(b"a", b"b", b"x", b"a", b"b", b"y")
    output, _, _ = run(byte_tokenizer, ids, SamplingParams(stop=["ab"], min_tokens=2))
    assert output.outputs[0].text == "abx"
    output, _, aborted = run(byte_tokenizer, ids, SamplingParams(stop=["ab"], min_tokens=6, max_tokens=6))
    assert output.outputs[0].text == "abxaby"
    assert output.outputs[0].finish_reason == "length"
    assert aborted == []


def test_only_the_stop_token_is_dropped(byte_tokenizer: Tokenizer) -> None:
    """B004"""
    ids = [*pieces(b"hello", b" world"), 4]
    reason = {"finish": FinishReason.STOP, "stop_reason": 4}
    for skip in (True, False):
        params = SamplingParams(stop_token_ids=[4], skip_special_tokens=skip)
        output, _, aborted = run(byte_tokenizer, ids, params, **reason)  # type: ignore[arg-type]
        assert output.outputs[0].text == "hello world"
        assert output.outputs[0].token_ids == ids
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 4)
        assert aborted == []
    params = SamplingParams(stop_token_ids=[4], skip_special_tokens=False, include_stop_str_in_output=True)
    output, _, _ = run(byte_tokenizer, ids, params, **reason)  # type: ignore[arg-type]
    assert output.outputs[0].text == "hello world<|im_end|>"


def test_a_stop_string_in_the_last_token_wins_over_length(byte_tokenizer: Tokenizer) -> None:
    output, _, aborted = run(byte_tokenizer, pieces(b"a", b"b"), SamplingParams(stop=["b"]))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")
    assert aborted == [], "it is over there too"


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT])
def test_held_text_comes_at_the_end(byte_tokenizer: Tokenizer, finish: FinishReason) -> None:
    ids = pieces(b"a", b"Observ") + [EOS] * (finish is FinishReason.STOP)
    output, _, _ = run(byte_tokenizer, ids, SamplingParams(stop=["Observation"]), finish)
    assert output.outputs[0].text == "aObserv"


def test_half_a_character_at_the_end(byte_tokenizer: Tokenizer) -> None:
    """B016: the same with and without stop strings, token by token or at once."""
    ids = pieces(b"a", b"\xf0\x9f")
    for stop in (None, ["zz"]):
        for step in (1, 2):
            output, _, _ = run(byte_tokenizer, ids, SamplingParams(stop=stop), step=step)
            assert output.outputs[0].text == "a\ufffd"
    output, _, _ = run(byte_tokenizer, [*ids, EOS], SamplingParams(stop=["zz"]), FinishReason.STOP)
    assert output.outputs[0].text == "a\ufffd"


def test_tokens_behind_a_stop_string_in_one_event(byte_tokenizer: Tokenizer) -> None:
    ids = pieces(b"a", b"b", b"c", b"d")
    output, _, _ = run(byte_tokenizer, ids, SamplingParams(stop=["b"]), step=4)
    assert output.outputs[0].token_ids == ids[:2]


@given(st.lists(st.integers(5, 319), min_size=1, max_size=30), st.integers(1, 30), st.booleans())
def test_streamed_or_not(byte_tokenizer: Tokenizer, ids: list[int], step: int, include: bool) -> None:
    """The output does not depend on how tokens are grouped into events."""
    params = SamplingParams(stop=["ab", " world", "\n\n", "日"], include_stop_str_in_output=include)
    alone, _, _ = run(byte_tokenizer, ids, params)
    grouped, _, _ = run(byte_tokenizer, ids, params, step=step)
    assert alone.outputs[0] == grouped.outputs[0]
    if alone.outputs[0].finish_reason == "length":
        assert alone.outputs[0].text == byte_tokenizer.decode(ids)


def test_samples_end_on_their_own(byte_tokenizer: Tokenizer) -> None:
    """A stop string ends one sample, which the engine is told at once; the other goes on."""
    processor = OutputProcessor(byte_tokenizer)
    processor.add("r", None, [5], SamplingParams(n=2, stop=["b"]))
    a, b, c = bt.byte_ids("abc")
    pieces_, complete, abort = processor.process([TokenEvent("r", 0, [b]), TokenEvent("r", 1, [a])])
    assert [p.finish_reason for p in pieces_] == ["stop", None]
    assert (complete, abort) == ([], [("r", 0)])
    pieces_, complete, abort = processor.process([TokenEvent("r", 0, [c]), TokenEvent("r", 1, [b])])
    assert [p.index for p in pieces_] == [1], "nothing follows the end of a sample"
    assert [o.text for o in complete[0].outputs] == ["", "a"]
    assert abort == [("r", 1)]
    assert processor.process([TokenEvent("r", 0, [], finish_reason=FinishReason.ABORT)]) == ([], [], [])


def test_without_text(byte_tokenizer: Tokenizer) -> None:
    output, texts, _ = run(byte_tokenizer, [7, 8, 9], SamplingParams(detokenize=False))
    assert (output.outputs[0].text, output.outputs[0].token_ids, texts) == ("", [7, 8, 9], ["", "", ""])
    assert run(None, [7], SamplingParams(logprobs=0))[0].outputs[0].token_ids == [7]


def test_an_error_inside_a_request(byte_tokenizer: Tokenizer) -> None:
    output, _, _ = run(byte_tokenizer, pieces(b"a"), SamplingParams(), FinishReason.ERROR, error="not finite")
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "not finite"
    assert output.outputs[0].text == "a"


def test_logprobs(byte_tokenizer: Tokenizer) -> None:
    """B5: the chosen token is always there, alternatives are decoded alone, one entry a token."""
    half, a, b = bt.piece_id(b"\xf0\x9f"), *bt.byte_ids("ab")
    entries = [
        TopLogprobs(a, -3.0, 7, [b, half], [-0.5, -1.0]),
        TopLogprobs(b, -0.25, 1, [b, a], [-0.25, -math.inf]),
    ]
    processor = OutputProcessor(byte_tokenizer)
    processor.add("r", None, [b, a], SamplingParams(logprobs=2, prompt_logprobs=1))
    event = TokenEvent(
        "r",
        0,
        [a, b],
        logprobs=entries,
        prompt_logprobs=[None, TopLogprobs(a, -2.0, 2, [b], [-0.1])],
        finish_reason=FinishReason.LENGTH,
        num_cached_tokens=16,
    )
    new, complete, _ = processor.process([event])
    sample = complete[0].outputs[0]
    assert sample.logprobs is not None
    assert new[0].logprobs == sample.logprobs
    first, second = sample.logprobs
    assert [(i, x.logprob, x.rank, x.decoded_token) for i, x in first.items()] == [
        (a, -3.0, 7, "a"),
        (b, -0.5, 1, "b"),
        (half, -1.0, 2, "\ufffd"),
    ]
    assert [(i, x.rank) for i, x in second.items()] == [(b, 1), (a, 2)]
    assert second[a].finite == -9999.0, "B029: JSON has no infinity"
    assert sample.cumulative_logprob == -3.25
    prompt_logprobs = complete[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert list(prompt_logprobs[1] or {}) == [a, b]
    assert complete[0].num_cached_tokens == 16


def test_a_piece_prints_as_its_text() -> None:
    assert f"{Piece('r', 0, 'hello', [7])}" == "hello"


def test_metrics(byte_tokenizer: Tokenizer) -> None:
    output, _, _ = run(byte_tokenizer, [7, 8, 9], SamplingParams())
    assert output.metrics.num_generation_tokens == 3
    assert output.metrics.time_to_first_token is not None
    assert output.finished
    assert output.outputs[0].cumulative_logprob is None
