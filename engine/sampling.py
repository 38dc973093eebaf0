"""From logits to tokens, inside the step: what each row asks for, and what changes its logits. The op draws.

In this order of effect: penalties, logit_bias, allowed_token_ids, bad_words, min_tokens,
temperature, top_k, top_p, min_p, noise. Log-probabilities are raw: of the model's own
logits, before any of these. A row's token depends on its logits, its settings and
(seed, position) only, never on the row's place or its neighbours.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from octavo.engine.state import NOTHING, Constrained, SamplingState, Slots, bit_mask
from octavo.pallas_kernels.sample import Cuts, Drawn, Sampler, Settings

NEG_INF = float("-inf")


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
    sampler: Sampler,
) -> Drawn:
    """Draws one token a row.

    Args:
      logits: f32[R, V].
      slots, constrained: the device state that holds each row's settings and history.
      slot: i32[R].
      position: i32[R], where the new token will stand in its sequence.
      full: whether a row may use what changes logits; else, and unless the sampler makes no difference, no row may
        use more than temperature and seed (static).
      vocab_size: ids from here up have no string and are never drawn (static).
      sampler: draws (static).
    """
    state = slots.sampling
    cuts = None
    if full or sampler.cuts_for_all:
        cuts = Cuts(top_k=state.top_k[slot], top_p=state.top_p[slot], min_p=state.min_p[slot])
    settings = Settings(temperature=state.temperature[slot], seed=state.seed[slot], position=position, cuts=cuts)
    adjusted = _adjust(logits, slots, constrained, slot, position, vocab_size) if full else None
    return sampler.sample(logits, settings, drawable=vocab_size, adjusted=adjusted)


def _adjust(
    logits: jax.Array, slots: Slots, constrained: Constrained, slot: jax.Array, position: jax.Array, vocab_size: int
) -> jax.Array:
    """Everything that changes logits."""
    settings = jax.tree.map(lambda x: x[slot], slots.sampling)
    x = logits
    if vocab_size < logits.shape[1]:
        x = jnp.where(_vocabulary(x) < vocab_size, x, NEG_INF)
    x = _penalise(x, settings, constrained)
    x = _add_bias(x, settings)
    x = _keep_some(x, jnp.where(bit_mask(constrained.allowed[settings.constrained_row], x.shape[1]), x, NEG_INF))
    x = _keep_some(x, _mask_bad_words(x, settings, slots.tokens, slot, position))
    return _keep_some(x, _mask_stop_ids(x, settings, position))


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
