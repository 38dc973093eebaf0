"""POST /v1/chat/completions: messages in, a message out, whole or as it comes."""

from typing import Any

from msgspec import UNSET
from starlette.types import Send

from octavo.engine.errors import RequestError
from octavo.engine.text.output import Piece, RequestOutput
from octavo.engine.text.prompts import Prompt
from octavo.server.http.connection import EventStream, send_json
from octavo.server.openai.chunks import ChunkFrame, encode
from octavo.server.openai.generation import Tally, outputs_of, stream_all, submit_all
from octavo.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs, whole_chat_logprobs
from octavo.server.openai.prompts import chat_prompt
from octavo.server.openai.requests import ChatRequest
from octavo.server.openai.responses import ChatChoice, ChatCompletion, Message
from octavo.server.openai.service import Service, Stamp, make_stamp
from octavo.server.openai.translate import (
    chat_params,
    check_chat,
    check_priority,
    check_samples,
    in_chat_words,
    with_room,
)


async def create(service: Service, request: ChatRequest, request_id: str, send: Send) -> None:
    """Answers one request."""
    model = service.model_name(request.model)
    check_chat(request)
    check_priority(request.priority, service.engine.config.scheduling_policy)
    check_samples(1, request.n, max_prompts=1, max_n=service.config.max_n)
    params = chat_params(request, service.engine.default_params)
    default = service.engine.facts.default_sampling_params.get("max_tokens")
    try:
        prompt = await service.workers.run(chat_prompt, service, request)
        params = with_room(params, default, service.engine.facts.max_length - len(prompt.token_ids))
        streams = await submit_all(service.engine, [(prompt, params)], priority=request.priority or 0)
    except RequestError as error:
        raise in_chat_words(error, request) from None
    stamp = make_stamp(service, "chatcmpl", model, request.request_id or request_id)
    shape = _Shape(service, request)
    tally = Tally(streams)
    if request.stream:
        await stream_all(streams, _ChatStream(stamp, request, shape, tally, prompt), EventStream(send))
        return
    (output,) = await outputs_of(streams)
    tally.completion_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    await send_json(send, _completion(request, stamp, shape, tally, output))


class _Shape:
    """What the request says about the answer's form."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        last = request.messages[-1]
        self.role: str = last["role"] if request.continue_final_message else service.config.response_role
        self.opening = _text_of(last) if request.echo and last["role"] == self.role else ""
        self.num_top = (request.top_logprobs or 0) if request.logprobs else None
        as_ids = request.return_tokens_as_token_ids or service.config.return_tokens_as_token_ids
        self.names = TokenNames(service.engine.tokenizer, as_ids=as_ids)
        self.token_ids = bool(request.return_token_ids)


def _completion(
    request: ChatRequest, stamp: Stamp, shape: _Shape, tally: Tally, output: RequestOutput
) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=sample.index,
            message=Message(shape.role, shape.opening + sample.text),
            logprobs=whole_chat_logprobs(sample.token_ids, sample.logprobs, shape.names, shape.num_top),
            finish_reason=sample.finish_reason or "stop",
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if shape.token_ids else UNSET,
        )
        for sample in output.outputs
    ]
    return ChatCompletion(
        stamp.id,
        stamp.created,
        stamp.model,
        choices,
        tally.usage,
        stamp.fingerprint,
        prompt_logprobs=UNSET if request.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if shape.token_ids else UNSET,
    )


class _ChatStream:
    """The chunks of one chat: the role first, then text, then the finish reason in a chunk without text."""

    def __init__(self, stamp: Stamp, request: ChatRequest, shape: _Shape, tally: Tally, prompt: Prompt) -> None:
        self._frame = ChunkFrame("chat.completion.chunk", stamp, request, tally)
        self._shape = shape
        self._tally = tally
        self._prompt = prompt
        self._heads: dict[int, bytes] = {}  # of text chunks, by sample
        self._plain = shape.num_top is None and not shape.token_ids

    def events(self, prompt: int, piece: Piece) -> bytes:
        index, out = piece.index, b""
        if index not in self._heads:
            self._heads[index] = self._frame.opening + b'{"index":%d,"delta":{"content":' % index
            out = self._first(index)
        self._tally.completion_tokens += len(piece.token_ids)
        if self._plain:
            if piece.text:
                tail = b'},"logprobs":null,"finish_reason":null}'
                out += self._heads[index] + encode(piece.text) + tail + self._frame.closing
        elif piece.token_ids or piece.text:
            out += self._rich(piece)
        if piece.finish_reason is not None:
            end = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            choice = b'{"index":%d,"delta":{},"logprobs":null,' % index
            out += self._frame.wrap(choice + encode(end)[1:])
        return out

    def last(self) -> bytes:
        return self._frame.last()

    def _first(self, index: int) -> bytes:
        choice = {"index": index, "delta": {"role": self._shape.role, "content": ""}}
        more = b""
        if self._shape.token_ids and len(self._heads) == 1:
            more = b',"prompt_token_ids":' + encode(self._prompt.token_ids)
        out = self._frame.wrap(encode(choice | _UNFINISHED), more)
        if self._shape.opening:
            out += self._frame.wrap(encode(choice | {"delta": {"content": self._shape.opening}} | _UNFINISHED))
        return out

    def _rich(self, piece: Piece) -> bytes:
        shape = self._shape
        logprobs = None
        if shape.num_top is not None and piece.logprobs is not None:
            logprobs = {"content": chat_logprobs(piece.token_ids, piece.logprobs, shape.names, shape.num_top)}
        choice: dict[str, Any] = {"index": piece.index, "delta": {"content": piece.text}}
        choice |= {"logprobs": logprobs, "finish_reason": None}
        if shape.token_ids:
            choice["token_ids"] = piece.token_ids
        return self._frame.wrap(encode(choice))


_UNFINISHED = {"logprobs": None, "finish_reason": None}


def _text_of(message: dict[str, Any]) -> str:
    """A message's text, in either form; it was accepted by the template before."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""
