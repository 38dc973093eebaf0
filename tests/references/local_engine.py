"""An AsyncEngine without processes: an EngineCore stepped by a task of the event loop, with the real streams.

For tests of the HTTP surface that need real answers, and control over when the engine runs, but nothing of the
process boundary. The interface is that of octavo.engine.client.AsyncEngine.
"""

import asyncio
import time
import uuid

from octavo.configs.engine import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.errors import EngineDeadError, QueueFullError
from octavo.engine.process import make_facts
from octavo.engine.request import FinishReason, SamplingParams
from octavo.engine.request_stream import RequestStream
from octavo.engine.text.load import load_tokenizer
from octavo.engine.text.output import RequestState
from octavo.engine.text.prompts import Prompt
from octavo.engine.text.requests import RequestMaker
from octavo.models_flax.checkpoint import resolve


class LocalEngine:
    """One engine core in this process.

    Attributes:
      paused: while it is set, nothing runs.
      max_queued: unfinished requests at most.
      submitted: requests so far.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **options: object) -> None:
        self.config = EngineConfig(model=model, **options)
        self.tokenizer = load_tokenizer(self.config, resolve(model))
        self.core = core = EngineCore(self.config, progress=False, sampled_vocab_size=self.tokenizer.vocab_size)
        self.requests = RequestMaker(
            self.tokenizer,
            max_model_len=core.resolved.max_model_len,
            max_length=core.max_length,
            eos_token_ids=core.model_config.eos_token_ids,
            default_sampling_params=core.default_sampling_params,
            chat_template=chat_template,
        )
        self.facts = make_facts(core)
        self.default_params = self.requests.default_params
        self.render_chat = self.requests.render_chat
        self.parse_prompt = self.requests.parse_prompt
        self.paused = False
        self.max_queued = 10_000
        self.submitted = 0
        self._dead: str | None = None
        self._streams: dict[str, RequestStream] = {}
        self._task: asyncio.Task[None] | None = None

    def submit(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, request_id: str | None = None
    ) -> RequestStream:
        self.check_health()
        key = uuid.uuid4().hex
        request = self.requests.make(key, prompt, params, priority)
        self.core.scheduler.check(request)
        if len(self._streams) >= self.max_queued:
            raise QueueFullError(f"{len(self._streams)} requests wait already, the limit is {self.max_queued}")
        self.core.add(request)
        self.submitted += 1
        state = RequestState(key, prompt.text, prompt.token_ids, request.params, request.arrival_time, self.tokenizer)
        stream = self._streams[key] = RequestStream(key, state, request.params, self._abort)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return stream

    async def reset_prefix_cache(self) -> bool:
        return self.core.scheduler.reset_prefix_cache()

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def die(self, why: str) -> None:
        """Every open stream gets an error; `revive` undoes it."""
        self._dead = why
        for stream in list(self._streams.values()):
            self.core.abort(stream.key)
            stream.fail(EngineDeadError(why))
        self._streams.clear()

    def abort_all(self) -> None:
        """As a drain that ran out of time."""
        for stream in list(self._streams.values()):
            self._abort(stream)

    def revive(self) -> None:
        self._dead = None

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def is_clean(self) -> bool:
        """Nothing runs, nothing waits, every block is free."""
        for _ in range(10):
            if self.core.has_unfinished:
                self.core.step()
        self.core.scheduler.check_invariants()
        return not self._streams and not self.core.has_unfinished

    def _abort(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            self.core.abort(stream.key)
            stream.end(FinishReason.ABORT, time.monotonic())

    async def _run(self) -> None:
        while self._streams:
            await asyncio.sleep(0.002 if self.paused else 0)
            if self.paused or not self.core.has_unfinished:
                continue
            now = time.monotonic()
            for event in self.core.step():
                if (stream := self._streams.get(event.request_id)) is None:
                    continue
                piece = stream.take(event, now)
                if piece is not None and piece.finish_reason is not None and event.finish_reason is None:
                    self.core.abort(event.request_id, event.index)
                if stream.finished:
                    del self._streams[event.request_id]
