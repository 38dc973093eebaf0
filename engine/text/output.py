"""From token events to what people read: text, finish reasons, log-probabilities by token.

Keeps one state a request. Refuses to touch the engine: where a stop string ends an output, it says
which samples the caller should abort.
"""

import dataclasses
import math
import time

import msgspec

from octavo.engine.request import FinishReason, SamplingParams, TokenEvent, TopLogprobs
from octavo.engine.text.detokenizer import Detokenizer, make_detokenizer
from octavo.engine.text.stop_strings import StopStrings
from octavo.engine.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # stands for minus infinity and NaN where JSON needs a number


class Logprob(msgspec.Struct, frozen=True):
    """One token's log-probability at one position.

    Attributes:
      logprob: natural logarithm; may be minus infinity.
      rank: 1 is the likeliest token.
      decoded_token: the token decoded alone, as it looks behind other text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

    @property
    def finite(self) -> float:
        """The same, as JSON can carry it."""
        return self.logprob if math.isfinite(self.logprob) else LOWEST_LOGPROB


type LogprobTable = dict[int, Logprob]  # the chosen token first, then the likeliest


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One sample of a request; the fields are vLLM's, and `error` says what went wrong in it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobTable] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """When things happened, seconds of time.monotonic()."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_generation_tokens: int = 0  # of all samples

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The result of a request; the fields are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobTable | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


class Piece(msgspec.Struct, frozen=True):
    """What is new in one sample of a request.

    `text` may be empty while characters are held back, and the texts of all pieces join to the
    output's. `finish_reason` comes with the sample's last piece.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobTable] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def __str__(self) -> str:
        """The text, so that a piece can be printed."""
        return self.text


class OutputProcessor:
    """The text side of all running requests.

    Args:
      tokenizer: None where nothing is to be decoded (every request then says `detokenize=False`).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float | None = None,
    ) -> None:
        """Expects events of a request from now on."""
        arrival = time.monotonic() if arrival_time is None else arrival_time
        self._requests[request_id] = RequestState(
            request_id, prompt, prompt_token_ids, params, arrival, self._tokenizer
        )

    def drop(self, request_id: str) -> None:
        """Forgets a request; later events of it are ignored."""
        self._requests.pop(request_id, None)

    def process(self, events: list[TokenEvent]) -> tuple[list[Piece], list[RequestOutput], list[tuple[str, int]]]:
        """Takes the events of one step.

        Returns:
          The new pieces; the outputs of requests that are complete now; (request id, sample) of what the
          engine should abort, since a stop string ended it.
        """
        pieces: list[Piece] = []
        complete: list[RequestOutput] = []
        abort: list[tuple[str, int]] = []
        now = time.monotonic()
        for event in events:
            state = self._requests.get(event.request_id)
            piece = state.take(event, now) if state is not None else None
            if state is None or piece is None:
                continue
            pieces.append(piece)
            if piece.finish_reason is not None and event.finish_reason is None:
                abort.append((event.request_id, event.index))
            if state.num_open == 0:
                complete.append(state.output())
                del self._requests[event.request_id]
        return pieces, complete, abort


class RequestState:
    """One request on its way to an output: its samples, and what they share.

    Attributes:
      num_open: samples without a finish reason.
      prompt_logprobs, num_cached_tokens: known once sample 0 has had an event with tokens.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival: float,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(arrival)
        self.tokenizer = tokenizer
        self.samples = [_Sample(index, params, tokenizer) for index in range(params.n)]
        self.num_open = params.n
        self._prompt_entries: list[TopLogprobs | None] | None = None
        self._prompt_logprobs: list[LogprobTable | None] | None = None

    @property
    def prompt_logprobs(self) -> list[LogprobTable | None] | None:
        """One table a prompt token, None for the first. Made when first asked for: a long prompt's take a while."""
        if self._prompt_entries is not None:
            entries, self._prompt_entries = self._prompt_entries, None
            self._prompt_logprobs = [None if entry is None else _table(entry, self.tokenizer) for entry in entries]
        return self._prompt_logprobs

    def take(self, event: TokenEvent, now: float) -> Piece | None:
        """The new piece, None for what comes after a sample's end."""
        if event.prompt_logprobs is not None:
            self._prompt_entries = event.prompt_logprobs
        sample = self.samples[event.index]
        if sample.finish_reason is not None:
            return None
        if event.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        piece = sample.take(event, self.request_id)
        if piece.token_ids:
            self.metrics.num_generation_tokens += len(piece.token_ids)
            self.metrics.last_token_time = now
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
        self.num_open -= sample.finish_reason is not None
        return piece

    def open_samples(self) -> list[int]:
        """Indices of the samples that have no finish reason yet."""
        return [sample.index for sample in self.samples if sample.finish_reason is None]

    def output(self) -> RequestOutput:
        """What there is by now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[sample.output() for sample in self.samples],
            finished=self.num_open == 0,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class _Sample:
    """One of a request's n outputs."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[LogprobTable] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._keeps_stop_token = params.include_stop_str_in_output
        self._has_stops = bool(params.stop_strings)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = make_detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens, after_text=True
            )

    def take(self, event: TokenEvent, request_id: str) -> Piece:
        """Takes an event's tokens, up to and with the one that completes a stop string."""
        text, count = self._read(event)
        token_ids = event.token_ids[:count]
        tables = self._file_logprobs(event.logprobs, count)
        self.token_ids += token_ids
        if self.finish_reason is None and event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason.value, event.stop_reason
            self.error = event.error
            text += self._stops.flush()
        if text:
            self.texts.append(text)
        return Piece(
            request_id,
            self.index,
            text,
            token_ids,
            tables,
            self.finish_reason,
            self.stop_reason,
            event.num_cached_tokens,
            self.error,
        )

    def _read(self, event: TokenEvent) -> tuple[str, int]:
        """The text of an event, and how many of its tokens belong to the output."""
        ids, last = event.token_ids, len(event.token_ids)
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", last
        ends = event.finish_reason is not None
        # A stop token ends the output and is no part of its text, unless that was asked for.
        spelled = last - 1 if ends and event.finish_reason is FinishReason.STOP and not self._keeps_stop_token else last
        if not self._has_stops:
            text = detokenizer.push(ids[:spelled])
            return (text + detokenizer.flush() if ends else text), last
        released = ""
        for position in range(spelled):
            may_stop = len(self.token_ids) + position + 1 > self._min_tokens
            certain, stop = self._stops.push(detokenizer.push(ids[position : position + 1]), may_stop=may_stop)
            released += certain
            if stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, stop
                return released, position + 1
        if ends:  # half a character is all that can come here, and no stop string ends in one
            released += self._stops.push(detokenizer.flush(), may_stop=False)[0]
        return released, last

    def _file_logprobs(self, entries: list[TopLogprobs] | None, count: int) -> list[LogprobTable] | None:
        if self.logprobs is None or entries is None:
            return None
        tables = [_table(entry, self._tokenizer) for entry in entries[:count]]
        self.logprobs += tables
        self.cumulative_logprob += sum(entry.logprob for entry in entries[:count])
        return tables

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


def _table(entry: TopLogprobs, tokenizer: Tokenizer | None) -> LogprobTable:
    """The chosen token, whatever its rank, and the likeliest ones."""

    def decoded(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    table = {entry.token_id: Logprob(entry.logprob, entry.rank, decoded(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        if token_id not in table:
            table[token_id] = Logprob(logprob, rank, decoded(token_id))
    return table
