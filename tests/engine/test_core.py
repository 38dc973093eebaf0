"""The core loop when something outside of a request goes wrong."""

import pytest

from octavo.engine.errors import EngineDeadError
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
        with pytest.raises(EngineDeadError):
            call()


def test_closing_twice_is_nothing(make_core):
    core = make_core()
    core.close()
    core.close()
    with pytest.raises(EngineDeadError, match="closed"):
        core.step()
