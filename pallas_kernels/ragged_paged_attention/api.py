"""Ragged paged attention: one contract on every platform.

    cache_spec(spec, num_blocks, block_size)       -> shape and axis names of one layer's cache
    prepare(kv_lens, block_tables, cu_q_lens, ...) -> AttentionPlan, on the device, once per KV spec and step
    attend(q, k, v, cache, plan, *, scale, ...)    -> (out, cache)
    copy_blocks, read_blocks, write_blocks         whole blocks in and out (blocks.py)

A step holds rows of different lengths on one flat token axis. Row r owns tokens
cu_q_lens[r] … cu_q_lens[r + 1] - 1, which are the last of its kv_lens[r] tokens.
`attend` first writes the new keys and values into their blocks (in place where
the cache is donated), then every query attends to its row's cache. What a row
gives depends on nothing but the row: split boundaries lie at absolute positions.
This module knows shapes and names; it refuses to know a mesh or a model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from octavo.configs.cache import KVSpec
from octavo.configs.errors import ConfigError
from octavo.pallas_kernels.ragged_paged_attention.parameters import DEFAULT, Parameters
from octavo.pallas_kernels.ragged_paged_attention.worklist import (
    DecodeWork,
    PrefillWork,
    Workers,
    plan_decode,
    plan_prefill,
)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Shape and logical axis names of one layer's cache; placement and the memory solver read it."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How an implementation cuts the work (static): see `reference`.

    Attributes:
      chunk: tokens of KV that one inner iteration reads; a multiple of the block size.
      decode_group: decode rows that one iteration works on, at most.
      tile: query tokens of one prefill tile.
      prefill_group: prefill tiles that one iteration works on.
      workers: sizes of the persistent decode work list, where the implementation uses one.
      parameters: tuned sizes, where the implementation has them.
    """

    chunk: int = 256
    decode_group: int = 4
    tile: int = 64
    prefill_group: int = 1
    workers: Workers | None = None
    parameters: Parameters = DEFAULT


@flax.struct.dataclass
class Tiles:
    """Query tiles sorted by falling KV length, so that a group's members end together.

    Attributes:
      row: i32[n], whose block table to read.
      first_token: i32[n], index of the tile's first token on the flat axis.
      num_tokens: i32[n], 0 for a tile that is not there.
      first_position: i32[n], position of that token in its row.
      kv_len: i32[n], tokens of KV that the tile reaches.
      num_chunks: i32[n], chunks that hold them.
      num_active: i32[], tiles that are there; they come first.
    """

    row: jax.Array
    first_token: jax.Array
    num_tokens: jax.Array
    first_position: jax.Array
    kv_len: jax.Array
    num_chunks: jax.Array
    num_active: jax.Array


@flax.struct.dataclass
class AttentionPlan:
    """What one step's attention needs besides q, k and v; shared by all layers of a KV spec.

    Attributes:
      write_block, write_offset: i32[T], where each token's key and value go; padding goes to block 0.
      block_tables: i32[R, P'], P' padded to whole chunks.
      decode: tiles of one token each.
      prefill: tiles of up to `tiling.tile` tokens, or None in a decode-only step.
      tiling: static.
      decode_work, prefill_work: the same rows cut for persistent workers, where `tiling.workers` asks for it.
      num_real: i32[1], tokens before the padding.
      kv_lens, cu_q_lens: i32[R] and i32[R + 1], as `prepare` was given them.
    """

    write_block: jax.Array
    write_offset: jax.Array
    block_tables: jax.Array
    decode: Tiles
    prefill: Tiles | None
    tiling: Tiling = flax.struct.field(pytree_node=False)
    decode_work: DecodeWork | None = None
    prefill_work: PrefillWork | None = None
    num_real: jax.Array | None = None
    kv_lens: jax.Array | None = None
    cu_q_lens: jax.Array | None = None


def cache_spec(spec: KVSpec, num_blocks: int, block_size: int) -> CacheSpec:
    """The cache of one layer: [blocks, 2 (key, value), K, S, H].

    A block's keys of one head lie together, so that a kernel fetches them with one
    bulk copy, and tensor parallelism splits the K axis.

    Raises:
      ConfigError: keys and values of different sizes, which this layout does not hold.
    """
    if spec.key_size != spec.value_size:
        raise ConfigError(f"paged attention needs key_size == value_size, got {spec.key_size} and {spec.value_size}")
    return CacheSpec(
        shape=(num_blocks, 2, spec.num_kv_heads, block_size, spec.key_size),
        axes=("blocks", None, "kv_heads", None, None),
    )


def cache_dtype(kv_dtype: str) -> np.dtype:
    """What a cache of such numbers is an array of: bytes where they are fp8 (see kv_write.py)."""
    return np.dtype(np.uint8) if kv_dtype == "float8_e4m3fn" else jnp.dtype(kv_dtype)


type Attend = Callable[..., tuple[jax.Array, Any]]
type MakeCacheSpec = Callable[[KVSpec, int, int], CacheSpec]


def prepare(
    kv_lens: Int[Array, " R"],
    block_tables: Int[Array, "R P"],
    cu_q_lens: Int[Array, " R+1"],
    num_decode: Int[Array, ""],
    *,
    num_tokens: int,
    block_size: int,
    tiling: Tiling,
    causal: bool = True,
) -> AttentionPlan:
    """Plans one step; everything stays on the device.

    Args:
      kv_lens: i32[R], tokens of each row including this step's; 0 for a padded row.
      block_tables: i32[R, P].
      cu_q_lens: i32[R + 1], cumulative query lengths; rows come decode | prefill | padded.
      num_decode: i32[], rows 0 … num_decode - 1 have one token each.
      num_tokens: T (static). T == R means that no row has more than one token.
      block_size: S (static).
      tiling: how the work is cut (static).
      causal: as in `attend` (static); otherwise every tile reaches its whole row.
    """
    num_rows = kv_lens.shape[0]
    q_lens = jnp.diff(cu_q_lens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    position = kv_lens[row] - q_lens[row] + token - cu_q_lens[row]
    block = block_tables[row, jnp.where(real, position // block_size, 0)]
    blocks_per_chunk = tiling.chunk // block_size
    padding = -block_tables.shape[1] % blocks_per_chunk

    rows = jnp.arange(num_rows, dtype=jnp.int32)
    is_decode = rows < num_decode
    start = kv_lens - q_lens

    def tiles(row: jax.Array, skipped: jax.Array, length: jax.Array, group: int) -> Tiles:
        position = start[row] + skipped
        reach = position + length if causal else kv_lens[row]
        return _sorted_tiles(
            row, cu_q_lens[row] + skipped, length, position, jnp.where(length > 0, reach, 0), tiling.chunk, group
        )

    decode = tiles(rows, jnp.zeros_like(rows), jnp.where(is_decode, q_lens, 0), min(tiling.decode_group, num_rows))
    prefill = None
    if num_tokens > num_rows:
        tile_counts = jnp.where(is_decode, 0, -(-q_lens // tiling.tile))
        ends = jnp.cumsum(tile_counts)
        tile = jnp.arange(-(-num_tokens // tiling.tile) + num_rows, dtype=jnp.int32)
        tile_row = jnp.minimum(
            jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32), num_rows - 1
        )
        skipped = (tile - (ends - tile_counts)[tile_row]) * tiling.tile
        length = jnp.where(tile < ends[-1], jnp.clip(q_lens[tile_row] - skipped, 0, tiling.tile), 0)
        prefill = tiles(tile_row, skipped, length, tiling.prefill_group)
    decode_work = prefill_work = None
    if tiling.workers is not None:
        lengths = jnp.where(is_decode & (q_lens > 0), kv_lens, 0)
        decode_work = plan_decode(lengths, block_tables.shape[1] * block_size, tiling.workers)
        if num_tokens > num_rows:
            prefill_work = plan_prefill(kv_lens, cu_q_lens, ~is_decode, num_tokens, causal)
    return AttentionPlan(
        write_block=jnp.where(real, block, 0),
        write_offset=jnp.where(real, position, token) % block_size,
        block_tables=jnp.pad(block_tables, ((0, 0), (0, padding))),
        decode=decode,
        prefill=prefill,
        tiling=tiling,
        decode_work=decode_work,
        prefill_work=prefill_work,
        num_real=cu_q_lens[-1:],
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
    )


def _sorted_tiles(
    row: jax.Array,
    first_token: jax.Array,
    num_tokens: jax.Array,
    first_position: jax.Array,
    kv_len: jax.Array,
    chunk: int,
    group: int,
) -> Tiles:
    """Longest first, absent ones last, padded to whole groups."""
    columns = [row, first_token, num_tokens, first_position, kv_len]
    if row.shape[0] > group:
        order = jnp.argsort(-kv_len)
        columns = [x[order] for x in columns]
    row, first_token, num_tokens, first_position, kv_len = (jnp.pad(x, (0, -x.shape[0] % group)) for x in columns)
    return Tiles(
        row=row,
        first_token=first_token,
        num_tokens=num_tokens,
        first_position=first_position,
        kv_len=kv_len,
        num_chunks=-(-kv_len // chunk),
        num_active=jnp.sum(num_tokens > 0, dtype=jnp.int32),
    )
