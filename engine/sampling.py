"""From logits to tokens: pure functions over [R, V], all inside the step.

In this order of effect: penalties, logit_bias, allowed_token_ids, bad_words, min_tokens,
temperature, top_k, top_p, min_p, noise. Log-probabilities are raw: of the model's own
logits, before any of these. A row's token depends on its logits, its settings and
(seed, position) only, never on the row's place or its neighbours.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from octavo.engine.state import NOTHING, Constrained, SamplingState, Slots, bit_mask

NEG_INF = float("-inf")


@flax.struct.dataclass
class Chosen:
    """What sampling says of each row.

    Attributes:
      token: i32[R].
      logprob: f32[R], raw.
      finite: bool[R], False where the logits hold a NaN or an infinity.
    """

    token: jax.Array
    logprob: jax.Array
    finite: jax.Array


@flax.struct.dataclass
class TopLogits:
    """Raw log-probabilities of the likeliest tokens, and the rank (from 1) of a given one."""

    rank: jax.Array  # i32[G]
    ids: jax.Array  # i32[G, M]
    logprobs: jax.Array  # f32[G, M]


def sample(
    logits: Float[Array, "R V"],
    slots: Slots,
    constrained: Constrained,
    slot: Int[Array, " R"],
    position: Int[Array, " R"],
    *,
    full: bool,
    vocab_size: int,
    lazy: bool,
) -> Chosen:
    """Draws one token a row.

    Args:
      logits: f32[R, V].
      slots, constrained: the device state that holds each row's settings and history.
      slot: i32[R].
      position: i32[R], where the new token will stand in its sequence.
      full: whether any row may use more than temperature and seed (static).
      vocab_size: ids from here up have no string and are never drawn (static).
      lazy: skip work that no row asks for, at the price of a branch (static; pays on CPU).
    """
    settings = jax.tree.map(lambda x: x[slot], slots.sampling) if full else slots.sampling
    temperature = slots.sampling.temperature[slot]
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    x = logits
    if vocab_size < logits.shape[1]:
        x = jnp.where(_vocabulary(x) < vocab_size, x, NEG_INF)
    if full:
        x = _penalise(x, settings, constrained)
        x = _add_bias(x, settings)
        x = _keep_some(x, jnp.where(bit_mask(constrained.allowed[settings.constrained_row], x.shape[1]), x, NEG_INF))
        x = _keep_some(x, _mask_bad_words(x, settings, slots.tokens, slot, position))
        x = _keep_some(x, _mask_stop_ids(x, settings, position))
    greedy = temperature == 0

    def draw(x: jax.Array) -> jax.Array:
        hot = (x - x.max(axis=-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)[:, None]
        if full:
            hot = _truncate(hot, settings, lazy)
        noise = _gumbel(slots.sampling.seed[slot], position, x.shape[1])
        return jnp.where(greedy[:, None], x, hot + noise)

    x = jax.lax.cond(jnp.all(greedy), lambda x: x, draw, x) if lazy else draw(x)
    token = jnp.argmax(x, axis=-1).astype(jnp.int32)
    return Chosen(token=token, logprob=logprob_of(logits, token), finite=finite)


def logprob_of(logits: Float[Array, "G V"], token: Int[Array, " G"]) -> Float[Array, " G"]:
    """The raw log-probability of `token`."""
    at = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return at - jax.nn.logsumexp(logits, axis=-1)


def top_logits(logits: Float[Array, "G V"], token: Int[Array, " G"], count: int) -> TopLogits:
    """The `count` likeliest and the rank of `token`; ties rank alike."""
    at = jnp.take_along_axis(logits, token[:, None], axis=-1)
    values, ids = jax.lax.top_k(logits, count)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return TopLogits(
        rank=1 + jnp.sum(logits > at, axis=-1, dtype=jnp.int32), ids=ids.astype(jnp.int32), logprobs=values - total
    )


def count_tokens(
    constrained: Constrained, row: Int[Array, " R"], token: Int[Array, " R"], samples: Bool[Array, " R"]
) -> Constrained:
    """Adds the tokens that this step drew to the penalties' counts."""
    row = jnp.where(samples, row, constrained.counts.shape[0])
    return dataclasses.replace(constrained, counts=constrained.counts.at[row, token].add(1, mode="drop"))


def _vocabulary(x: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _keep_some(before: jax.Array, after: jax.Array) -> jax.Array:
    """A mask that would leave a row nothing to draw does not apply to it."""
    empty = after.max(axis=-1, keepdims=True) == NEG_INF
    return jnp.where(empty, before, after)


def _penalise(x: jax.Array, settings: SamplingState, constrained: Constrained) -> jax.Array:
    """Presence and frequency look at the output, repetition at prompt and output.

    Rows without a constrained row read the scratch row's counts, so their settings decide.
    """
    counts = constrained.counts[settings.constrained_row]
    seen = bit_mask(constrained.prompt_seen[settings.constrained_row], x.shape[1]) | (counts > 0)
    repetition = jnp.where(seen, settings.repetition_penalty[:, None], 1.0)
    x = jnp.where(x > 0, x / repetition, x * repetition)
    x = x - settings.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return x - jnp.where(counts > 0, settings.presence_penalty[:, None], 0.0)


def _add_bias(x: jax.Array, settings: SamplingState) -> jax.Array:
    return _scatter(x, settings.bias_ids, settings.bias_values, "add")


def _mask_bad_words(
    x: jax.Array, settings: SamplingState, tokens: jax.Array, slot: jax.Array, position: jax.Array
) -> jax.Array:
    """Bans a bad word's last token where the tokens before it are its other tokens."""
    words = settings.bad_words  # [R, W, n], right-aligned
    back = jnp.arange(words.shape[2] - 1, 0, -1, dtype=jnp.int32)[None, :]
    at = position[:, None] - back  # the last n - 1 positions
    history = tokens[slot[:, None], jnp.maximum(at, 0)]
    history = jnp.where(at >= 0, history, NOTHING - 1)[:, None, :]
    prefix = words[..., :-1]
    hit = jnp.all((prefix == NOTHING) | (prefix == history), axis=-1)
    return _scatter(x, jnp.where(hit, words[..., -1], NOTHING), NEG_INF, "min")


def _mask_stop_ids(x: jax.Array, settings: SamplingState, position: jax.Array) -> jax.Array:
    early = (position < settings.min_length)[:, None]
    return _scatter(x, jnp.where(early, settings.stop_ids, NOTHING), NEG_INF, "min")


def _scatter(x: jax.Array, ids: jax.Array, values: jax.Array | float, how: str) -> jax.Array:
    """Applies values at ids i32[R, n]; NOTHING is dropped (a negative index would wrap, so it moves past the end)."""
    row = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    at = x.at[row, jnp.where(ids == NOTHING, x.shape[1], ids)]
    return at.add(values, mode="drop") if how == "add" else at.min(values, mode="drop")


def _truncate(hot: jax.Array, settings: SamplingState, lazy: bool) -> jax.Array:
    """top_k, then top_p of what is left, then min_p; ties at a threshold all stay.

    `hot`: f32[R, V], after temperature, largest entry 0.
    """

    def top_k(hot: jax.Array) -> jax.Array:
        k = jnp.where(settings.top_k > 0, settings.top_k, hot.shape[1])[:, None]
        return _at_least(hot, lambda keep: jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32) >= k)

    def top_p(hot: jax.Array) -> jax.Array:
        weight = jnp.exp(hot)
        # The largest weight is 1: even a top_p that float32 takes for 0 keeps one token.
        wanted = jnp.maximum(settings.top_p[:, None] * weight.sum(axis=-1, keepdims=True), 1.0)
        kept = _at_least(hot, lambda keep: jnp.sum(jnp.where(keep, weight, 0.0), axis=-1, keepdims=True) >= wanted)
        return jnp.where(settings.top_p[:, None] < 1, kept, hot)

    if lazy:
        hot = jax.lax.cond(jnp.any(settings.top_k > 0), top_k, lambda x: x, hot)
        hot = jax.lax.cond(jnp.any(settings.top_p < 1), top_p, lambda x: x, hot)
    else:
        hot = top_p(top_k(hot))
    floor = jnp.log(settings.min_p)[:, None]  # -inf for 0, which keeps all
    return jnp.where(hot >= floor, hot, NEG_INF)


def _at_least(x: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Keeps the entries >= t for the largest t whose kept entries are `enough`, else -inf.

    A bisection over the 32 bits of an order-preserving map from floats to integers,
    so exact, and no sort: `enough(keep: bool[R, V]) -> bool[R, 1]` is monotone.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits & sign != 0, ~bits, bits | sign)

    def step(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (sign >> i.astype(jnp.uint32))
        return jnp.where(enough(order >= higher), higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, step, jnp.zeros((x.shape[0], 1), jnp.uint32))
    return jnp.where(order >= threshold, x, NEG_INF)


def _gumbel(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """f32[R, V] of noise that is a function of (seed, position, id): jax's counter-based Threefry."""

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(jax.lax.bitcast_convert_type(seed, jnp.uint32)), position)
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(row)(seed, position)
