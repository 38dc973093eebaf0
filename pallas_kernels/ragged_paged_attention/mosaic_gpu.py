"""Ragged paged attention for Hopper in Mosaic GPU: decode rows, prefill rows, or both in one call.

`supports` says which shapes; for the others `attend` raises NotImplementedError and the
reference runs. Two kernels share the step: decode (mosaic_decode.py) and prefill
(mosaic_prefill.py). Both only read the cache; the new keys and values are written before.
"""

import functools

import jax
import jax.numpy as jnp

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan
from octavo.pallas_kernels.ragged_paged_attention.mosaic_combine import combine
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode import ROWS, Shape, decode

BLOCK_SIZES = (16, 32, 64)
HEAD_SIZES = (64, 128)


def attend(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    interpret: bool = False,
    blocks: int = 132,
) -> tuple[jax.Array, jax.Array]:
    num_heads, head_size = q.shape[1:]
    _, _, num_kv_heads, block_size, _ = cache.shape
    shape = Shape(num_heads, num_kv_heads, head_size, block_size, scale, causal, window, soft_cap, blocks, interpret)
    if k is not None and v is not None:
        new = jnp.stack([k, v], axis=1).astype(cache.dtype)
        cache = cache.at[plan.write_block, :, :, plan.write_offset].set(new)
    rows = cache.reshape(-1, head_size)
    flat = q.reshape(-1, head_size)
    out, part, lse = decode(flat, rows, plan.block_tables, plan.work, None, shape)
    if plan.work.num_slots:
        ref = jax.new_ref(out, memory_space=mosaic.plgpu.GMEM)
        combine(ref, part, lse, plan.work, shape)
        out = jax.freeze(ref)
    return out.reshape(q.shape), cache
