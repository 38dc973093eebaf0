"""Ragged paged attention in plain `jnp`: the truth for kernels, and what CPUs and other GPUs run.

Flash attention's running softmax (Dao et al. 2022, arXiv:2205.14135) over tiles of queries
and chunks of KV. Two loops with bounds known on the device only: groups of tiles, longest
first, and the chunks that the group's longest tile reaches. So the work follows the tokens
attended (plus at most one group's worth of its longest row), never the size of the pool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from octavo.pallas_kernels.ragged_paged_attention.api import AttentionPlan, Tiles
from octavo.pallas_kernels.ragged_paged_attention.kv_write import Scale, as_stored, write


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    cache: Shaped[Array, "blocks 2 K S H"],
    plan: AttentionPlan,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> tuple[Float[Array, "T N H"], Shaped[Array, "blocks 2 K S H"]]:
    """Writes k and v into the cache, then attends; see `api` for the contract.

    Args:
      q: [T, N, H]; query head n reads kv head n // (N / K).
      k, v: [T, K, H], or both None to read what another layer wrote.
      cache: [blocks, 2, K, S, H] in q's type, a narrower one, or the bytes of fp8 e4m3 as uint8.
      plan: from `prepare`.
      scale: of the scores.
      causal: a token sees itself and what came before; otherwise its whole row.
      window: tokens that a query sees, itself included.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      sinks: f32[N], a learned score per head that takes part in the softmax and has no value.
      k_scale, v_scale: what stored keys and values are multiplied with, above 0, a number or f32[K].

    Returns:
      ([T, N, H] in q's dtype, the cache). Padded tokens give zeros.
    """
    if k is not None and v is not None:
        cache = write(cache, k, v, plan, k_scale, v_scale)
    pages = cache.reshape(cache.shape[0], -1, *cache.shape[3:])  # [blocks, 2K, S, H]
    score = _scores(scale, soft_cap, k_scale)
    see = _visible(causal, window)
    out = jnp.zeros(q.shape, q.dtype)
    decode_group = min(plan.tiling.decode_group, plan.block_tables.shape[0])
    for tiles, group, tile in (
        (plan.decode, decode_group, 1),
        (plan.prefill, plan.tiling.prefill_group, plan.tiling.tile),
    ):
        if tiles is not None:
            out = _attend_tiles(q, pages, plan, tiles, group, tile, out, score, see, window, sinks, v_scale)
    return out, pages.reshape(cache.shape)


def _attend_tiles(
    q: jax.Array,
    pages: jax.Array,
    plan: AttentionPlan,
    tiles: Tiles,
    group: int,
    tile: int,
    out: jax.Array,
    score: Callable[[jax.Array, jax.Array], jax.Array],
    see: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    window: int | None,
    sinks: jax.Array | None,
    v_scale: Scale,
) -> jax.Array:
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = pages.shape[1] // 2, pages.shape[2]
    chunk = plan.tiling.chunk
    blocks = chunk // block_size
    sink = jnp.full((num_heads,), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    first_max = jnp.broadcast_to(
        sink.reshape(1, num_kv_heads, -1, 1), (group, num_kv_heads, num_heads // num_kv_heads, tile)
    )

    def one_group(g: jax.Array, out: jax.Array) -> jax.Array:
        row, first, count, position, kv_len, num_chunks = (
            jax.lax.dynamic_slice_in_dim(x, g * group, group)
            for x in (
                tiles.row,
                tiles.first_token,
                tiles.num_tokens,
                tiles.first_position,
                tiles.kv_len,
                tiles.num_chunks,
            )
        )
        step = jnp.arange(tile, dtype=jnp.int32)[None, :]
        token = jnp.where(step < count[:, None], first[:, None] + step, num_tokens)  # [B, t]; T is dropped
        q_tile = q.at[token].get(mode="fill", fill_value=0).reshape(group, tile, num_kv_heads, -1, head_size)
        q_position = position[:, None] + step
        table = plan.block_tables[row]

        def one_chunk(c: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            high, total, acc = carry
            block = jax.lax.dynamic_slice_in_dim(table, c * blocks, blocks, axis=1)[:, None, :]
            side = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
            keys, values = (  # [B, K, C, H], gathered page by page: no transpose
                as_stored(pages.at[block, at].get(mode="promise_in_bounds"))
                .reshape(group, num_kv_heads, chunk, head_size)
                .astype(q.dtype)
                for at in (side, side + num_kv_heads)
            )
            kv_position = c * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, :]
            live = kv_position < kv_len[:, None]  # [B, C]; what lies beyond may be NaN
            mask = see(q_position, kv_position, live)[:, None, None]
            s = jnp.where(mask, score(q_tile, keys), -jnp.inf)
            new_high = jnp.maximum(high, s.max(axis=-1))
            base = jnp.where(new_high == -jnp.inf, 0.0, new_high)  # a row with nothing to see yet
            p = jnp.exp(s - base[..., None])
            fade = jnp.exp(high - base)
            values = jnp.where(live[:, None, :, None], values, 0)
            pv = jnp.einsum("bkgtc,bkch->bkgth", p.astype(q.dtype), values, preferred_element_type=jnp.float32)
            return new_high, total * fade + p.sum(axis=-1), acc * fade[..., None] + pv

        first_chunk = jnp.int32(0)
        if window is not None:
            oldest = jnp.maximum(position - window + 1, 0) // chunk
            first_chunk = jnp.min(jnp.where(count > 0, oldest, jnp.max(num_chunks)))
        carry = (
            first_max,
            jnp.where(first_max == -jnp.inf, 0.0, 1.0),
            jnp.zeros((*first_max.shape, head_size), jnp.float32),
        )
        _, total, acc = jax.lax.fori_loop(first_chunk, jnp.max(num_chunks), one_chunk, carry)
        result = acc / jnp.where(total == 0, 1.0, total)[..., None]
        if v_scale is not None:
            result = result * jnp.broadcast_to(v_scale, (num_kv_heads,))[None, :, None, None, None]
        result = jnp.moveaxis(result, 3, 1).reshape(group, tile, num_heads, head_size)
        return out.at[token].set(result.astype(out.dtype), mode="drop")

    if tiles.row.shape[0] == group:
        return one_group(jnp.int32(0), out)
    return jax.lax.fori_loop(0, -(-tiles.num_active // group), one_group, out)


def _scores(scale: float, soft_cap: float | None, k_scale: Scale) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """([B, t, K, g, H], [B, K, C, H]) -> f32[B, K, g, t, C]."""

    def score(q: jax.Array, keys: jax.Array) -> jax.Array:
        s = jnp.einsum("btkgh,bkch->bkgtc", q, keys, preferred_element_type=jnp.float32) * scale
        if k_scale is not None:
            s = s * jnp.broadcast_to(k_scale, keys.shape[1:2])[None, :, None, None, None]
        return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)

    return score


def _visible(causal: bool, window: int | None) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(q positions [B, t], kv positions [1, C], live [B, C]) -> bool[B, t, C]."""

    def see(q_position: jax.Array, kv_position: jax.Array, live: jax.Array) -> jax.Array:
        mask = live[:, None, :]
        if causal:
            mask = mask & (kv_position[:, None, :] <= q_position[..., None])
        if window is not None:
            mask = mask & (kv_position[:, None, :] > q_position[..., None] - window)
        return mask

    return see
