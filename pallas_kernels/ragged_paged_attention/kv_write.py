"""New keys and values into their blocks, quantised where the cache is narrower. Attends to nothing.

An fp8 cache holds e4m3 numbers. It may be an array of that type, or of its bytes as uint8, which the
engine takes: XLA for CPU copies the whole of an fp8 array for each scatter into it. On a GPU one is
a view of the other.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan

FP8 = jnp.dtype(jnp.float8_e4m3fn)

type Scale = Float[Array, " K"] | Float[Array, ""] | float | None


def write(
    cache: Shaped[Array, "blocks 2 K S H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    plan: AttentionPlan,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Shaped[Array, "blocks 2 K S H"]:
    """The cache with the new keys and values in it, in place where it is donated.

    A scatter of rows of H numbers to places said to be unique: XLA's form for the five axes is five
    times slower on a GPU. They are not unique in block 0, where padding goes and anything may stand.

    Args:
      cache: numbers beyond what its type can hold become its largest.
      k, v: of this step.
      plan: from `prepare`.
      k_scale, v_scale: what stored keys and values are multiplied with, a number or one per head; None is 1.
    """
    _, _, num_kv_heads, block_size, head_size = cache.shape
    half = jnp.arange(2, dtype=jnp.int32)[None, :, None]
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, None, :]
    block, offset = plan.write_block[:, None, None], plan.write_offset[:, None, None]
    row = ((block * 2 + half) * num_kv_heads + head) * block_size + offset  # [T, 2, K]
    new = jnp.stack([k, v], axis=1)
    scales = stacked_scales(k_scale, v_scale, num_kv_heads)
    if scales is not None:
        new = new.astype(jnp.float32) / scales[None, :, :, None]
    rows = _bits(cache).reshape(-1, head_size)
    rows = rows.at[row].set(_bits(saturated(new, stored_dtype(cache))), unique_indices=True, mode="promise_in_bounds")
    rows = rows.reshape(cache.shape)
    return jax.lax.bitcast_convert_type(rows, cache.dtype)


def stored_dtype(cache: jax.Array) -> jnp.dtype:
    """The type of the numbers in a cache."""
    return FP8 if cache.dtype == jnp.uint8 else cache.dtype


def as_stored(values: jax.Array) -> jax.Array:
    """The numbers of a cache, or of a part of one."""
    return jax.lax.bitcast_convert_type(values, stored_dtype(values))


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint8) if values.dtype == FP8 else values


def stacked_scales(k_scale: Scale, v_scale: Scale, num_kv_heads: int) -> Float[Array, "2 K"] | None:
    """Both scales per head in float32; None where there is neither."""
    if k_scale is None and v_scale is None:
        return None
    both = (jnp.asarray(1.0 if scale is None else scale, jnp.float32) for scale in (k_scale, v_scale))
    return jnp.stack([jnp.broadcast_to(scale, (num_kv_heads,)) for scale in both])


def saturated(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """In the narrower type, beyond its range the largest: a plain conversion to e4m3 would give NaN there."""
    limit = float(jnp.finfo(dtype).max)
    if limit < jnp.finfo(values.dtype).max:
        values = jnp.clip(values.astype(jnp.float32), -limit, limit)
    return values.astype(dtype)
