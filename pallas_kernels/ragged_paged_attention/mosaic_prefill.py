"""Prefill and chunk rows on Hopper: tiles of 128 query tokens, causal tiles skipped.

The warp-specialised form of FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) over a paged
cache: two consumer warpgroups of 64 query tokens take turns at the tensor cores, each computes the
scores of one KV tile and the values of the one before under its softmax, and a producer warpgroup
fills a ring of KV tiles, one bulk copy a block. An item is one query head of one tile; the blocks of
the grid are persistent and share the items, longest first, in alternating order. Only tiles on the
causal or window boundary are masked. A tile begins at a multiple of eight on the token axis, which
the swizzled copies ask for; what it holds of other rows is computed and not stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode import Shape
from octavo.pallas_kernels.ragged_paged_attention.worklist import PREFILL_TILE, PrefillWork

TILE = 128  # tokens of KV
ROWS = PREFILL_TILE // 2  # query tokens of one consumer
STAGES = 2


def prefill(
    out: Any, q: jax.Array, rows: jax.Array, tables: jax.Array, work: PrefillWork, sinks: jax.Array | None, shape: Shape
) -> None:
    """Writes the prefill rows' results into `out`.

    Args:
      out: a reference to [T, N, H].
      q: [T', N, H], T' a multiple of 8.
      rows: the cache as [blocks * 2 * K * S, H].
      tables: i32[R, P].
      work: from `plan_prefill`.
      sinks: f32[N] in units of log 2, or None.
    """
    size, dtype = shape.head_size, q.dtype
    per_tile = TILE // shape.block_size
    scratch = {
        "q_tile": mosaic.tile((2, ROWS, size), dtype),
        "k_ring": mosaic.tile((STAGES, TILE, size), dtype),
        "v_ring": mosaic.tile((STAGES, TILE, size), dtype),
        "full": mosaic.tile((2, ROWS, size), dtype),
        "partial": mosaic.plain((2, ROWS, size), dtype),
        "q_here": mosaic.Barrier(num_barriers=2),
        "k_here": mosaic.Barrier(num_arrivals=per_tile, num_barriers=STAGES),
        "v_here": mosaic.Barrier(num_arrivals=per_tile, num_barriers=STAGES),
        "k_free": mosaic.Barrier(num_arrivals=2, num_barriers=STAGES),
        "v_free": mosaic.Barrier(num_arrivals=2, num_barriers=STAGES),
        "turn": mosaic.Barrier(num_barriers=2),
        "cleaned": mosaic.Barrier(num_arrivals=2),
    }
    if shape.interpret:
        scratch["staging"] = mosaic.tile((2, ROWS, TILE), dtype)
    mosaic.run(
        _body(shape, sinks is not None),
        *([q, rows, tables, work.tiles, work.count] + ([] if sinks is None else [sinks]) + [out]),
        out=(),
        scratch=scratch,
        grid={"block": shape.blocks},
        warpgroups=3,
        interpret=shape.interpret,
        name="paged_prefill",
    )


class _Item:
    """Scalars of one item, read from the plan in global memory."""

    def __init__(self, turn: jax.Array, tiles: Any, shape: Shape) -> None:
        index = _index(turn, shape.blocks)
        tile = lax.div(index, jnp.int32(shape.num_heads))
        self.head = lax.rem(index, jnp.int32(shape.num_heads))
        self.kv_head = lax.div(self.head, jnp.int32(shape.group))
        self.row, self.eight, self.low, self.high, self.position, self.reach = (tiles[tile, c] for c in range(6))
        self.token = self.eight * 8
        self.first_tile = jnp.int32(0)
        if shape.window is not None:
            oldest = jnp.maximum(self.position + (self.low - self.token) - shape.window + 1, 0)
            self.first_tile = lax.div(oldest, jnp.int32(TILE))
        self.end_tile = lax.div(self.reach + (TILE - 1), jnp.int32(TILE))


def _index(turn: jax.Array, blocks: int) -> jax.Array:
    """Item of this block's turn: every second round is dealt in reverse, which evens out falling costs."""
    block = lax.axis_index("block")
    return turn * blocks + jnp.where(lax.rem(turn, jnp.int32(2)) == 0, block, blocks - 1 - block)


def _turns(num_items: jax.Array, blocks: int) -> jax.Array:
    rounds = lax.div(num_items, jnp.int32(blocks))
    return rounds + (_index(rounds, blocks) < num_items).astype(jnp.int32)


def _body(shape: Shape, has_sinks: bool) -> Any:
    def body(q: Any, rows: Any, tables: Any, tiles: Any, count: Any, *rest: Any, **scratch: Any) -> None:
        sinks, out = (rest[0] if has_sinks else None), rest[-1]
        group = mosaic.warpgroup()
        turns = _turns(count[0] * shape.num_heads, shape.blocks)

        @mosaic.when(group < 2)
        def _consumer() -> None:
            mosaic.set_registers(240, action="increase")
            _consume(shape, group, turns, q, tiles, sinks, out, scratch)

        @mosaic.when(group == 2)
        def _producer() -> None:
            mosaic.set_registers(24, action="decrease")
            _produce(shape, turns, rows, tables, tiles, scratch)

    return body


def _produce(shape: Shape, turns: jax.Array, rows: Any, tables: Any, tiles: Any, scratch: Any) -> None:
    per_tile = TILE // shape.block_size

    def one_item(turn: jax.Array, done: jax.Array) -> jax.Array:
        item = _Item(turn, tiles, shape)
        last_block = lax.div(item.reach - 1, jnp.int32(shape.block_size))

        def one_tile(t: jax.Array, done: jax.Array) -> jax.Array:
            stage = lax.rem(done, jnp.int32(STAGES))
            for name, half in (("k", 0), ("v", 1)):
                free, here, ring = (scratch[f"{name}_{part}"] for part in ("free", "here", "ring"))
                mosaic.when(done >= STAGES)(lambda free=free: mosaic.wait(free.at[stage]))
                for b in range(per_tile):
                    # Beyond the end the last block comes again: no table entry that is not the row's is read.
                    block = tables[item.row, jnp.minimum(t * per_tile + b, last_block)]
                    row = ((block * 2 + half) * shape.num_kv_heads + item.kv_head) * shape.block_size
                    to = ring.at[stage, mosaic.ds(b * shape.block_size, shape.block_size)]
                    mosaic.copy_in(rows.at[mosaic.ds(row, shape.block_size)], to, here.at[stage])
            return done + 1

        return lax.fori_loop(item.first_tile, item.end_tile, one_tile, done)

    done = lax.fori_loop(0, turns, one_item, jnp.int32(0))
    for i in range(STAGES):  # every phase of a barrier is seen by who waits on it

        @mosaic.when(done > i)
        def _(i: int = i) -> None:
            mosaic.wait(scratch["k_free"].at[i])
            mosaic.wait(scratch["v_free"].at[i])


def _consume(
    shape: Shape, group: jax.Array, turns: jax.Array, q: Any, tiles: Any, sinks: Any, out: Any, scratch: Any
) -> None:
    size = shape.head_size
    q_tile, q_here = scratch["q_tile"].at[group], scratch["q_here"].at[group]
    mine, other = scratch["turn"].at[group], scratch["turn"].at[1 - group]
    staging = scratch["staging"].at[group] if shape.interpret else None

    def fetch_q(turn: jax.Array) -> None:
        item = _Item(turn, tiles, shape)
        mosaic.copy_in(q.at[mosaic.ds(item.eight * 8 + group * ROWS, ROWS), item.head], q_tile, q_here)

    def one_item(turn: jax.Array, done: jax.Array) -> jax.Array:
        item = _Item(turn, tiles, shape)
        position = item.position + group * ROWS  # of this consumer's first query; foreign ones may lie before 0
        mosaic.wait(q_here)

        def at(t: jax.Array) -> tuple[Any, ...]:
            """The ring's places for tile t: keys, values and their barriers."""
            stage = lax.rem(done + t - item.first_tile, jnp.int32(STAGES))
            return tuple(
                scratch[name].at[stage] for name in ("k_ring", "k_here", "k_free", "v_ring", "v_here", "v_free")
            )

        def see(t: jax.Array) -> jax.Array:
            kv = mosaic.iota((ROWS, TILE), 1) + t * TILE
            query = mosaic.iota((ROWS, TILE), 0) + position
            seen = kv <= query if shape.causal else kv < item.reach
            return seen if shape.window is None else seen & (kv > query - shape.window)

        def softmax(s: jax.Array, t: jax.Array, high: jax.Array, total: jax.Array, masked: bool) -> Any:
            return shape.softmax(s, high, total, see(t) if masked else None)

        def one_tile(t: jax.Array, carry: Any, masked: bool) -> Any:
            """Scores of tile t, and under their softmax the values of tile t - 1."""
            acc, p, high, total = carry
            k_ring, k_here, k_free, *_ = at(t)
            *_, v_ring, v_here, v_free = at(t - 1)

            def use(s: jax.Array) -> Any:
                mosaic.arrive(k_free)
                return mosaic.settled(softmax(s, t, high, total, masked))

            mosaic.wait(mine)
            mosaic.wait(k_here)
            acc, (p, fade, high, total) = mosaic.overlap(
                q_tile, k_ring.transpose((1, 0)), (ROWS, TILE), acc, p, v_ring, staging,
                between=lambda: mosaic.wait(v_here), issued=lambda: mosaic.arrive(other), use=use,
            )  # fmt: skip
            mosaic.arrive(v_free)
            p = mosaic.settled(p).astype(q_tile.dtype)
            acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
            return *mosaic.settled((acc, p)), high, total

        # -1e30 in place of -inf keeps the first fade finite where nothing was seen yet.
        high, total = mosaic.rows_full(ROWS, -1e30), mosaic.rows_full(ROWS, 0.0)
        if sinks is not None:
            high, total = mosaic.rows_full(ROWS, sinks[item.head]), mosaic.rows_full(ROWS, 1.0)
        k_ring, k_here, k_free, *_ = at(item.first_tile)
        mosaic.wait(mine)
        mosaic.wait(k_here)
        s = mosaic.matmul(q_tile, k_ring.transpose((1, 0)), (ROWS, TILE))
        mosaic.arrive(other)
        mosaic.arrive(k_free)
        p, _, high, total = softmax(s, item.first_tile, high, total, True)
        carry = (mosaic.matrix_full((ROWS, size), 0.0), mosaic.settled(p.astype(q_tile.dtype)), high, total)
        first_masked = second = item.first_tile + 1
        if shape.window is None:
            seen_by_all = jnp.minimum(jnp.maximum(position + 1, 0), item.reach) if shape.causal else item.reach
            first_masked = jnp.maximum(lax.div(seen_by_all, jnp.int32(TILE)), second)
            carry = lax.fori_loop(second, first_masked, lambda t, c: one_tile(t, c, False), carry)
        carry = lax.fori_loop(first_masked, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        acc, p, _, total = carry
        again = _Item(turn, tiles, shape)  # read twice: kept over the loop, the scalars would spill
        mosaic.when(turn + 1 < turns)(lambda: fetch_q(turn + 1))
        *_, v_ring, v_here, v_free = at(item.end_tile - 1)
        mosaic.wait(v_here)
        _clean(group, item, v_ring, scratch["cleaned"])
        acc = mosaic.accumulate(acc, p, v_ring, staging)
        mosaic.arrive(v_free)
        acc = acc * lax.broadcast_in_dim(1.0 / jnp.maximum(total, 1e-30), acc.shape, [0])
        _store(shape, group, again, acc.astype(q_tile.dtype), out, scratch)
        return done + item.end_tile - item.first_tile

    @mosaic.when(turns > 0)
    def _() -> None:
        fetch_q(jnp.int32(0))
        mosaic.when(group == 1)(lambda: mosaic.arrive(other))

    lax.fori_loop(0, turns, one_item, jnp.int32(0))
    mosaic.when((turns > 0) & (group == 0))(lambda: mosaic.wait(mine))
    mosaic.store_done()


def _clean(group: jax.Array, item: _Item, v_ring: Any, cleaned: Any) -> None:
    """Zeroes what the last tile's tail, never written by anyone, may hold: 0 * NaN would reach the sums."""
    valid = item.reach - (item.end_tile - 1) * TILE

    @mosaic.when(valid < TILE)
    def _() -> None:
        mosaic.zero_rows_from(v_ring.at[mosaic.ds(group * ROWS, ROWS)], valid - group * ROWS)
        mosaic.arrive(cleaned)
        mosaic.wait(cleaned)


def _store(shape: Shape, group: jax.Array, item: _Item, values: jax.Array, out: Any, scratch: Any) -> None:
    first = item.token + group * ROWS
    low, high = jnp.maximum(item.low - first, 0), jnp.minimum(item.high - first, ROWS)
    whole = (low == 0) & (high == ROWS)
    mosaic.store_done(reads_only=True)

    @mosaic.when(whole)
    def _whole() -> None:
        staged = scratch["full"].at[group]
        staged[...] = values
        mosaic.commit_smem()
        mosaic.copy_out(staged, out.at[mosaic.ds(item.eight * 8 + group * ROWS, ROWS), item.head])

    @mosaic.when(jnp.logical_not(whole) & (low < high))
    def _rows() -> None:
        staged = scratch["partial"].at[group]
        staged[...] = values
        mosaic.commit_smem()

        def copy(at: jax.Array, rows: int) -> None:
            mosaic.copy_out(staged.at[mosaic.ds(at, rows)], out.at[mosaic.ds(first + at, rows), item.head])

        def eights(i: jax.Array, at: jax.Array) -> jax.Array:
            copy(at, 8)
            return at + 8

        def ones(i: jax.Array, at: jax.Array) -> jax.Array:
            copy(at, 1)
            return at + 1

        count = high - low
        at = lax.fori_loop(0, lax.div(count, jnp.int32(8)), eights, low)
        lax.fori_loop(0, lax.rem(count, jnp.int32(8)), ones, at)
