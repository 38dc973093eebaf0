"""RequestStream alone: what waits for a slow reader, what wakes a reader, and every way to end."""

import asyncio
import time
from collections.abc import Coroutine

import pytest

from octavo.engine.errors import EngineDeadError
from octavo.engine.request import FinishReason, SamplingParams, TokenEvent, TopLogprobs
from octavo.engine.request_stream import RequestStream
from octavo.engine.text.output import Piece, RequestState


def make_stream(aborted: list[RequestStream] | None = None, **params: object) -> RequestStream:
    """A stream without a tokenizer; `aborted` gets it when it is aborted."""
    sampling = SamplingParams(**{"max_tokens": 100, **params})

    def abort(stream: RequestStream) -> None:
        if not stream.finished:
            if aborted is not None:
                aborted.append(stream)
            stream.end(FinishReason.ABORT, 0.0)

    state = RequestState("name", None, [1, 2, 3], sampling, 5.0, None)
    return RequestStream("key", state, sampling, abort)


def entry(token: int) -> TopLogprobs:
    return TopLogprobs(token, -1.0, 1, [], [])


def give(stream: RequestStream, token: int, index: int = 0, last: bool = False, logprobs: bool = False) -> None:
    reason = FinishReason.LENGTH if last else None
    stream.take(TokenEvent("key", index, [token], [entry(token)] if logprobs else None, None, reason), time.monotonic())


def run[T](coroutine: Coroutine[None, None, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_pieces_come_as_they_are_given() -> None:
    async def scenario() -> None:
        stream = make_stream()
        reader = asyncio.create_task(_collect(stream))
        for token in range(5):
            await asyncio.sleep(0)
            give(stream, token, last=token == 4)
        pieces = await reader
        assert [piece.token_ids for piece in pieces] == [[0], [1], [2], [3], [4]]
        assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"]
        assert {piece.request_id for piece in pieces} == {"name"}
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(scenario())


def test_a_slow_reader_finds_one_piece_a_sample() -> None:
    async def scenario() -> None:
        stream = make_stream(n=2, logprobs=0)
        for token in range(20_000):
            give(stream, token, logprobs=True)
            if token % 2:
                give(stream, token, index=1, logprobs=True)
        assert len(stream._held) == 2
        first, second = await anext(stream), await anext(stream)
        assert (first.index, second.index) == (0, 1)
        assert first.token_ids == list(range(20_000)) and second.token_ids == list(range(1, 20_000, 2))
        assert first.logprobs is not None and [next(iter(t)) for t in first.logprobs] == first.token_ids
        assert first.finish_reason is None and not stream._held
        give(stream, 7, last=True, logprobs=True)
        give(stream, 8, index=1, logprobs=True)
        give(stream, 9, index=1, last=True, logprobs=True)
        rest = await _collect(stream)
        assert [(p.index, p.token_ids, p.finish_reason) for p in rest] == [(0, [7], "length"), (1, [8, 9], "length")]
        output = await stream.output()
        assert output.outputs[0].token_ids == [*range(20_000), 7]

    run(scenario())


def test_a_joined_piece_costs_no_more_than_its_length() -> None:
    async def scenario() -> float:
        stream = make_stream(max_tokens=200_000, logprobs=0)
        began = time.process_time()
        for token in range(100_000):
            give(stream, token, logprobs=True)
        assert len((await anext(stream)).token_ids) == 100_000
        return time.process_time() - began

    assert run(scenario()) < 5  # quadratic would be minutes


def test_a_whole_output_wakes_its_reader_once() -> None:
    async def scenario() -> None:
        stream = make_stream()
        reader = asyncio.create_task(stream.output())
        await asyncio.sleep(0)
        waiter = stream._waiter
        for token in range(10):
            give(stream, token)
            await asyncio.sleep(0)
        assert waiter is not None and not waiter.done() and not stream._held
        give(stream, 10, last=True)
        assert (await reader).outputs[0].token_ids == list(range(11))

    run(scenario())


def test_an_error_comes_behind_what_was_given() -> None:
    async def scenario() -> None:
        stream, waiting = make_stream(), make_stream()
        reader = asyncio.create_task(anext(waiting))
        whole = asyncio.create_task(make_stream().output())
        await asyncio.sleep(0)
        whole.cancel()
        give(stream, 1)
        for each in (stream, waiting):
            each.fail(EngineDeadError("why"))
            each.fail(EngineDeadError("again"))
        assert (await anext(stream)).token_ids == [1]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="why"):
                await anext(stream)
        with pytest.raises(EngineDeadError, match="why"):
            await reader
        with pytest.raises(EngineDeadError, match="why"):
            await waiting.output()
        assert stream.finished and stream.record(9.0).finish_reasons == ("error",)

    run(scenario())


def test_an_error_event_is_a_piece() -> None:
    async def scenario() -> None:
        stream = make_stream()
        stream.take(TokenEvent("key", 0, [], finish_reason=FinishReason.ERROR, error="not a number"), 0.0)
        (piece,) = await _collect(stream)
        assert (piece.finish_reason, piece.error) == ("error", "not a number")

    run(scenario())


def test_abort_gives_last_pieces_and_close_gives_none() -> None:
    async def scenario() -> None:
        aborted: list[RequestStream] = []
        stream = make_stream(aborted, n=2)
        give(stream, 1)
        give(stream, 2, index=1, last=True)
        stream.abort()
        stream.abort()
        pieces = await _collect(stream)
        assert [(p.index, p.token_ids, p.finish_reason) for p in pieces] == [(0, [1], "abort"), (1, [2], "length")]
        closed = make_stream(aborted)
        give(closed, 1)
        await closed.aclose()
        await closed.aclose()
        assert await _collect(closed) == []
        async with make_stream(aborted) as third:
            give(third, 1)
        assert third.finished
        assert aborted == [stream, closed, third]

    run(scenario())


@pytest.mark.parametrize("whole", [False, True])
def test_a_cancelled_reader_aborts(whole: bool) -> None:
    async def scenario() -> None:
        aborted: list[RequestStream] = []
        stream = make_stream(aborted)
        reader = asyncio.create_task(stream.output() if whole else _collect(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert aborted == [stream] and await _collect(stream) == []

    run(scenario())


def test_two_readers_are_refused() -> None:
    async def scenario() -> None:
        stream = make_stream()
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(stream)
        give(stream, 1)
        assert (await reader).token_ids == [1]

    run(scenario())


def test_what_metrics_get() -> None:
    stream = make_stream(n=2, max_tokens=9)
    first: list[float] = []
    later: list[float] = []
    for now, index in ((6.0, 0), (6.5, 1), (7.0, 0), (8.0, 0)):
        stream.take(TokenEvent("key", index, [1], num_cached_tokens=2, scheduled_time=5.25), now)
        stream.note_time(index, now, first, later)
    assert (first, later) == ([1.0], [1.0, 1.0])
    stream.end(FinishReason.ABORT, 9.0)
    record = stream.record(9.0)
    assert record.finish_reasons == ("abort", "abort")
    assert (record.num_prompt_tokens, record.num_generation_tokens, record.num_cached_tokens) == (3, 4, 2)
    assert (record.n, record.max_tokens) == (2, 9)
    assert (record.e2e_time, record.queue_time, record.prefill_time) == (4.0, 0.25, 0.75)
    assert (record.decode_time, record.inference_time, record.time_to_first_token) == (2.0, 2.75, 1.0)
    assert record.time_per_output_token == 2.0
    early = make_stream()
    early.end(FinishReason.ABORT, 6.0)
    nothing = early.record(6.0)
    assert nothing.queue_time is nothing.prefill_time is nothing.decode_time is nothing.time_per_output_token is None
    assert nothing.e2e_time == 1.0


async def _collect(stream: RequestStream) -> list[Piece]:
    return [piece async for piece in stream]
