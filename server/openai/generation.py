"""Running the prompts of one request: all of them or none, their pieces merged, their tokens counted, all ended.

Knows both generating routes and neither's shapes.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from octavo.engine.client import AsyncEngine, RequestStream
from octavo.engine.request import SamplingParams
from octavo.engine.text.output import Piece, RequestOutput
from octavo.engine.text.prompts import Prompt
from octavo.server.http.connection import EventStream
from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.openai.responses import PromptTokensDetails, Usage

TURN = 8  # prompts that are checked and queued at a stretch


async def submit_all(
    engine: AsyncEngine, work: Sequence[tuple[Prompt, SamplingParams]], *, priority: int
) -> list[RequestStream]:
    """Queues every prompt, and lets others have their turn in between; if one is refused, none runs.

    Raises:
      RequestError, QueueFullError, EngineDeadError: as `submit`.
    """
    streams: list[RequestStream] = []
    try:
        for number, (prompt, params) in enumerate(work):
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
            streams.append(engine.submit(prompt, params, priority=priority))
    except BaseException:
        abort_all(streams)
        raise
    return streams


def abort_all(streams: Sequence[RequestStream]) -> None:
    """Ends what still runs; nothing happens to what is over."""
    for stream in streams:
        stream.abort()


async def outputs_of(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The whole results. However it ends, nothing runs afterwards.

    Raises:
      ApiError: a sample failed.
      EngineDeadError: the engine did.
    """
    try:
        outputs = [await stream.output() for stream in streams]
    finally:
        abort_all(streams)
    for output in outputs:
        for sample in output.outputs:
            check_end(sample.finish_reason, sample.error)
    return outputs


def check_end(finish_reason: str | None, error: str | None) -> None:
    """Raises ApiError for a sample that did not end by itself: OpenAI has no finish reason for that."""
    if finish_reason == "error":
        raise ApiError(500, error or "the request failed in the engine", code="generation_failed")
    if finish_reason == "abort":
        raise ApiError(503, "the server ended the request", code="aborted")


class Tally:
    """The tokens of one request, as they come."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self._prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self.completion_tokens = 0

    @property
    def usage(self) -> Usage:
        cached = sum(stream.num_cached_tokens for stream in self._streams)
        total = self._prompt_tokens + self.completion_tokens
        return Usage(self._prompt_tokens, self.completion_tokens, total, PromptTokensDetails(cached))


class ChunkWriter(Protocol):
    """One request's stream in the words of a route."""

    def events(self, prompt: int, piece: Piece) -> bytes:
        """The events of a piece, none while there is nothing to say."""

    def last(self) -> bytes:
        """What follows the last piece of all: the usage, if that was asked for."""


async def stream_all(streams: Sequence[RequestStream], writer: ChunkWriter, answer: EventStream) -> None:
    """Writes every piece as it comes. An error before the first one is raised, a later one is an event.

    However it ends, nothing runs afterwards.
    """
    try:
        if len(streams) == 1:  # nearly always, and without a generator in between
            async for piece in streams[0]:
                await _write(0, piece, writer, answer)
        else:  # aclosing, so that what reads the streams ends before this does
            async with contextlib.aclosing(_merged(streams)) as pieces:
                async for prompt, piece in pieces:
                    await _write(prompt, piece, writer, answer)
        await answer.finish(writer.last())
    except Exception as error:
        if not answer.started:
            raise
        await answer.fail(as_api_error(error))
    finally:
        abort_all(streams)


async def _write(prompt: int, piece: Piece, writer: ChunkWriter, answer: EventStream) -> None:
    check_end(piece.finish_reason, piece.error)
    if events := writer.events(prompt, piece):
        await answer.write(events)


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Piece]]:
    """(number of the prompt, piece) of all streams. What a slow reader leaves waits in them, a piece or two here."""
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(len(streams))
    pumps = [asyncio.ensure_future(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        still_open = len(streams)
        while still_open:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                still_open -= 1
            else:
                yield number, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, Piece | Exception | None]]) -> None:
    try:
        async for piece in stream:
            await queue.put((number, piece))
        await queue.put((number, None))
    except Exception as error:  # whoever reads the queue raises it
        await queue.put((number, error))
