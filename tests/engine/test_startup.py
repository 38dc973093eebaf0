"""What happens once: programs published by several threads, and memory that comes out the same at the next start."""

import dataclasses
import time

import pytest

from octavo.configs.engine import EngineConfig
from octavo.engine import startup
from octavo.engine.buckets import PLAIN, Ladder
from octavo.engine.runner import Runner
from octavo.engine.warmup import WarmUp
from tests.engine.conftest import SMALL


class SlowLadder(Ladder):
    """Leaves the other threads time between reading what is ready and writing it back."""

    @property
    def ready(self):
        value = self.__dict__.get("ready", frozenset())
        time.sleep(0.005)
        return value

    @ready.setter
    def ready(self, value):
        self.__dict__["ready"] = value


def test_no_thread_undoes_what_another_made_ready() -> None:
    programs = tuple((rows, rows, PLAIN) for rows in range(1, 13))
    ladder = SlowLadder(programs=programs, coarse=programs)
    warm_up = WarmUp(ladder, compile=lambda program: lambda: program, busy=lambda: False, progress=False)
    warm_up.start(wait_for_all=True)
    assert ladder.ready == set(programs) == set(warm_up.programs)


def test_temporaries_are_measured_once(checkpoint, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: the second start takes the stored size, and so the same number of blocks."""
    config = EngineConfig(
        model=str(checkpoint()), compilation_cache_dir=str(tmp_path), **{**SMALL, "num_gpu_blocks_override": None}
    )
    resolve = EngineConfig.resolve
    monkeypatch.setattr(
        EngineConfig, "resolve", lambda self, *args: dataclasses.replace(resolve(self, *args), platform="gpu")
    )
    lowered, lower = [], Runner.lower_step
    monkeypatch.setattr(Runner, "lower_step", lambda self, program: lowered.append(program) or lower(self, program))
    first, second = (startup.start(config, busy=lambda: False, progress=False).num_blocks for _ in range(2))
    assert first == second
    assert first % 256 == 0
    assert len(lowered) == 1
