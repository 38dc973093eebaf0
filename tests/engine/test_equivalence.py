"""The core test: however a request is served, it gives the same tokens and log-probabilities.

alone = batched = chunked = preempted = cached = in lockstep = in every bucket = after replay.
"""

import random

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from octavo.engine.plan import Plan
from octavo.engine.request import FinishReason
from tests.references.engine_runs import assert_equal, request, run

LENGTHS = (1, 15, 16, 17, 33, 47, 48, 49, 70, 96, 97, 130)  # around blocks of 16 and chunks of 48


def prompts(lengths=LENGTHS, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(n)] for n in lengths]


def requests(**params):
    return [request(f"r{i}", ids, prompt_logprobs=1, **params) for i, ids in enumerate(prompts())]


@pytest.fixture(scope="module")
def alone(checkpoint, shared_core):
    """Each request by itself, with nothing cached: what all others are compared with."""
    results = {}
    for item in requests():
        results |= run(shared_core, [item])
        assert shared_core.scheduler.reset_prefix_cache()
    return results


def assert_all_equal(results, alone, what):
    assert results.keys() == alone.keys()
    for key, result in results.items():
        assert_equal(result, alone[key], f"{what}, {key}")


def without_prompt_logprobs():
    return [request(f"r{i}", ids) for i, ids in enumerate(prompts())]


def test_batched(shared_core, alone):
    shared_core.scheduler.reset_prefix_cache()
    assert_all_equal(run(shared_core, requests()), alone, "batched")


def test_cached(shared_core, alone):
    shared_core.scheduler.reset_prefix_cache()
    first = run(shared_core, without_prompt_logprobs())
    second = run(shared_core, without_prompt_logprobs())
    for (name, _), result in second.items():
        length = LENGTHS[int(name[1:])]
        assert result.num_cached_tokens == (length - 1) // 16 * 16
    assert all(result.num_cached_tokens == 0 for result in first.values())
    assert_all_equal(first, alone, "not cached")
    assert_all_equal(second, alone, "cached")


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "token_rungs": (7,)},  # chunks that end inside a block
        {"max_num_batched_tokens": 200, "token_rungs": (200,)},  # whole prompts
        {"async_scheduling": False},
        {"block_size": 32},
        {"block_size": 64},
        {
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "token_rungs": None,
            "max_num_batched_tokens": None,
        },
        {"max_num_seqs": 6, "decode_rungs": (1, 2, 6), "token_rungs": (16, 48)},
    ],
    ids=["tiny-chunks", "whole", "lockstep", "block-32", "block-64", "plain", "ladder"],
)  # fmt: skip
def test_other_engines(make_core, alone, options):
    core = make_core(**options)
    assert_all_equal(run(core, requests()), alone, str(options))


def test_preempted(make_core, alone):
    """A pool so small that running requests lose their blocks again and again."""
    core = make_core(pool=14)
    results = run(core, without_prompt_logprobs())
    assert core.scheduler.stats.num_preemptions > 0
    assert_all_equal(results, alone, "preempted")


@pytest.mark.parametrize("lockstep", [False, True])
def test_preempted_with_penalties_and_seeds(make_core, lockstep):
    """What the device counted is rebuilt on resumption."""
    settings = {
        "temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
        "max_tokens": 40, "top_k": 40, "top_p": 0.95, "min_tokens": 3, "logit_bias": {7: 1.0},
    }  # fmt: skip
    items = [request(f"r{i}", ids, **settings) for i, ids in enumerate(prompts((20, 33, 17, 40, 5, 31)))]
    roomy = run(make_core(async_scheduling=not lockstep), items)
    core = make_core(pool=10, async_scheduling=not lockstep)
    tight = run(core, items)
    assert core.scheduler.stats.num_preemptions > 0
    assert_all_equal(tight, roomy, "preempted")


def test_every_bucket(make_core, alone):
    """Each program of a ladder in turn is the only one there for its kind of step, and gives the same."""
    core = make_core(max_num_seqs=4, decode_rungs=(1, 2, 4), token_rungs=(16, 48))
    ladder = core.runner.warm_up.ladder
    everything = ladder.ready
    for program in ladder.programs:
        if program in ladder.coarse:
            continue
        ladder.ready = frozenset({program, *ladder.coarse})
        core.scheduler.reset_prefix_cache()
        some = [item for item in without_prompt_logprobs() if len(item.prompt_token_ids) in (1, 17, 48)]
        plain = [msgspec.structs.replace(i, params=msgspec.structs.replace(i.params, logprobs=None)) for i in some]
        for key, result in run(core, plain).items():
            assert result.token_ids == alone[key].token_ids, (program, key)
    ladder.ready = everything


def test_recorded_plans_replay_in_a_fresh_runner(make_core):
    """A plan is data: through msgpack and into another engine's runner, it gives the same tokens."""
    core = make_core()
    recorded, original = [], core.runner.launch

    def record(plan):
        recorded.append(msgspec.msgpack.encode(plan))
        sampled = original(plan)
        outputs.append(sampled)
        return sampled

    outputs: list = []
    core.runner.launch = record
    run(core, requests(temperature=0.9, repetition_penalty=1.2))
    fresh = make_core().runner
    for data, sampled in zip(recorded, outputs, strict=True):
        plan = msgspec.msgpack.decode(data, type=Plan)
        again, before = fresh.fetch(fresh.launch(plan)), core.runner.fetch(sampled)
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        np.testing.assert_array_equal(again.tokens[rows], before.tokens[rows])


def test_nan_in_every_block_that_nobody_wrote(make_core, alone):
    """Padding and foreign blocks may hold anything."""
    core = make_core()
    state = core.runner.state
    core.runner.state = state.replace(kv=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.kv))
    assert_all_equal(run(core, requests()), alone, "NaN in the pool")


def test_a_nan_ends_one_request_and_its_blocks_are_not_reused(make_core, alone):
    """Poisoned blocks of one request: the others do not notice, and its prefix is computed afresh."""
    core = make_core()
    items = without_prompt_logprobs()
    victim = next(i for i in items if len(i.prompt_token_ids) == 70)
    long = msgspec.structs.replace(victim, params=msgspec.structs.replace(victim.params, max_tokens=60))
    others = [i for i in items if i is not victim][:3]

    def poison(step, events):
        if step == 8:
            seq = core.scheduler._requests[long.request_id][0]
            block, state = seq.block_ids[0][1], core.runner.state
            core.runner.state = state.replace(kv=tuple(layer.at[block].set(jnp.nan) for layer in state.kv))

    results = run(core, [long, *others], each_step=poison)
    assert results[(long.request_id, 0)].finish_reason == FinishReason.ERROR
    assert "finite" in results[(long.request_id, 0)].error
    for item in others:
        key = (item.request_id, 0)
        assert_equal(results[key], alone[key], "beside a NaN")
    again = run(core, [victim])[(victim.request_id, 0)]
    assert again.num_cached_tokens == 0
    assert_equal(again, alone[(victim.request_id, 0)], "after a NaN")


def test_aborts_in_flight_leave_the_survivors_alone(make_core, alone):
    """Blocks of an aborted request are given to others while a step still writes them."""
    core = make_core(pool=24)
    items = without_prompt_logprobs()
    cancelled = [request(f"c{i}", ids, max_tokens=100) for i, ids in enumerate(prompts((30, 60, 45, 20), seed=9))]

    def cancel(step, events):
        if step % 3 == 2 and step < 12:
            core.abort(f"c{step // 3}")
            core.abort(f"c{step // 3}")  # twice is nothing

    results = run(
        core, [i for pair in zip(cancelled, items[:4], strict=True) for i in pair] + items[4:], each_step=cancel
    )
    assert {k: v for k, v in results.items() if k[0].startswith("c")}.keys() == {(f"c{i}", 0) for i in range(4)}
    assert_all_equal({k: v for k, v in results.items() if k[0].startswith("r")}, alone, "beside aborts")
    assert core.scheduler._groups.usage == 0


def test_n_samples_share_the_prompt(make_core):
    """Different seeds, reproducible; the prompt is computed once, with and without the prefix cache."""
    ids = prompts((70,))[0]
    settings = {"temperature": 1.0, "seed": 11}
    singles = {}
    for i in range(3):
        core = make_core()
        singles[i] = run(core, [request("x", ids, **(settings | {"seed": 11 + i}))])[("x", 0)]
    for caching in (True, False):
        core = make_core(enable_prefix_caching=caching)
        results = run(core, [request("x", ids, n=3, **settings)])
        for i in range(3):
            assert_equal(results[("x", i)], singles[i], f"sample {i}, caching {caching}")
        assert [results[("x", i)].num_cached_tokens for i in range(3)] == [0, 64, 64]
        assert results[("x", 0)].token_ids != results[("x", 1)].token_ids


def test_a_salt_separates(shared_core, alone):
    ids = prompts((70,))[0]
    shared_core.scheduler.reset_prefix_cache()
    runs = [
        run(shared_core, [request(f"s{i}", ids, cache_salt=salt)])[(f"s{i}", 0)].num_cached_tokens
        for i, salt in enumerate((None, "a", "a", None, "b"))
    ]
    assert runs == [0, 0, 64, 64, 0]
