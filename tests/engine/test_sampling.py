"""Sampling inside the step against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine import sampling
from octavo.engine.plan import SlotLoad, SlotParams
from octavo.engine.state import (
    StateShape,
    empty_constrained,
    empty_slots,
    load_constrained,
    load_slot,
    pack_constrained_load,
    pack_slot_load,
)
from octavo.pallas_kernels.sample import choose

V = 97
SHAPE = StateShape(num_slots=5, max_model_len=24, max_blocks=(3,), vocab_size=V, num_constrained=3)
NEG_INF = float("-inf")


@functools.cache
def loaders():
    return (
        jax.jit(functools.partial(load_slot, shape=SHAPE)),
        jax.jit(functools.partial(load_constrained, shape=SHAPE)),
    )


def draw(logits, rows, *, full=True, vocab_size=V, lazy=False):
    """rows: (token ids, prompt length, SlotParams) per slot; samples the next position of each."""
    slots, constrained = empty_slots(SHAPE), empty_constrained(SHAPE)
    slot_loader, row_loader = loaders()
    for slot, (ids, prompt_len, params) in enumerate(rows):
        row = slot if full and slot < SHAPE.num_constrained - 1 else -1
        load = SlotLoad(
            slot=slot, token_ids=ids, prompt_len=prompt_len, num_computed=0, block_ids=[[]], params=params,
            constrained_row=row,
        )  # fmt: skip
        slots = slot_loader(slots, pack_slot_load(load, SHAPE))
        if row >= 0:
            constrained = row_loader(constrained, slots, pack_constrained_load(load, SHAPE))
    position = jnp.array([len(ids) for ids, _, _ in rows], jnp.int32)
    chosen = sampler(full, vocab_size, lazy)(
        jnp.asarray(logits, jnp.float32), slots, constrained, jnp.arange(len(rows), dtype=jnp.int32), position
    )
    return jax.tree.map(np.asarray, chosen)


@functools.cache
def sampler(full, vocab_size, lazy):
    chosen = choose("reference", "cpu" if lazy else "gpu", V)
    return jax.jit(functools.partial(sampling.sample, full=full, vocab_size=vocab_size, sampler=chosen))


def support(logits, params, ids=(1, 2), prompt_len=2, tries=400):
    """The ids that many seeds draw."""
    found = set()
    for seed in range(0, tries, 2):
        rows = [(list(ids), prompt_len, params_with(params, seed=seed + i)) for i in range(2)]
        found |= set(draw(np.stack([logits, logits]), rows).token.tolist())
    return found


def params_with(params, **changes):
    return SlotParams(**{name: getattr(params, name) for name in params.__struct_fields__} | changes)


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(size=V).astype(np.float32) * 2


def test_greedy_and_raw_logprob(logits):
    chosen = draw(logits[None], [([1], 1, SlotParams())], full=False)
    assert chosen.token[0] == logits.argmax()
    expected = logits.max() - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(chosen.logprob[0], expected, rtol=1e-5)
    assert chosen.finite[0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30])
def test_a_tiny_temperature_is_greedy(logits, temperature):
    chosen = draw(logits[None], [([1], 1, SlotParams(temperature=temperature, seed=3))], full=False)
    assert chosen.token[0] == logits.argmax() and chosen.finite[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_penalties_look_where_they_should(logits, lazy):
    """Repetition: prompt and output. Presence, frequency: output only. In this order, then the bias."""
    ids, prompt_len = [5, 5, 7, 9, 9, 11], 3
    params = SlotParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.7, logit_bias={7: 1.5, 20: -3.0}
    )
    x = logits.copy()
    for token in {5, 7, 9, 11}:
        x[token] = x[token] / 1.7 if x[token] > 0 else x[token] * 1.7
    for token, count in ((9, 2), (11, 1)):
        x[token] -= 0.25 * count + 0.5
    x[7] += 1.5
    x[20] -= 3.0
    for token in np.argsort(-x)[:4]:  # one after the other, by banning the ones before
        banned = [[int(t)] for t in np.argsort(-x)[: list(np.argsort(-x)).index(token)]]
        rows = [(ids, prompt_len, params_with(params, bad_words=banned))]
        assert draw(logits[None], rows, lazy=lazy).token[0] == token


def test_allowed_ids_and_neighbours(logits):
    rows = [([1], 1, SlotParams(allowed_token_ids=[7])), ([1], 1, SlotParams(allowed_token_ids=[V - 1, 3])),
            ([1], 1, SlotParams())]  # fmt: skip
    token = draw(np.stack([logits] * 3), rows).token
    assert token[0] == 7 and token[1] == max((V - 1, 3), key=lambda t: logits[t]) and token[2] == logits.argmax()


def test_bad_words_match_the_end_of_the_history(logits):
    best = int(logits.argmax())
    for ids, banned in (([4, 6], True), ([6], False), ([4], False), ([4, 6, 0], False), ([9, 4, 6], True)):
        chosen = draw(logits[None], [(ids, 1, SlotParams(bad_words=[[4, 6, best]]))])
        assert (chosen.token[0] != best) == banned, ids


def test_min_tokens_masks_stop_ids_until_then(logits):
    best = int(logits.argmax())
    for length, masked in ((3, True), (5, True), (6, False)):
        chosen = draw(logits[None], [(list(range(length)), 2, SlotParams(stop_ids=[best], min_length=6))])
        assert (chosen.token[0] != best) == masked, length


def test_a_mask_that_leaves_nothing_gives_way(logits):
    params = SlotParams(allowed_token_ids=[7], bad_words=[[7]], stop_ids=[7], min_length=20)
    assert draw(logits[None], [([1], 1, params)]).token[0] == 7


def load_one(params):
    load = SlotLoad(slot=0, token_ids=[1], prompt_len=1, num_computed=0, block_ids=[[]], params=params)
    return loaders()[0](empty_slots(SHAPE), pack_slot_load(load, SHAPE))


def test_extreme_settings_keep_at_least_one(logits):
    best = int(logits.argmax())
    for params in (SlotParams(temperature=2.0, min_p=1.0), SlotParams(temperature=1.0, top_p=1e-9)):
        assert support(logits, params, tries=8) == {best}


def test_the_distribution_is_the_softmax():
    """A chi-square over 4,000 seeds; top_k off draws from everything."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [1e-9] * (V - 4), np.float32))
    counts = np.zeros(V)
    rows = jnp.arange(4, dtype=jnp.int32)
    slots = load_one(SlotParams())
    for seed in range(1000):
        settings = slots.sampling.replace(
            temperature=jnp.ones(5), seed=jnp.arange(5, dtype=jnp.int32) + jnp.int32(5 * seed)
        )
        chosen = sampler(False, V, False)(
            jnp.tile(jnp.asarray(logits), (4, 1)), slots.replace(sampling=settings), empty_constrained(SHAPE), rows,
            jnp.full(4, 3, jnp.int32),
        )  # fmt: skip
        np.add.at(counts, np.asarray(chosen.token), 1)
    expected = 4000 * np.array([0.4, 0.3, 0.2, 0.1])
    assert counts[:4].sum() == 4000
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, p = 0.001


def test_a_seed_gives_the_same_token_in_any_row_and_company(logits):
    mine = ([1, 2], 1, SlotParams(temperature=1.0, seed=42))
    other = ([3], 1, SlotParams(temperature=1.5, seed=7, top_k=3))
    alone = draw(logits[None], [mine]).token[0]
    assert draw(np.stack([logits] * 2), [other, mine]).token[1] == alone
    assert draw(np.stack([logits] * 3), [other, other, mine]).token[2] == alone
    positions = {
        int(draw(logits[None], [([1] * n, 1, SlotParams(temperature=1.0, seed=42))]).token[0]) for n in range(1, 20)
    }
    assert len(positions) > 3, "and another one at another position"


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_flagged_and_stay_alone(logits, poison):
    bad = logits.copy()
    bad[3] = poison
    chosen = draw(np.stack([bad, logits]), [([1], 1, SlotParams(temperature=1.0)), ([1], 1, SlotParams())])
    assert not chosen.finite[0] and chosen.finite[1]
    assert chosen.token[1] == logits.argmax() and 0 <= chosen.token[0] < V


def test_ids_without_a_string_are_never_drawn(logits):
    high = logits.copy()
    high[V - 3 :] = 50
    rows = [([1], 1, SlotParams()), ([1], 1, SlotParams(temperature=5.0, logit_bias={V - 1: 100.0}))]
    token = draw(np.stack([high, high]), rows, vocab_size=V - 3).token
    assert token[0] == logits[: V - 3].argmax() and token[1] < V - 3


def test_top_logits_and_ranks(logits):
    tied = logits.copy()
    tied[[2, 8]] = logits.max() + 1
    top = sampling.top_logits(
        jnp.asarray(np.stack([logits, tied])), jnp.array([int(np.argsort(-logits)[4]), 8], jnp.int32), 5
    )
    assert np.asarray(top.rank).tolist() == [5, 1]
    assert np.asarray(top.ids)[0].tolist() == np.argsort(-logits)[:5].tolist()
    np.testing.assert_allclose(
        np.asarray(top.logprobs)[0], np.sort(logits)[::-1][:5] - np.log(np.exp(logits).sum()), rtol=1e-5
    )


def test_a_top_p_below_float32_keeps_the_likeliest(logits):
    assert support(logits, SlotParams(temperature=1.0, top_p=1e-40), tries=4) == {int(logits.argmax())}
