"""AsyncEngine: an engine in a process of its own, for servers. Prompts in, streams of pieces out, on one event loop.

A request is checked here before anything is sent. When the engine process dies, every stream
raises EngineDeadError and nothing hangs; a dead engine is not started again.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

from octavo.configs.engine import EngineConfig
from octavo.engine.admission import check_request
from octavo.engine.connection import EngineConnection
from octavo.engine.errors import ConfigError, EngineDeadError, OctavoError, QueueFullError, RequestError
from octavo.engine.messages import (
    Abort,
    Add,
    Failed,
    FromEngine,
    Hello,
    MessageError,
    Ready,
    Refused,
    ResetDone,
    ResetPrefixCache,
    Start,
    Step,
)
from octavo.engine.observer import FinishedRequest, Observer
from octavo.engine.request import FinishReason, SamplingParams
from octavo.engine.request_stream import RequestStream
from octavo.engine.stats import EngineFacts, EngineStats
from octavo.engine.text.load import load_tokenizer
from octavo.engine.text.output import RequestState
from octavo.engine.text.prompts import Prompt, PromptInput
from octavo.engine.text.requests import Message, RequestMaker
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models_flax.checkpoint import resolve

__all__ = ["AsyncEngine", "EngineFacts", "EngineStats", "FinishedRequest", "Observer", "RequestStream"]

logger = logging.getLogger(__name__)


class AsyncEngine:
    """One engine process and all requests in it. Made by `start`; belongs to the event loop that made it.

    Attributes:
      config: the engine's options.
      facts: limits and facts, as the engine said them when it was ready.
      tokenizer: loaded in this process; None for a dummy model without one.
      stats: the load behind the engine's last step.
    """

    config: EngineConfig
    facts: EngineFacts
    tokenizer: Tokenizer | None
    stats: EngineStats

    def __init__(self, config: EngineConfig, max_num_queued_reqs: int | None, observer: Observer | None) -> None:
        self.config = config
        self.stats = EngineStats()
        self._max_queued = max_num_queued_reqs
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._connection = EngineConnection(self._on_message, self._on_exit)
        self._ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # start may not ask
        self._streams: dict[str, RequestStream] = {}  # by key: everything unfinished
        self._num_samples = 0  # of them, without a finish reason
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._call_ids = itertools.count()
        self._dead: str | None = None
        self._death = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_num_queued_reqs: int | None = None,
        observer: Observer | None = None,
        chat_template: str | None = None,
        progress: bool = True,
    ) -> Self:
        """Starts the engine process and returns when it serves.

        Args:
          config: the engine's options.
          max_num_queued_reqs: samples that may wait for a place in the engine; by default any number.
          observer: is told what metrics need.
          chat_template: the operator's Jinja, which replaces the model's.
          progress: show bars on standard error while loading and compiling.

        Raises:
          ConfigError, LoadError: as `Engine`, with the same words.
          EngineDeadError: the process ended before it was ready, or the device failed.
        """
        engine = cls(config, max_num_queued_reqs, observer)
        try:
            await engine._start(chat_template, progress)
        except BaseException:
            await engine._connection.close(kill=True)
            raise
        return engine

    # Text, on any thread.

    @property
    def default_params(self) -> SamplingParams:
        """What a request without params gets: the model's generation_config.json over vLLM's defaults."""
        return self._requests.default_params

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an output: the model's and the tokenizer's."""
        return self._requests.eos_token_ids

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self.facts.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError: a dummy model has none."""
        return self._requests.get_tokenizer()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """The prompt of one conversation; arguments and errors of `Engine.render_chat`. May take long: use a thread."""
        return self._requests.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )

    def parse_prompt(self, prompt: PromptInput | Prompt) -> Prompt:
        """Text, token ids or a mapping to a prompt; arguments and errors of `Engine.generate`. May take long."""
        return self._requests.parse_prompt(prompt)

    # Requests, on the event loop.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestStream:
        """Sends one request; what it gives comes through the stream.

        Args:
          prompt: from `parse_prompt` or `render_chat`.
          params: by default the model's own. `max_tokens=None` is all that the model has room for.
          priority: lower runs first, where the policy is priority.
          request_id: the caller's name for it, which need not be unique.

        Raises:
          RequestError: it is wrong; nothing was sent.
          QueueFullError: as many wait as may; nothing was sent.
          EngineDeadError: the engine is dead.
        """
        self.check_health()
        key = uuid.uuid4().hex
        request = self._requests.make(key, prompt, params, priority)
        check_request(request, self.facts.limits)
        self._check_queue()
        try:
            self._connection.send(Add(request))
        except MessageError as error:
            raise RequestError(f"the request holds text that UTF-8 cannot: {error}") from None
        state = RequestState(
            request_id or key,
            prompt.text,
            request.prompt_token_ids,
            request.params,
            request.arrival_time,
            self.tokenizer,
        )
        stream = RequestStream(key, state, request.params, self._abort)
        self._streams[key] = stream
        self._num_samples += request.params.n
        self._idle.clear()
        return stream

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing done, while something runs.

        Raises:
          EngineDeadError: the engine is dead, or dies meanwhile.
        """
        self.check_health()
        call = next(self._call_ids)
        future = self._calls[call] = self._loop.create_future()
        try:
            self._connection.send(ResetPrefixCache(call))
            return await future
        finally:
            del self._calls[call]

    # Its life.

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine is dead, or closed."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    async def wait_dead(self) -> None:
        """Returns once the engine is dead, or closed."""
        await self._death.wait()

    async def drain(self, timeout: float) -> None:
        """Waits until no request is left, at most `timeout` seconds; then ends the rest with "abort"."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            logger.info("aborting %d requests that did not end within %g s", len(self._streams), timeout)
            for stream in list(self._streams.values()):
                self._abort(stream)

    async def close(self) -> None:
        """Ends the process; open streams raise EngineDeadError. A second call does nothing."""
        self._die("the engine was closed")
        await self._connection.close()

    # Below: starting.

    async def _start(self, chat_template: str | None, progress: bool) -> None:
        executor = concurrent.futures.ThreadPoolExecutor(1, "octavo-tokenizer")
        loading = self._loop.run_in_executor(executor, self._load_tokenizer)
        executor.shutdown(wait=False)  # behind this one task
        opening = asyncio.create_task(self._connection.open())
        try:  # both take seconds
            _, self.tokenizer = await asyncio.gather(opening, loading)
        finally:
            opening.cancel()
        vocab_size = None if self.tokenizer is None else self.tokenizer.vocab_size
        level = logging.getLogger("octavo").getEffectiveLevel()
        try:
            self._connection.send(Start(self.config, vocab_size, progress, level))
        except MessageError as error:
            raise ConfigError(f"the options hold what cannot be sent to the engine process: {error}") from error
        self.facts = await self._ready
        self._requests = RequestMaker(
            self.tokenizer,
            max_model_len=self.facts.max_model_len,
            max_length=self.facts.max_length,
            eos_token_ids=self.facts.eos_token_ids,
            default_sampling_params=self.facts.default_sampling_params,
            chat_template=chat_template,
        )

    def _load_tokenizer(self) -> Tokenizer | None:
        config = self.config
        return load_tokenizer(config, resolve(config.model, revision=config.revision, load_format=config.load_format))

    # What comes from the engine.

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case Step():
                self._on_step(message)
            case Ready(facts):
                if not self._ready.done():
                    self._ready.set_result(facts)
            case Refused(key, text, field):
                if (stream := self._streams.get(key)) is not None:
                    self._give_up(stream, RequestError(text, field))
            case ResetDone(call, done):
                if (future := self._calls.get(call)) is not None and not future.done():
                    future.set_result(done)
            case Failed():
                error = message.error()
                if not self._ready.done():
                    self._ready.set_exception(error)
                self._die(str(error))
            case Hello():
                logger.warning("ignored a second hello of the engine process")

    def _on_step(self, step: Step) -> None:
        now = time.monotonic()
        self.stats = step.stats
        first: list[float] = []
        later: list[float] = []
        for event in step.events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue  # aborted meanwhile
            try:
                piece = stream.take(event, now)
            except Exception:
                logger.exception("the output of request %s cannot be read", stream.request_id)
                self._connection.send(Abort(stream.key))
                self._give_up(stream, OctavoError("the output of this request cannot be read"))
                continue
            if piece is None:
                continue
            if piece.token_ids:
                stream.note_time(piece.index, now, first, later)
            if piece.finish_reason is not None:
                self._num_samples -= 1
                if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                    self._connection.send(Abort(event.request_id, event.index))
                if stream.finished:
                    self._finish(stream, now)
        self._tell(step.stats, first, later)

    def _on_exit(self, what: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(f"the engine process {what} while it started"))
        elif self._dead is None and not self._ready.cancelled() and self._ready.exception() is None:
            # (Otherwise whoever starts it says what is wrong.)
            logger.error("the engine process %s", what)
        self._die(f"the engine process {what}")

    # How requests end.

    def _abort(self, stream: RequestStream) -> None:
        if stream.key not in self._streams:
            return
        self._connection.send(Abort(stream.key))
        now = time.monotonic()
        self._num_samples -= stream.num_open
        try:
            stream.end(FinishReason.ABORT, now)
        finally:
            self._finish(stream, now)

    def _give_up(self, stream: RequestStream, error: OctavoError) -> None:
        """Ends a stream with an error that its reader gets."""
        self._num_samples -= stream.num_open
        stream.fail(error)
        self._finish(stream, time.monotonic())

    def _finish(self, stream: RequestStream, now: float) -> None:
        del self._streams[stream.key]
        if not self._streams:
            self._idle.set()
        if self._observer is not None:
            try:
                self._observer.on_finished(stream.record(now))
            except Exception:
                logger.exception("the observer failed")

    def _die(self, why: str) -> None:
        """Nothing more will come. The first reason stays."""
        if self._dead is not None:
            return
        self._dead = why
        for stream in list(self._streams.values()):
            self._give_up(stream, EngineDeadError(why))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(why))
        self._death.set()

    def _check_queue(self) -> None:
        if self._max_queued is None:
            return
        # Where something waits although there are slots, it is for blocks: then no more fit than run.
        room = self.stats.running if self.stats.waiting else self.facts.max_num_seqs
        waiting = self._num_samples - room
        if waiting >= self._max_queued:
            raise QueueFullError(
                f"{waiting} requests wait already, the limit (max_num_queued_reqs) is {self._max_queued}"
            )

    def _tell(self, stats: EngineStats, first: list[float], later: list[float]) -> None:
        if self._observer is None:
            return
        try:
            self._observer.on_stats(stats)
            if first or later:
                self._observer.on_tokens(first, later)
        except Exception:
            logger.exception("the observer failed")
