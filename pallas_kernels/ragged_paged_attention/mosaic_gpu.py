"""Ragged paged attention for Hopper in Mosaic GPU: decode rows, prefill rows, or both in one call.

Two kernels share a step, decode (mosaic_decode.py) and prefill (mosaic_prefill.py); a third
merges decode rows that were cut (mosaic_combine.py). They only read the cache; the new keys and
values are written before, in place. What `supports` refuses is the reference's.
"""

import jax
import jax.numpy as jnp

from octavo.pallas_kernels import mosaic, mosaic_fragments
from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan, Tiling
from octavo.pallas_kernels.ragged_paged_attention.kv_write import (
    FP8,
    as_stored,
    saturated,
    stacked_scales,
    stored_dtype,
    write,
)
from octavo.pallas_kernels.ragged_paged_attention.mosaic_combine import combine
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode import decode, halves
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode_fp8 import HALVES, decode_fp8
from octavo.pallas_kernels.ragged_paged_attention.mosaic_prefill import prefill
from octavo.pallas_kernels.ragged_paged_attention.mosaic_tiles import ROWS, Shape
from octavo.pallas_kernels.ragged_paged_attention.parameters import Parameters
from octavo.pallas_kernels.ragged_paged_attention.worklist import PIECE_STEP, PREFILL_TILE, Workers

BLOCK_SIZES = (16, 32, 64, 128)
HEAD_SIZES = (64, 96, 128, 256)
DTYPES = ("bfloat16", "float16")


def supports(
    *, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: str, kv_dtype: str
) -> str | None:
    """Why these shapes need another implementation, or None where they do not."""
    if dtype not in DTYPES:
        return f"dtype must be one of {DTYPES}, got {dtype}"
    if kv_dtype not in (dtype, FP8.name):
        return f"the cache's dtype must be {dtype} or {FP8.name}, got {kv_dtype}"
    if head_size not in HEAD_SIZES:
        return f"head size must be one of {HEAD_SIZES}, got {head_size}"
    if block_size not in BLOCK_SIZES:
        return f"block size must be one of {BLOCK_SIZES}, got {block_size}"
    if num_heads % num_kv_heads or num_heads // num_kv_heads > 16:
        return f"1 to 16 query heads per KV head, got {num_heads} / {num_kv_heads}"
    return None


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
    blocks: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes k and v into the cache, then attends; arguments and results as `reference.attend`.

    Args:
      blocks: of the persistent grid; by default one for each multiprocessor that the plan's lists are for.
      interpret: run in Pallas' interpreter, on any platform.

    Raises:
      NotImplementedError: shapes or options that these kernels lack.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[2:4]
    narrow = stored_dtype(cache) == FP8
    work, num_real, workers = plan.decode_work, plan.num_real, plan.tiling.workers
    reason = supports(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size,
        dtype=q.dtype.name, kv_dtype=stored_dtype(cache).name,
    )  # fmt: skip
    if not narrow and (k_scale is not None or v_scale is not None):
        reason = f"key and value scales are for a cache of {FP8.name}, got {cache.dtype.name}"
    if plan.prefill_work is not None and num_tokens % 8:
        reason = f"a step with prefill rows needs a multiple of 8 tokens, got {num_tokens}"
    if work is None or num_real is None or workers is None:
        reason = "the plan has no work list: prepare it with Tiling(workers=...)"
    if reason is not None or work is None or num_real is None or workers is None:
        raise NotImplementedError(f"mosaic_gpu attention: {reason}")
    blocks = workers.lists // lists_of_a_block(head_size, narrow) if blocks is None else blocks
    if k is not None and v is not None:
        cache = write(cache, k, v, plan, k_scale, v_scale)
    shape = Shape(
        num_heads, num_kv_heads, head_size, block_size, scale, causal, window, soft_cap, blocks, interpret, narrow,
        plan.tiling.parameters,
    )  # fmt: skip
    rows, given = as_stored(cache).reshape(-1, head_size), q
    scales = stacked_scales(k_scale, v_scale, num_kv_heads)
    if narrow:
        q = saturated(q, jnp.dtype(jnp.float16))  # e4m3 is exact in float16, and one instruction away
    per_head = None if sinks is None else sinks.astype(jnp.float32) * mosaic.LOG2E
    around = None if per_head is None else jnp.pad(per_head, (8, ROWS))
    result = jax.ShapeDtypeStruct((num_tokens * num_heads, head_size), given.dtype)
    step = (plan.block_tables, work, num_real, around)
    if narrow:
        most = min(num_tokens, plan.block_tables.shape[0])  # decode rows come first, a token each
        first = q[:most] if interpret else mosaic_fragments.pair_order(q[:most])
        flat = _padded(first.reshape(-1, head_size), shape.q_rows)
        out, part, lse = decode_fp8(flat, rows.reshape(cache.shape[0] * 2, -1, head_size), *step, scales, shape, result)
    else:
        out, part, lse = decode(_padded(q.reshape(-1, head_size), shape.q_rows), rows, *step, shape, result)
    combines = work.num_slots > 0
    if combines or plan.prefill_work is not None:
        ref = jax.new_ref(out.reshape(q.shape), memory_space=mosaic.GMEM)
        if combines:
            combine(ref, part, lse, work, shape)
        if plan.prefill_work is not None:
            # The copy engine fills what lies beyond the end with zeros; the interpreter refuses to read there.
            wide = jnp.pad(q, ((0, PREFILL_TILE), (0, 0), (0, 0))) if interpret else q
            prefill(ref, wide, rows, plan.block_tables, plan.prefill_work, per_head, scales, shape)
        out = jax.freeze(ref)
    return out.reshape(q.shape), cache


def tiling_for(core_count: int, parameters: Parameters, *, num_kv_heads: int, head_size: int, narrow: bool) -> Tiling:
    """How to cut the work on a device of so many multiprocessors; `narrow`: the cache is fp8."""
    lists = lists_of_a_block(head_size, narrow) * core_count * parameters.blocks_per_core
    step = max(PIECE_STEP, parameters.decode_tile_for(head_size, narrow))
    workers = Workers(lists, num_kv_heads, parameters.longest, parameters.shortest, step)
    return Tiling(chunk=128, workers=workers, parameters=parameters)


def lists_of_a_block(head_size: int, narrow: bool) -> int:
    """Lists of decode work that one block of the grid goes through side by side; `narrow`: the cache is fp8."""
    return HALVES if narrow else halves(head_size)


def _padded(q: jax.Array, fetched: int) -> jax.Array:
    """q with rows added where the last item's fetch, which begins at a multiple of 8, would pass the end."""
    if fetched == 8 and q.shape[0] % 8 == 0:
        return q
    return jnp.pad(q, ((0, fetched + -q.shape[0] % 8), (0, 0)))
