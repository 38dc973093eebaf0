"""Thresholds and draws inside a block on Hopper, no sort: bisections over the bits of floats.

`bisect` works on what a block holds in registers, `search_row` reads a whole row of logits each time, for the rare
row whose kept tokens are too many for a list; `draw_from` adds noise to a part of a row, or to all of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic, mosaic_threads
from octavo.pallas_kernels.sample import noise
from octavo.pallas_kernels.sample.mosaic_passes import NEG_INF, Span

SIGN = 1 << 31
FARTHEST = 0x7F800000  # the bits of infinity: no distance is larger
WAYS = 8  # that a pass of `search_row` cuts an interval into


def ordered(x: jax.Array) -> jax.Array:
    """u32 in the order of f32; -0 comes before 0."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits ^ jnp.where(bits >= jnp.uint32(SIGN), jnp.uint32(0xFFFFFFFF), jnp.uint32(SIGN))


def unordered(order: jax.Array) -> jax.Array:
    """f32[], the inverse of `ordered` for u32[]; -inf for 0."""
    flip = jnp.where(order >= jnp.uint32(SIGN), jnp.uint32(SIGN), jnp.uint32(0xFFFFFFFF))
    return jnp.where(order == 0, NEG_INF, float_of(order ^ flip))


def float_of(bits: jax.Array) -> jax.Array:
    """f32[] from 32 bits. Through a vector: what Mosaic makes of a scalar here is none."""
    return lax.bitcast_convert_type(mosaic.lanes_full(mosaic.WARPGROUP, 1, bits, bits.dtype), jnp.float32).max()


def bisect(enough: Callable[[jax.Array], jax.Array], wished: jax.Array) -> jax.Array:
    """The largest u32 for which monotone `enough` holds; 0 where it holds for none, or nothing is wished for."""

    def step(i: jax.Array, low: jax.Array) -> jax.Array:
        higher = low | (jnp.uint32(SIGN) >> i.astype(jnp.uint32))
        return jnp.where(enough(higher), higher, low)

    return lax.fori_loop(0, jnp.where(wished, 32, 0), step, jnp.uint32(0))


def search_row(row: Any, best: jax.Array, heat: jax.Array, top_k: jax.Array, top_p: jax.Array, span: Span) -> jax.Array:
    """f32[]: the lowest (logit - best) / heat that top_k, and top_p of what is left, keep.

    Args:
      row: reference to [V].
      best: f32[], the largest drawable logit.
      heat: f32[], the temperature.
      top_k: i32[], 0 is off.
      top_p: f32[], 1 is off.
      span: how to walk, in one part.

    It is the distance from the best whose bits are searched: a float that is not negative orders like an integer.
    """
    rate = jnp.minimum(mosaic.LOG2E / heat, 1e37)

    def measure(limits: list[jax.Array], weighted: jax.Array) -> list[jax.Array]:
        """The weight of all that lies no farther than each limit."""
        unit = jnp.where(weighted, rate, 0.0)  # 0 makes every weight 1

        def step(sums: Any, values: list[jax.Array], _: Any, real: Any) -> Any:
            (value,), ((_, drawable),) = values, real
            far = best - value
            # Infinitely far is what never counts, nor does what is no number.
            weight = jnp.where(drawable & (far < jnp.inf), jnp.exp2(-far * unit), 0.0)
            bits = lax.bitcast_convert_type(far, jnp.int32)
            return [s + jnp.where(bits <= t, weight, 0.0) for s, t in zip(sums, limits, strict=True)]

        sums = span.walk(row, jnp.int32(0), step, [span.full(0.0) for _ in limits], slowly=True)
        return [jnp.sum(s) for s in sums]

    def phase(number: jax.Array, farthest: jax.Array) -> jax.Array:
        weighted = number == 1
        wished = jnp.where(weighted, top_p < 1, top_k > 0)
        total = lax.fori_loop(
            0, jnp.where(weighted & wished, 1, 0), lambda *_: measure([farthest], weighted)[0], jnp.float32(0)
        )
        goal = jnp.where(weighted, jnp.maximum(total * top_p, 1.0), top_k.astype(jnp.float32))

        def narrow(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends  # not enough, and enough
            stride = (high - low + WAYS - 1) >> 3
            limits = [jnp.minimum(low + stride * i, high - 1) for i in range(1, WAYS)]
            for limit, weight in zip(limits, measure(limits, weighted), strict=True):
                low = jnp.where(weight < goal, jnp.maximum(low, limit), low)
                high = jnp.where(weight >= goal, jnp.minimum(high, limit), high)
            return low, high

        # 2 ** 31 values, an eighth each time.
        _, found = lax.fori_loop(0, jnp.where(wished, 11, 0), narrow, (jnp.int32(-1), farthest))
        return found

    farthest = lax.fori_loop(0, 2, phase, jnp.int32(FARTHEST))
    return -float_of(farthest) / heat


def gumbel(keys: tuple[jax.Array, jax.Array], counters: jax.Array, width: int, interpret: bool) -> jax.Array:
    """f32[n], the noise of i32[n] in lanes of `width`; of counters the bits count."""
    return noise.from_bits(mosaic_threads.mixed(noise.hashed, *keys, counters.astype(jnp.uint32), width, interpret))


def draw_from(
    row: Any, part: jax.Array, low: jax.Array, best: jax.Array, heat: jax.Array, keys: tuple[jax.Array, jax.Array],
    span: Span, interpret: bool,
) -> jax.Array:  # fmt: skip
    """i32[]: the id of the largest (logit - best) / heat + noise among drawable logits whose first term is >= low.

    Args:
      row: reference to [V].
      part: i32[].
      low, best, heat: f32[].
      keys: of the noise.
      span: how to walk.
    """

    def step(carry: Any, values: list[jax.Array], starts: list[jax.Array], real: Any) -> Any:
        (highest, at), (value,), (start,), ((_, drawable),) = carry, values, starts, real
        # Noise first: the logits arrive meanwhile.
        noisy = gumbel(keys, span.ids(start), span.width, interpret)
        hot = (value - best) / heat
        score = jnp.where(drawable & (hot >= low), hot + noisy, NEG_INF)
        better = score > highest
        highest, at = jnp.where(better, score, highest), jnp.where(better, start, at)
        return highest, at

    highest, at = span.walk(row, part, step, (span.full(NEG_INF), span.full(0, jnp.int32)), slowly=True)
    return jnp.min(jnp.where(highest == highest.max(), span.ids(at), span.size))
