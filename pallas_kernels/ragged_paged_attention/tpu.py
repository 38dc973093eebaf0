"""Ragged paged attention on TPU: a write, then the kernel that ships with jax.

That kernel reads pages of [S, 2K, H] in which a key head is followed by its value head, so the
cache of this implementation lies in that form from the start (`cache_spec`) and is never copied.
Where K or H does not fill what the kernel can tile, heads are padded with zeros; TPU memory is
tiled in those units and holds the padding anyway. What the kernel lacks is refused by name: other
types than bfloat16 and float32, scales per head, sinks, attention without a causal mask.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from octavo.configs.cache import KVSpec
from octavo.pallas_kernels.ragged_paged_attention import api
from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan, CacheSpec

DTYPES = ("bfloat16", "float32")
LANES = 128
QUERIES = 32  # tokens of one block of queries, at most
QUERY_HEADS = 2048  # queries times heads of that block, at most where that leaves 8 queries
KV_BUFFER = 4 << 20  # bytes that the kernel's two buffers of pages may take of the vector memory
KV_TOKENS = 1024  # of one buffer, at most
SCALAR_MEMORY = 768 << 10  # bytes that block tables may take; the smallest chip has 1 MiB


def supports(
    *, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: str, kv_dtype: str
) -> str | None:
    """Why these shapes need another implementation, or None where they do not."""
    if dtype not in DTYPES or kv_dtype != dtype:
        return f"dtype must be one of {DTYPES} for queries and cache, got {dtype} and {kv_dtype}"
    if num_heads % num_kv_heads:
        return f"query heads must be a multiple of KV heads, got {num_heads} / {num_kv_heads}"
    if head_size > 2 * LANES:
        return f"head size must be at most {2 * LANES}, got {head_size}"
    if dtype == "float32" and num_heads == num_kv_heads > 4:
        return f"float32 with one query head per KV head needs at most 4 heads, got {num_heads}"
    return None


def cache_spec(spec: KVSpec, num_blocks: int, block_size: int) -> CacheSpec:
    """The cache of one layer: [blocks, S, 2K' (key, value, key, …), H'], K' and H' padded.

    Raises:
      ConfigError: keys and values of different sizes, as in `api.cache_spec`.
    """
    api.cache_spec(spec, num_blocks, block_size)
    return CacheSpec(
        shape=(num_blocks, block_size, 2 * _padded_heads(spec.num_kv_heads), _padded_size(spec.key_size)),
        axes=("blocks", None, "kv_heads", None),
    )


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
) -> tuple[jax.Array, jax.Array]:
    """Writes k and v into the cache, then attends; arguments and results as `reference.attend`.

    Args:
      cache: as `cache_spec` says.

    Raises:
      NotImplementedError: shapes or options that the kernel lacks.
    """
    num_tokens, num_heads, head_size = q.shape
    block_size, heads_both, size = cache.shape[1:]
    kv_heads = _unpadded_heads(num_heads, heads_both // 2) if k is None else k.shape[1]
    kv_lens, cu_q_lens, num_real = plan.kv_lens, plan.cu_q_lens, plan.num_real
    reason = supports(
        num_heads=num_heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size,
        dtype=q.dtype.name, kv_dtype=cache.dtype.name,
    )  # fmt: skip
    reason = reason or _lacks(plan, causal, sinks, k_scale, v_scale)
    if reason is not None or kv_lens is None or cu_q_lens is None or num_real is None:
        raise NotImplementedError(f"tpu attention: {reason or 'the plan was not made by prepare'}")
    if k is not None and v is not None:
        cache = write(cache, k, v, plan, k_scale, v_scale)
    num_rows = jnp.sum(jnp.diff(cu_q_lens) > 0, dtype=jnp.int32)[None]
    # A step without rows still has one token, of the null block: the kernel fetches before it looks.
    kv_lens, cu_q_lens = kv_lens.at[0].max(1), cu_q_lens.at[1:].max(1)
    grouped = q.reshape(num_tokens, kv_heads, -1, head_size)
    grouped = jnp.pad(grouped, ((0, 0), (0, heads_both // 2 - kv_heads), (0, 0), (0, size - head_size)))
    pages, queries = _blocks(num_tokens, plan.block_tables.shape[1], num_heads, cache)
    out = ragged_paged_attention(
        grouped.reshape(num_tokens, -1, size),
        cache,
        kv_lens,
        plan.block_tables,
        cu_q_lens,
        jnp.maximum(num_rows, 1),
        sm_scale=scale,
        sliding_window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        num_kv_pages_per_block=pages,
        num_queries_per_block=queries,
    )
    out = out.reshape(num_tokens, heads_both // 2, -1, size)[:, :kv_heads, :, :head_size].reshape(q.shape)
    real = jnp.arange(num_tokens, dtype=jnp.int32) < num_real
    return jnp.where(real[:, None, None], out, jnp.zeros_like(out)), cache


def write(
    cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: AttentionPlan,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> jax.Array:
    """The cache with the new keys and values [T, K, H] in it, in place where it is donated."""
    num_tokens, kv_heads, head_size = k.shape
    _, _, heads_both, size = cache.shape
    if k_scale is not None:
        k = k / k_scale
    if v_scale is not None:
        v = v / v_scale
    new = jnp.stack([k, v], axis=2).astype(cache.dtype).reshape(num_tokens, 2 * kv_heads, head_size)
    new = jnp.pad(new, ((0, 0), (0, heads_both - 2 * kv_heads), (0, size - head_size)))
    return cache.at[plan.write_block, plan.write_offset].set(new, mode="promise_in_bounds")


def _lacks(
    plan: AttentionPlan,
    causal: bool,
    sinks: jax.Array | None,
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
) -> str | None:
    """Which option the kernel does not have."""
    if sinks is not None:
        return "sinks"
    if not causal:
        return "attention without a causal mask"
    if isinstance(k_scale, jax.Array) or isinstance(v_scale, jax.Array):
        return "key and value scales that are arrays; it takes one number each"
    rows, width = plan.block_tables.shape
    if (taken := rows * -(-width // LANES) * LANES * 4) > SCALAR_MEMORY:
        return (
            f"block tables of {rows} rows and {width} blocks take {taken} bytes of scalar memory, "
            f"at most {SCALAR_MEMORY} fit: use larger blocks, fewer rows or a shorter max_model_len"
        )
    return None


def _padded_heads(kv_heads: int) -> int:
    """The next number of KV heads whose pairs of key and value fill the tiles of a 16-bit or 32-bit page."""
    return next(n for n in (1, 2, 4) if n >= kv_heads) if kv_heads <= 4 else -(-kv_heads // 8) * 8


def _padded_size(head_size: int) -> int:
    return -(-head_size // LANES) * LANES


def _unpadded_heads(num_heads: int, padded: int) -> int:
    """K of a cache that another layer wrote, where the padding leaves only one answer."""
    fits = [n for n in range(1, padded + 1) if num_heads % n == 0 and _padded_heads(n) == padded]
    if len(fits) != 1:
        raise NotImplementedError(
            f"tpu attention: a cache of {padded} padded KV heads, read without keys, may have {fits} for {num_heads} "
            "query heads"
        )
    return fits[0]


def _blocks(num_tokens: int, pages_per_row: int, num_heads: int, cache: jax.Array) -> tuple[int, int]:
    """Pages and queries that the kernel works on at a time: what fits the vector memory of every chip."""
    _, block_size, heads_both, size = cache.shape
    heads = min(heads_both, 32 // cache.dtype.itemsize)  # the kernel cuts heads into blocks of so many
    tokens = min(KV_TOKENS, KV_BUFFER // (2 * heads * size * cache.dtype.itemsize))
    pages = min(max(1, tokens // block_size), pages_per_row)
    return pages, min(num_tokens, QUERIES, max(8, QUERY_HEADS // num_heads))
