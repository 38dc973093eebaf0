"""The truth of sampling in plain jnp, and the fallback where no kernel fits. Sorts nothing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from octavo.pallas_kernels.sample.api import Cuts, Drawn, Settings

NEG_INF = float("-inf")


def sample(
    logits: Float[Array, "R V"],
    settings: Settings,
    *,
    drawable: int,
    adjusted: Float[Array, "R V"] | None = None,
    lazy: bool = False,
) -> Drawn:
    """Draws one token a row; arguments and results as `api.Sample`.

    Args:
      lazy: skip work that no row asks for, at the price of a branch (static; pays on CPU).
    """
    logits = logits.astype(jnp.float32)
    x = logits if adjusted is None else adjusted
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    if drawable < x.shape[1]:
        x = jnp.where(ids < drawable, x, NEG_INF)
    greedy = settings.temperature == 0

    def draw(x: jax.Array) -> jax.Array:
        hot = (x - x.max(axis=-1, keepdims=True)) / jnp.where(greedy, 1.0, settings.temperature)[:, None]
        if settings.cuts is not None:
            hot = truncate(hot, settings.cuts, lazy)
        return jnp.where(greedy[:, None], x, hot + _gumbel(settings.seed, settings.position, x.shape[1]))

    x = jax.lax.cond(jnp.all(greedy), lambda x: x, draw, x) if lazy else draw(x)
    token = jnp.argmax(x, axis=-1).astype(jnp.int32)
    return Drawn(token=token, logprob=logprob_of(logits, token), finite=jnp.all(jnp.isfinite(logits), axis=-1))


def logprob_of(logits: Float[Array, "G V"], token: Int[Array, " G"]) -> Float[Array, " G"]:
    """The raw log-probability of `token`."""
    at = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return at - jax.nn.logsumexp(logits, axis=-1)


def truncate(hot: Float[Array, "R V"], cuts: Cuts, lazy: bool = False) -> Float[Array, "R V"]:
    """top_k, then top_p of what is left, then min_p; ties at a threshold all stay, the rest becomes -inf.

    `hot`: after temperature, largest entry 0.
    """

    def top_k(hot: jax.Array) -> jax.Array:
        k = jnp.where(cuts.top_k > 0, cuts.top_k, hot.shape[1])[:, None]
        return _at_least(hot, lambda keep: jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32) >= k)

    def top_p(hot: jax.Array) -> jax.Array:
        weight = jnp.exp(hot)
        # The largest weight is 1: even a top_p that float32 takes for 0 keeps one token.
        wanted = jnp.maximum(cuts.top_p[:, None] * weight.sum(axis=-1, keepdims=True), 1.0)
        kept = _at_least(hot, lambda keep: jnp.sum(jnp.where(keep, weight, 0.0), axis=-1, keepdims=True) >= wanted)
        return jnp.where(cuts.top_p[:, None] < 1, kept, hot)

    if lazy:
        hot = jax.lax.cond(jnp.any(cuts.top_k > 0), top_k, lambda x: x, hot)
        hot = jax.lax.cond(jnp.any(cuts.top_p < 1), top_p, lambda x: x, hot)
    else:
        hot = top_p(top_k(hot))
    floor = jnp.log(cuts.min_p)[:, None]  # -inf for 0, which keeps all
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
