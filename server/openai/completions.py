"""POST /v1/completions: prompts in, their continuations out, whole or as they come."""

from typing import Any

from msgspec import UNSET
from starlette.types import Send

from octavo.engine.client import RequestStream
from octavo.engine.request import SamplingParams
from octavo.engine.text.output import Piece, RequestOutput
from octavo.engine.text.prompts import Prompt
from octavo.server.http.connection import EventStream, send_json
from octavo.server.openai.chunks import ChunkFrame, encode
from octavo.server.openai.generation import Tally, outputs_of, stream_all, submit_all
from octavo.server.openai.logprobs import CompletionTokens, TokenNames, joined, prompt_logprobs
from octavo.server.openai.prompts import completion_prompts
from octavo.server.openai.requests import DEFAULT_MAX_TOKENS, CompletionRequest
from octavo.server.openai.responses import Completion, CompletionChoice, CompletionLogprobs
from octavo.server.openai.service import Service, Stamp, make_stamp
from octavo.server.openai.translate import (
    check_completion,
    check_priority,
    check_samples,
    completion_params,
    with_room,
)


async def create(service: Service, request: CompletionRequest, request_id: str, send: Send) -> None:
    """Answers one request."""
    model = service.model_name(request.model)
    check_completion(request)
    check_priority(request.priority, service.engine.config.scheduling_policy)
    check_samples(1, request.n, max_prompts=1, max_n=service.config.max_n)
    params = completion_params(request, service.engine.default_params)
    prompts = await service.workers.run(completion_prompts, service, request)
    echoed = await service.workers.run(_texts, service, prompts, params) if request.echo else [""] * len(prompts)
    work = [(prompt, _with_room(service, request, params, prompt)) for prompt in prompts]
    streams = await submit_all(service.engine, work, priority=request.priority or 0)
    stamp = make_stamp(service, "cmpl", model, request.request_id or request_id)
    shape = _Shape(service, request, params, echoed)
    tally = Tally(streams)
    if request.stream:
        await stream_all(streams, _CompletionStream(stamp, request, shape, tally, streams), EventStream(send))
        return
    outputs = await outputs_of(streams)
    tally.completion_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    choices = [choice for number, output in enumerate(outputs) for choice in _choices(request, shape, number, output)]
    await send_json(send, Completion(stamp.id, stamp.created, stamp.model, choices, tally.usage, stamp.fingerprint))


def _with_room(service: Service, request: CompletionRequest, params: SamplingParams, prompt: Prompt) -> SamplingParams:
    facts = service.engine.facts
    defaults = [facts.default_sampling_params.get("max_tokens")]
    if "max_tokens" not in request.model_fields_set:  # null is another wish than none: as many as fit
        defaults.append(DEFAULT_MAX_TOKENS)
    limit = min((value for value in defaults if value is not None), default=None)
    return with_room(params, limit, facts.max_length - len(prompt.token_ids))


def _texts(service: Service, prompts: list[Prompt], params: SamplingParams) -> list[str]:
    """The texts of prompts, for echo: as given, or decoded."""
    return [
        service.tokenizer.decode(prompt.token_ids, skip_special_tokens=params.skip_special_tokens)
        if prompt.text is None
        else prompt.text
        for prompt in prompts
    ]


class _Shape:
    """What the request says about the answer's form."""

    def __init__(self, service: Service, request: CompletionRequest, params: SamplingParams, echoed: list[str]) -> None:
        self.tokenizer = service.engine.tokenizer
        as_ids = request.return_tokens_as_token_ids or service.config.return_tokens_as_token_ids
        self.names = TokenNames(self.tokenizer, as_ids=as_ids)
        special = frozenset[int]() if self.tokenizer is None else self.tokenizer.special_ids
        self.skipped = special if params.skip_special_tokens else frozenset[int]()
        self.n = params.n
        self.echo = bool(request.echo)
        self.echoed = echoed  # by prompt
        self.num_top = request.logprobs
        self.token_ids = bool(request.return_token_ids)

    def entries(self) -> CompletionTokens:
        return CompletionTokens(self.tokenizer, self.names, self.skipped)

    def prompt_entries(
        self, entries: CompletionTokens, number: int, source: RequestOutput | RequestStream
    ) -> CompletionLogprobs | None:
        """Of the echoed prompt, where both are wanted."""
        if not self.echo or self.num_top is None or source.prompt_logprobs is None:
            return None
        return entries.prompt(source.prompt_token_ids, source.prompt_logprobs, self.echoed[number], self.num_top)


def _choices(request: CompletionRequest, shape: _Shape, number: int, output: RequestOutput) -> list[CompletionChoice]:
    choices = []
    for sample in output.outputs:
        entries = shape.entries()
        logprobs = shape.prompt_entries(entries, number, output)
        if shape.num_top is not None and sample.logprobs is not None:
            logprobs = joined(logprobs, entries.take(sample.token_ids, sample.logprobs, shape.num_top))
        choices.append(
            CompletionChoice(
                index=number * shape.n + sample.index,
                text=shape.echoed[number] + sample.text,
                logprobs=logprobs,
                finish_reason=sample.finish_reason or "stop",
                stop_reason=sample.stop_reason,
                prompt_logprobs=UNSET if request.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
                prompt_token_ids=output.prompt_token_ids if shape.token_ids else UNSET,
                token_ids=sample.token_ids if shape.token_ids else UNSET,
            )
        )
    return choices


class _CompletionStream:
    """The chunks of one request; those of its choices come in between each other."""

    def __init__(
        self,
        stamp: Stamp,
        request: CompletionRequest,
        shape: _Shape,
        tally: Tally,
        streams: list[RequestStream],
    ) -> None:
        self._frame = ChunkFrame("text_completion", stamp, request, tally)
        self._shape = shape
        self._tally = tally
        self._streams = streams
        self._heads: dict[int, bytes] = {}  # by index of the choice
        self._entries: dict[int, CompletionTokens] = {}
        self._plain = shape.num_top is None and not shape.token_ids

    def events(self, prompt: int, piece: Piece) -> bytes:
        index = prompt * self._shape.n + piece.index
        out = b""
        if index not in self._heads:
            self._heads[index] = self._frame.opening + b'{"index":%d,"text":' % index
            out = self._first(index, prompt)
        self._tally.completion_tokens += len(piece.token_ids)
        if piece.finish_reason is None and self._plain:
            if piece.text:
                tail = b',"logprobs":null,"finish_reason":null}'
                out += self._heads[index] + encode(piece.text) + tail + self._frame.closing
        elif piece.text or piece.token_ids or piece.finish_reason is not None:
            out += self._rich(index, piece)
        return out

    def last(self) -> bytes:
        return self._frame.last()

    def _first(self, index: int, prompt: int) -> bytes:
        """What precedes the first text: the echoed prompt and its ids, where they were asked for."""
        shape = self._shape
        entries = self._entries[index] = shape.entries()
        if not shape.echo and not shape.token_ids:
            return b""
        stream = self._streams[prompt]
        logprobs = shape.prompt_entries(entries, prompt, stream)
        choice: dict[str, Any] = {"index": index, "text": shape.echoed[prompt], "logprobs": logprobs}
        choice["finish_reason"] = None
        if shape.token_ids:
            choice |= {"prompt_token_ids": stream.prompt_token_ids, "token_ids": []}
        return self._frame.wrap(encode(choice))

    def _rich(self, index: int, piece: Piece) -> bytes:
        shape, logprobs = self._shape, None
        if shape.num_top is not None and piece.logprobs is not None:
            logprobs = self._entries[index].take(piece.token_ids, piece.logprobs, shape.num_top)
        choice: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": logprobs}
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if shape.token_ids:
            choice["token_ids"] = piece.token_ids
        return self._frame.wrap(encode(choice))
