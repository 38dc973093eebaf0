"""Runs token-id requests through an EngineCore and compares runs as the project defines equality."""

import dataclasses
from collections.abc import Callable

import numpy as np

from octavo.engine.core import EngineCore
from octavo.engine.request import Request, SamplingParams, TokenEvent

LOGPROB_TOLERANCE = 1e-4  # float32: XLA's dots differ by up to 5e-6 between shapes


@dataclasses.dataclass
class Run:
    """What one sequence gave."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


def request(name: str, prompt: list[int], eos: tuple[int, ...] = (), **params) -> Request:
    """A greedy request with log-probabilities, unless told otherwise."""
    extra = {key: params.pop(key) for key in ("priority", "cache_salt", "bad_words_token_ids") if key in params}
    settings = {"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True} | params
    return Request(
        request_id=name, prompt_token_ids=prompt, params=SamplingParams(**settings), eos_token_ids=eos, **extra
    )


def run(
    core: EngineCore,
    requests: list[Request],
    *,
    each_step: Callable[[int, list[TokenEvent]], None] = lambda step, events: None,
    max_steps: int = 20_000,
) -> dict[tuple[str, int], Run]:
    """Adds all requests and steps until nothing is left; invariants are checked after each step.

    Args:
      core: an idle engine.
      requests: added at once.
      each_step: called after each step, e.g. to add or abort others.
      max_steps: more than that is a hang.
    """
    for item in requests:
        core.add(item)
    runs: dict[tuple[str, int], Run] = {}
    for step in range(max_steps):
        if not core.has_unfinished:
            return runs
        events = core.step()
        core.scheduler.check_invariants()
        for event in events:
            collect(runs.setdefault((event.request_id, event.index), Run()), event)
        each_step(step, events)
    raise AssertionError(f"still running after {max_steps} steps")


def collect(result: Run, event: TokenEvent) -> None:
    """Adds one event to a run; nothing may follow the last one."""
    assert result.finish_reason is None, "an event after the last one"
    result.token_ids += event.token_ids
    result.logprobs += event.logprobs or []
    if event.prompt_logprobs is not None:
        assert result.prompt_logprobs is None
        result.prompt_logprobs = event.prompt_logprobs
    result.finish_reason, result.stop_reason = event.finish_reason, event.stop_reason
    result.num_cached_tokens, result.error = event.num_cached_tokens, event.error


def assert_equal(left: Run, right: Run, what: str = "") -> None:
    """The same tokens, unless the two likeliest were closer than the tolerance; log-probabilities within it."""
    for position, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=False)):
        if a != b:
            top = left.logprobs[position].top_logprobs
            assert top[0] - top[1] < LOGPROB_TOLERANCE, f"{what}: token {position} is {a}, not {b}"
            return  # from a near-tie on, both go their own way
        if left.logprobs and right.logprobs:
            mine, theirs = left.logprobs[position], right.logprobs[position]
            assert abs(mine.logprob - theirs.logprob) < LOGPROB_TOLERANCE, f"{what}: log-probability {position}"
    assert left.finish_reason == right.finish_reason, what
    assert len(left.token_ids) == len(right.token_ids), what
    assert_equal_prompts(left, right, what)


def assert_equal_prompts(left: Run, right: Run, what: str = "") -> None:
    """Prompt log-probabilities within the tolerance, where both have them."""
    if left.prompt_logprobs is None or right.prompt_logprobs is None:
        return
    assert len(left.prompt_logprobs) == len(right.prompt_logprobs), what
    assert left.prompt_logprobs[0] is None and right.prompt_logprobs[0] is None
    mine, theirs = ([p.logprob for p in r.prompt_logprobs[1:]] for r in (left, right))
    np.testing.assert_allclose(mine, theirs, atol=LOGPROB_TOLERANCE, err_msg=what)
