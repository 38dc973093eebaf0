"""The line every ten seconds."""

import asyncio
import logging

import pytest

from octavo.engine.stats import EngineStats
from octavo.server.stats_log import StatsLog


def test_a_line_says_what_happened_since_the_last_one() -> None:
    stats_log = StatsLog()
    start = stats_log.line(100.0)
    assert start is None
    stats_log.observe(
        EngineStats(2, 1, 0.25, prompt_tokens=100, generation_tokens=50, prefix_queries=80, prefix_hits=20)
    )
    assert stats_log.line(110.0) == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    stats_log.observe(EngineStats(prompt_tokens=100, generation_tokens=55, prefix_queries=80, prefix_hits=20))
    last = stats_log.line(120.0)
    assert last is not None
    assert "generation throughput: 0.5 tokens/s" in last
    assert "hit rate: 0.0%" in last
    zero = stats_log.line(130.0)
    assert zero is not None  # idle now, but the line before was not
    assert "generation throughput: 0.0 tokens/s" in zero
    assert stats_log.line(140.0) is None


def test_counters_that_start_anew_are_no_negative_throughput() -> None:
    stats_log = StatsLog()
    stats_log.observe(EngineStats(1, generation_tokens=50))
    stats_log.line()
    stats_log.observe(EngineStats(1, generation_tokens=10))
    assert "-" not in (stats_log.line() or "-")


def test_it_runs_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.stats")
    stats_log = StatsLog()
    stats_log.observe(EngineStats(running=1))

    async def run() -> None:
        task = asyncio.create_task(stats_log.run(0.02))
        await asyncio.sleep(0.1)
        task.cancel()

    asyncio.run(run())
    assert "Running: 1 reqs" in caplog.messages[0]
