"""Compares what `Engine.generate` returns with a golden: log-probabilities, and tokens where they are certain."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.references.goldens import Golden


def check_output(result: Any, golden: Golden, tolerance: float) -> float:
    """Greedy tokens and, where the request asked for them, log-probabilities of output and prompt.

    Tokens must agree until the two likeliest candidates are closer than twice the tolerance; log-probabilities of the
    output are compared as far as the tokens agree (the next one still has the same context). Returns the largest
    difference.
    """
    assert list(result.prompt_token_ids) == golden.prompt
    sample = result.outputs[0]
    tokens = list(sample.token_ids)
    agreed = _agreement(tokens, golden.output)
    assert agreed >= golden.num_certain(2 * tolerance), (
        f"token {agreed} is {tokens[agreed : agreed + 1]}, expected {golden.output[agreed]}, gap {golden.gap[agreed]}"
    )
    worst = 0.0
    if sample.logprobs is not None:
        assert len(sample.logprobs) == len(tokens)
        start = len(golden.prompt)
        compared = min(agreed + 1, len(golden.output))
        worst = _check_positions(sample.logprobs[:compared], golden, range(start, start + compared), agreed)
        for token, entries in zip(tokens, sample.logprobs, strict=True):
            assert token in entries, "a chosen token must be among its own log-probabilities"
    if result.prompt_logprobs is not None:
        assert len(result.prompt_logprobs) == len(golden.prompt)
        assert result.prompt_logprobs[0] is None
        positions = range(1, len(golden.prompt))
        worst = max(worst, _check_positions(result.prompt_logprobs[1:], golden, positions, len(positions)))
    assert worst <= tolerance, f"log-probabilities differ by {worst:.2g}, allowed {tolerance:.2g}"
    return worst


def _agreement(tokens: Sequence[int], expected: Sequence[int]) -> int:
    for index, (token, wanted) in enumerate(zip(tokens, expected, strict=False)):
        if token != wanted:
            return index
    assert len(tokens) == len(expected)
    return len(tokens)


def _check_positions(
    entries: Sequence[Mapping[int, Any]], golden: Golden, positions: Sequence[int], num_same_token: int
) -> float:
    """The largest difference, over all candidates that both sides name."""
    ids = golden.prompt + golden.output
    worst = 0.0
    for index, (entry, position) in enumerate(zip(entries, positions, strict=True)):
        expected = dict(zip(golden.top_ids[position].tolist(), golden.top_logprobs[position].tolist(), strict=True))
        best = golden.top_ids[position, 0]
        assert best in entry, f"position {position}: the likeliest token {best} is missing"
        if index < num_same_token:
            expected[ids[position]] = float(golden.chosen[position])
            assert ids[position] in entry
        shared = expected.keys() & entry.keys()
        worst = max(worst, *(abs(entry[token].logprob - expected[token]) for token in shared))
        if entry[best].rank != 1:
            worst = max(worst, float(np.subtract(*golden.top_logprobs[position, :2])))
    return worst
