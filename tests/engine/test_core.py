"""The core loop when something outside of a request goes wrong."""

import os
import signal
import subprocess
import sys

import pytest

from octavo.engine.errors import EngineDeadError, RequestError
from tests.references.engine_runs import assert_equal, request, run

PROMPT = [5, 6, 7, 8, 9]


def test_an_interrupt_while_waiting_for_the_device_loses_nothing(make_core):
    core = make_core()
    undisturbed = run(core, [request("a", PROMPT)])[("a", 0)]
    fetch, calls = core.runner.fetch, []

    def interrupted(sampled):
        calls.append(sampled)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return fetch(sampled)

    core.runner.fetch = interrupted
    step = core.step

    def stubborn():
        try:
            return step()
        except KeyboardInterrupt:
            return []

    core.step = stubborn
    core.scheduler.reset_prefix_cache()
    assert_equal(run(core, [request("a", PROMPT)])[("a", 0)], undisturbed)


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), MemoryError()])
def test_a_failing_device_ends_the_engine_for_good(make_core, error):
    core = make_core()
    core.add(request("a", PROMPT))
    core.step()

    def fail(plan):
        raise error

    core.runner.launch = fail
    with pytest.raises(EngineDeadError, match=type(error).__name__):
        core.step()
    for call in (core.step, lambda: core.add(request("b", PROMPT))):
        with pytest.raises(EngineDeadError, match=r"the device is gone|MemoryError"):
            call()


def test_closing_twice_is_nothing(make_core):
    core = make_core()
    core.close()
    core.close()
    with pytest.raises(EngineDeadError, match="closed"):
        core.step()


def test_an_id_is_in_use_from_the_moment_it_is_added(make_core):
    """Also before the first step has taken the request from the inbox."""
    core = make_core()
    core.add(request("a", PROMPT))
    with pytest.raises(RequestError, match="'a' is in use"):
        core.add(request("a", PROMPT))
    core.step()
    with pytest.raises(RequestError, match="'a' is in use"):
        core.add(request("a", PROMPT))
    assert run(core, [request("b", PROMPT)])[("a", 0)].finish_reason == "length"
    core.add(request("a", PROMPT))


def test_events_of_an_abort_survive_an_interrupt(make_core):
    core = make_core()
    core.add(request("a", PROMPT, max_tokens=100))
    core.add(request("b", PROMPT, max_tokens=100))
    for _ in range(4):
        core.step()
    fetch = core.runner.fetch

    def interrupted(sampled):
        raise KeyboardInterrupt

    core.abort("a")
    core.runner.fetch = interrupted
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.runner.fetch = fetch
    assert ("a", "abort") in [(event.request_id, event.finish_reason) for event in core.step()]


def test_an_id_is_free_again_once_its_abort_is_queued(make_core):
    """B025: cancel and resubmit, without a step in between."""
    core = make_core()
    core.add(request("a", PROMPT, max_tokens=100))
    core.step()
    core.abort("a")
    core.add(request("a", PROMPT, max_tokens=3))
    with pytest.raises(RequestError, match="in use"):
        core.add(request("a", PROMPT))
    events = []
    while core.has_unfinished:
        events += core.step()
    assert [event.finish_reason for event in events if event.finish_reason] == ["abort", "length"]


def test_an_interrupt_between_schedule_and_launch_waits(make_core):
    """SIGINT in the middle of a launch takes effect behind it, and the engine goes on."""
    core = make_core()
    undisturbed = run(core, [request("a", PROMPT)])[("a", 0)]
    launch, interrupts = core.runner.launch, []

    def interrupting_launch(plan):
        signal.raise_signal(signal.SIGINT)
        return launch(plan)

    core.runner.launch = interrupting_launch
    step = core.step

    def stubborn():
        try:
            return step()
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
            return []

    core.step = stubborn
    core.scheduler.reset_prefix_cache()
    assert_equal(run(core, [request("a", PROMPT)])[("a", 0)], undisturbed)
    assert interrupts


def test_no_top_logprobs_at_all(make_core):
    """max_logprobs 0 still allows the chosen token's own."""
    core = make_core(max_logprobs=0)
    result = run(core, [request("a", PROMPT, logprobs=0, prompt_logprobs=0, max_tokens=3)])[("a", 0)]
    assert [entry.top_ids for entry in result.logprobs] == [[], [], []]
    assert all(entry.rank == 1 and entry.logprob < 0 for entry in result.logprobs)


EXIT_WHILE_COMPILING = """
import sys
from octavo.configs.engine import EngineConfig
from octavo.engine.core import EngineCore
core = EngineCore(EngineConfig(model=sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=4,
                               max_num_batched_tokens=16, num_gpu_blocks_override=32, compilation_cache_dir=""))
assert core.runner.warm_up.ladder.ready != set(core.runner.warm_up.ladder.programs)
print("started")
"""


def test_a_process_may_end_while_programs_compile(checkpoint, tmp_path):
    """Without close(): the background is waited for, or XLA would crash the interpreter on its way out."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT_WHILE_COMPILING, str(checkpoint())],
        env={**os.environ, "XLA_FLAGS": ""}, cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
