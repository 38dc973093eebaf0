"""A line of throughput and load every few seconds, in vLLM's words; silent while nothing happens."""

import asyncio
import logging
import time

from octavo.engine.stats import EngineStats

log = logging.getLogger("octavo.stats")


class StatsLog:
    """Remembers the last line's counters. `observe` is cheap; `line` says what happened since the last one."""

    def __init__(self) -> None:
        self._now: EngineStats | None = None
        self._then: EngineStats | None = None
        self._time = time.monotonic()
        self._was_idle = True

    def observe(self, stats: EngineStats) -> None:
        self._now = stats

    def line(self, now: float | None = None) -> str | None:
        """The next line; None where nothing ran since the last one, which was idle as well.

        Args:
          now: seconds of time.monotonic().
        """
        now = time.monotonic() if now is None else now
        seconds, self._time = max(now - self._time, 1e-6), now
        new, old = self._now, self._then
        if new is None:
            return None
        self._then = new
        prompt = _since(new.prompt_tokens, old.prompt_tokens if old else 0)
        generated = _since(new.generation_tokens, old.generation_tokens if old else 0)
        idle = not (prompt or generated or new.running or new.waiting)
        was_idle, self._was_idle = self._was_idle, idle
        if idle and was_idle:
            return None
        queries = _since(new.prefix_queries, old.prefix_queries if old else 0)
        hits = _since(new.prefix_hits, old.prefix_hits if old else 0)
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {new.running} reqs, Waiting: {new.waiting} reqs, "
            f"KV cache usage: {new.kv_usage:.1%}, "
            f"Prefix cache hit rate: {hits / queries if queries else 0:.1%}"
        )

    async def run(self, interval: float) -> None:
        """Writes lines until it is cancelled."""
        self._time = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            if line := self.line():
                log.info(line)


def _since(new: int, old: int) -> int:
    return max(new - old, 0)
