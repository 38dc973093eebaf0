"""The core loop when something outside of a request goes wrong."""

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
        with pytest.raises(EngineDeadError):
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
