"""Ragged paged attention for Hopper in Mosaic GPU: decode rows, prefill rows, or both in one call.

Two kernels share a step, decode (mosaic_decode.py) and prefill (mosaic_prefill.py); a third
merges decode rows that were cut (mosaic_combine.py). They only read the cache; the new keys and
values are written before, in place. What `supports` refuses is the reference's.
"""

import jax
import jax.numpy as jnp

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan
from octavo.pallas_kernels.ragged_paged_attention.mosaic_combine import combine
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode import ROWS, Shape, decode
from octavo.pallas_kernels.ragged_paged_attention.mosaic_prefill import prefill
from octavo.pallas_kernels.ragged_paged_attention.worklist import PREFILL_TILE

BLOCK_SIZES = (16, 32, 64)
HEAD_SIZES = (64, 128)
DTYPES = ("bfloat16", "float16")


def supports(
    *, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: str, kv_dtype: str
) -> str | None:
    """Why these shapes need another implementation, or None where they do not."""
    if dtype not in DTYPES or kv_dtype != dtype:
        return f"dtype must be one of {DTYPES} for queries and cache, got {dtype} and {kv_dtype}"
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
      blocks: of the persistent grid; by default half of the plan's lists, one a multiprocessor.
      interpret: run in Pallas' interpreter, on any platform.

    Raises:
      NotImplementedError: shapes or options that these kernels lack.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = cache.shape[2:4]
    reason = supports(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, block_size=block_size,
        dtype=q.dtype.name, kv_dtype=cache.dtype.name,
    )  # fmt: skip
    if k_scale is not None or v_scale is not None:
        reason = "key and value scales"
    if sinks is not None and num_heads % 8:
        reason = f"sinks need a multiple of 8 heads, got {num_heads}"
    if plan.prefill_work is not None and num_tokens % 8:
        reason = f"a step with prefill rows needs a multiple of 8 tokens, got {num_tokens}"
    work, num_real, workers = plan.decode_work, plan.num_real, plan.tiling.workers
    if work is None or num_real is None or workers is None:
        reason = "the plan has no work list: prepare it with Tiling(workers=...)"
    if reason is not None or work is None or num_real is None or workers is None:
        raise NotImplementedError(f"mosaic_gpu attention: {reason}")
    blocks = workers.lists // 2 if blocks is None else blocks
    if k is not None and v is not None:
        cache = write(cache, k, v, plan)
    shape = Shape(
        num_heads, num_kv_heads, head_size, block_size, scale, causal, window, soft_cap, blocks, interpret
    )  # fmt: skip
    rows = cache.reshape(-1, head_size)
    flat = _padded(q.reshape(-1, head_size), shape.q_rows)
    per_head = None if sinks is None else sinks.astype(jnp.float32) * mosaic.LOG2E
    out, part, lse = decode(
        flat, rows, plan.block_tables, work, num_real, _sink_rows(per_head, shape), shape, num_tokens
    )
    combines = work.num_slots > 0
    if combines or plan.prefill_work is not None:
        ref = jax.new_ref(out.reshape(q.shape), memory_space=mosaic.GMEM)
        if combines:
            combine(ref, part, lse, work, shape)
        if plan.prefill_work is not None:
            # The copy engine fills what lies beyond the end with zeros; the interpreter refuses to read there.
            wide = jnp.pad(q, ((0, PREFILL_TILE), (0, 0), (0, 0))) if interpret else q
            prefill(ref, wide, rows, plan.block_tables, plan.prefill_work, per_head, shape)
        out = jax.freeze(ref)
    return out.reshape(q.shape), cache


def write(cache: jax.Array, k: jax.Array, v: jax.Array, plan: AttentionPlan) -> jax.Array:
    """The cache with the new keys and values in it, in place where it is donated.

    A scatter of rows of H numbers to places said to be unique: XLA's form for the five axes is five
    times slower. They are not unique in block 0, where padding goes and anything may stand.
    """
    _, _, num_kv_heads, block_size, head_size = cache.shape
    half = jnp.arange(2, dtype=jnp.int32)[None, :, None]
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, None, :]
    block, offset = plan.write_block[:, None, None], plan.write_offset[:, None, None]
    row = ((block * 2 + half) * num_kv_heads + head) * block_size + offset  # [T, 2, K]
    new = jnp.stack([k, v], axis=1).astype(cache.dtype)
    rows = cache.reshape(-1, head_size).at[row].set(new, unique_indices=True, mode="promise_in_bounds")
    return rows.reshape(cache.shape)


def _padded(q: jax.Array, fetched: int) -> jax.Array:
    """q with rows added where the last item's fetch, which begins at a multiple of 8, would pass the end."""
    if fetched == 8 and q.shape[0] % 8 == 0:
        return q
    return jnp.pad(q, ((0, fetched + -q.shape[0] % 8), (0, 0)))


def _sink_rows(sinks: jax.Array | None, shape: Shape) -> jax.Array | None:
    """f32[K, 64]: a KV head's query heads at the rows of its tile that they occupy."""
    if sinks is None:
        return None
    head = jnp.arange(shape.num_heads, dtype=jnp.int32)
    kv_head = head // shape.group
    at = kv_head * shape.group % 8 + head % shape.group
    return jnp.zeros((shape.num_kv_heads, ROWS), jnp.float32).at[kv_head, at].set(sinks)
