"""Random traffic on a tiny pool: each sequence gets the tokens it gets alone, each plan keeps its promises."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.errors import RequestError
from tests.references.fake_device import VOCAB
from tests.references.fake_engine import FakeEngine

SETTINGS = settings(max_examples=200)


def random_params(rng: random.Random) -> dict:
    params: dict = {"max_tokens": rng.choice([0, 1, 2, 5, 12, 20]), "seed": rng.randrange(3)}
    if rng.random() < 0.5:
        params["ignore_eos"] = True
    if rng.random() < 0.2:
        params["n"] = rng.randint(2, 4)
    if rng.random() < 0.2:
        params["presence_penalty"] = 0.5  # the fake model does not care; the row is what counts
    if rng.random() < 0.2:
        params["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        params["prompt_logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        params["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(8)]
    if rng.random() < 0.3:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if rng.random() < 0.2:
        params["top_k"] = 5
    return params


def random_prompt(rng: random.Random, engine: FakeEngine, pieces: list[list[int]]) -> list[int]:
    """Pieces of a block each, which come back at other places and behind other prefixes, or an earlier conversation."""
    if engine.requests and rng.random() < 0.3:
        name = rng.choice(list(engine.requests))
        start = engine.requests[name].prompt_token_ids + engine.output(name)
    else:
        start = [token for _ in range(rng.randint(0, 6)) for token in rng.choice(pieces)]
    return (start + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 2, 7]) if start else 3)])[:40]


@pytest.mark.parametrize("depth", [1, 2, 3])
@given(seed=st.integers(0, 2**32 - 1))
@SETTINGS
def test_random_traffic(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    block_sizes = rng.choice([[4], [4], [8], [4, 8]])
    rows = rng.randint(1, 5)
    engine = FakeEngine(
        num_blocks=[rng.randint(40 // size, 80 // size) + 1 for size in block_sizes],
        block_sizes=block_sizes,
        rows=rows,
        budget=rng.randint(rows + 1, rng.choice([8, 24])),
        depth=depth,
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=rng.random() < 0.8,
        watermark=rng.choice([0.0, 0.1]),
        max_constrained_rows=rng.randint(1, rows),
    )
    pieces = [[rng.randrange(VOCAB) for _ in range(4)] for _ in range(3)]
    for number in range(rng.randint(1, 12)):
        try:
            engine.add(
                f"r{number}",
                random_prompt(rng, engine, pieces),
                priority=rng.randint(-1, 1),
                salt=rng.choice([None, None, "a", "b"]),
                **random_params(rng),
            )
        except RequestError:
            continue
        for _ in range(rng.choice([0, 0, 1, 2, 6])):
            if engine.scheduler.has_unfinished or engine.in_flight:
                engine.step()
        if rng.random() < 0.15:
            engine.abort(f"r{rng.randrange(number + 1)}")
    engine.run()
    engine.check_outputs()
