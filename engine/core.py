"""The engine's loop body: admit -> schedule -> pack -> run -> commit -> emit.

Token ids in, token ids out: no text here. One thread calls `step`; `add` and `abort`
may be called from any.
"""

import collections
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from octavo.configs.engine import EngineConfig
from octavo.engine import startup
from octavo.engine.errors import EngineDeadError, RequestError
from octavo.engine.plan import Plan
from octavo.engine.request import Request, TokenEvent
from octavo.engine.stats import EngineStats
from octavo.engine.step import Sampled
from octavo.models_flax.checkpoint import Source


class EngineCore:
    """One model replica.

    Args:
      config: the engine's options.
      progress: show bars while loading and compiling.
      source: the model, where it is resolved already.
      sampled_vocab_size: ids from here up have no string and are never drawn.

    Raises:
      ConfigError, LoadError: the engine cannot start with these options or this checkpoint.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        source: Source | None = None,
        sampled_vocab_size: int | None = None,
    ) -> None:
        parts = startup.start(
            config,
            busy=lambda: self.scheduler.num_waiting > 0,
            progress=progress,
            source=source,
            sampled_vocab_size=sampled_vocab_size,
        )
        self.config = config
        self.resolved = parts.resolved
        self.model_config = parts.model_config
        self.source = parts.source
        self.default_sampling_params = parts.default_sampling_params
        self.num_blocks = parts.num_blocks
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.max_depth = 2 if config.async_scheduling else 1
        self.in_flight: collections.deque[tuple[Plan, Sampled]] = collections.deque()
        self._inbox: collections.deque[Request | tuple[str, int | None]] = collections.deque()
        self._queued_ids: set[str] = set()  # of requests in the inbox
        self._aborted_ids: set[str] = set()  # in the inbox as well, and free for whoever comes behind
        self._queue_lock = threading.Lock()
        self._events: list[TokenEvent] = []  # not returned yet
        self._dead: BaseException | None = None
        self.runner.start(wait_for_all=config.warmup == "full")

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: it can never be served; nothing was queued.
          EngineDeadError: the engine stopped.
        """
        self._check_alive()
        with self._queue_lock:
            free = request.request_id in self._aborted_ids
            if request.request_id in self._queued_ids and not free:
                raise RequestError(f"request_id {request.request_id!r} is in use", "request_id")
            self.scheduler.check(request, id_is_free=free)
            self._aborted_ids.discard(request.request_id)
            self._queued_ids.add(request.request_id)
            self._inbox.append(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one sample of it, at the next step and at whatever stage; an unknown id is nothing."""
        with self._queue_lock:
            if index is None:
                self._aborted_ids.add(request_id)
            self._inbox.append((request_id, index))

    def step(self) -> list[TokenEvent]:
        """Launches the next step and commits an earlier one while it runs.

        After an interrupt (Ctrl-C) it can be called again; nothing is lost.

        Raises:
          EngineDeadError: the device or the loop failed; it and every later call.
        """
        self._check_alive()
        with _interrupts_wait(), self._fatal():
            self._admit()
            plan = self.scheduler.plan(time.monotonic()) if len(self.in_flight) < self.max_depth else None
            if plan is not None:
                self.in_flight.append((plan, self.runner.launch(plan)))
                self.scheduler.dispatched(plan)
        if self.in_flight and (plan is None or len(self.in_flight) >= self.max_depth):
            self._commit()
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """The load now; `step` must not run meanwhile."""
        scheduler, counters = self.scheduler, self.scheduler.stats
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.num_preemptions,
        )

    @property
    def max_length(self) -> int:
        """Tokens of prompt and output that one sequence can have: max_model_len, or what the pool holds."""
        return min(self.resolved.max_model_len, (self.num_blocks - 1) * self.config.block_size + 1)

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step` has something to do."""
        return bool(self._inbox or self._events or self.in_flight or self.scheduler.has_unfinished)

    def close(self) -> None:
        """Drops what runs and frees the device. A second call does nothing."""
        self.in_flight.clear()
        self._inbox.clear()
        self._dead = self._dead or RuntimeError("it was closed")
        self.runner.close()

    def _admit(self) -> None:
        if not self._inbox:
            return
        with self._queue_lock:
            items = list(self._inbox)
            self._inbox.clear()
            self._queued_ids.clear()
            self._aborted_ids.clear()
            for item in items:
                if isinstance(item, Request):
                    self.scheduler.add(item)
                else:
                    self._events += self.scheduler.abort(*item)

    def _commit(self) -> None:
        plan, sampled = self.in_flight[0]
        with self._fatal():  # here an interrupt finds the loop waiting, and harms nothing
            result = self.runner.fetch(sampled)
        with _interrupts_wait(), self._fatal():
            self.in_flight.popleft()
            self._events += self.scheduler.commit(plan, result)

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """Host and device state may disagree after an error in here: the engine is dead."""
        try:
            yield
        except Exception as error:
            self._dead = error
            raise EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}") from error

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine stopped: {str(self._dead) or type(self._dead).__name__}") from self._dead


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect behind the block, so that it cannot leave host and device state apart."""
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if caught:
            usual(*caught[-1])
