"""RequestStream: what one request gives, as it comes. A slow reader finds one joined piece a sample, however late.

Lives on the event loop that made it; one task at a time may read.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from octavo.engine.errors import OctavoError
from octavo.engine.observer import FinishedRequest
from octavo.engine.request import FinishReason, SamplingParams, TokenEvent
from octavo.engine.text.output import LogprobTable, Piece, RequestOutput, RequestState


class RequestStream:
    """An async iterator of pieces, made by `AsyncEngine.submit`.

    It ends behind the last sample's last piece (the one with a finish reason). Iterating raises what
    ended the request otherwise: EngineDeadError, or RequestError when the engine's own check refused it.
    Leaving it unread is no leak; leaving it open is: close it with `aclose`, or use it in `async with`.

    Attributes:
      request_id: the caller's name for it, or ours; pieces and outputs carry it.
      key: what the engine knows it by; never the caller's.
      scheduled_time: when the engine first ran it, seconds of time.monotonic(); 0 while that is not known.
    """

    def __init__(
        self, key: str, state: RequestState, params: SamplingParams, abort: Callable[["RequestStream"], None]
    ) -> None:
        self.key = key
        self.request_id = state.request_id
        self.scheduled_time = 0.0
        self._state = state
        self._params = params
        self._abort = abort
        self._token_times: list[float | None] = [None] * params.n  # of each sample's last one
        self._held: dict[int, Piece | _Joint] = {}
        self._whole = False  # nobody wants pieces
        self._error: OctavoError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._state.prompt_token_ids

    @property
    def prompt_logprobs(self) -> list[LogprobTable | None] | None:
        """From the first piece of sample 0 on, when they were asked for."""
        return self._state.prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt; from the first piece of sample 0 on."""
        return self._state.num_cached_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will come from the engine."""
        return self._error is not None or self._state.num_open == 0

    @property
    def num_open(self) -> int:
        """Samples without a finish reason."""
        return self._state.num_open

    # The reader's side.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """The next piece: of each sample in turn, all that it has had since its last one.

        A task that is cancelled in here aborts the request.
        """
        while not self._held:
            if self._error is not None:
                raise self._error
            if self._state.num_open == 0 or self._whole:
                raise StopAsyncIteration
            await self._wait()
        held = self._held.pop(next(iter(self._held)))
        return held.join() if isinstance(held, _Joint) else held

    async def output(self) -> RequestOutput:
        """Everything, at the end; nothing wakes the task before."""
        self._whole = True
        self._held.clear()
        while self._state.num_open and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        return self._state.output()

    def abort(self) -> None:
        """Ends the request at whatever stage: open samples end with "abort". Behind the end it does nothing."""
        self._abort(self)

    async def aclose(self) -> None:
        """Aborts what is open and drops what was not read."""
        self._drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def _drop(self) -> None:
        self.abort()
        self._whole = True
        self._held.clear()

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two tasks read one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self._drop()
            raise
        finally:
            self._waiter = None

    # The client's side.

    def take(self, event: TokenEvent, now: float) -> Piece | None:
        """Files an event and wakes the reader. The new piece, None for what comes behind a sample's end."""
        state = self._state
        piece = state.take(event, now)
        if piece is None:
            return None
        if not self.scheduled_time:
            self.scheduled_time = event.scheduled_time
        if self._whole:
            if state.num_open == 0:
                self._wake()
            return piece
        held = self._held.get(piece.index)
        if held is None:
            self._held[piece.index] = piece
        elif isinstance(held, _Joint):
            held.add(piece)
        else:
            self._held[piece.index] = _Joint(held, piece)
        self._wake()
        return piece

    def end(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Ends all open samples."""
        for index in self._state.open_samples():
            self.take(TokenEvent(self.key, index, [], finish_reason=reason, error=error), now)

    def fail(self, error: OctavoError) -> None:
        """Nothing more will come; the reader gets what is held and then `error`."""
        if not self.finished:
            self._error = error
            self._wake()

    def note_time(self, index: int, now: float, first: list[float], later: list[float]) -> None:
        """Adds to `first` the time until the request's first token, or to `later` that since the sample's last."""
        last, self._token_times[index] = self._token_times[index], now
        if last is not None:
            later.append(now - last)
        elif now == self._state.metrics.first_token_time:
            first.append(now - self._state.metrics.arrival_time)

    def record(self, now: float) -> FinishedRequest:
        """What metrics want to know of a request that ended."""
        state, metrics = self._state, self._state.metrics
        return FinishedRequest(
            finish_reasons=tuple(sample.finish_reason or FinishReason.ERROR.value for sample in state.samples),
            num_prompt_tokens=len(state.prompt_token_ids),
            num_generation_tokens=metrics.num_generation_tokens,
            num_cached_tokens=state.num_cached_tokens,
            max_tokens=self._params.max_tokens or 0,
            n=self._params.n,
            arrival_time=metrics.arrival_time,
            scheduled_time=self.scheduled_time or None,
            first_token_time=metrics.first_token_time,
            last_token_time=metrics.last_token_time,
            finish_time=now,
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Joint:
    """Several pieces of one sample that nobody has read yet; joining costs no more than its length."""

    __slots__ = ("last", "logprobs", "texts", "token_ids")

    def __init__(self, first: Piece, second: Piece) -> None:
        self.texts = [first.text]
        self.token_ids = first.token_ids.copy()
        self.logprobs = None if first.logprobs is None else first.logprobs.copy()
        self.add(second)

    def add(self, piece: Piece) -> None:
        self.last = piece
        if piece.text:
            self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += piece.logprobs

    def join(self) -> Piece:
        last = self.last
        return Piece(
            last.request_id,
            last.index,
            "".join(self.texts),
            self.token_ids,
            self.logprobs,
            last.finish_reason,
            last.stop_reason,
            last.num_cached_tokens,
            last.error,
        )
