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
from octavo.pallas_kernels.ragged_paged_attention.mosaic_tiles import ROWS, Producer, Rings, Shape
from octavo.pallas_kernels.ragged_paged_attention.worklist import PREFILL_TILE, PrefillWork

READERS = PREFILL_TILE // ROWS  # consumers, each of so many query tokens
# Of a thread, for caches of (16 bits, fp8). Three warpgroups start with 168 each; where they ask for more than the 504
# of all, one waits for ever, and neither the interpreter nor the compiler sees it.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = (240, 224), (24, 56)


def rings(shape: Shape) -> Rings:
    """The KV rings of one block: tiles of 128 tokens where shared memory and registers hold them."""
    tile, stages = shape.parameters.prefill_tile, shape.parameters.prefill_stages
    if shape.narrow:
        wide = 2 if shape.head_size <= 128 else 1
        return Rings(shape, tile or 64, 1, wide=wide, narrow=stages or 2, readers=READERS)
    return Rings(shape, tile or (128 if shape.head_size <= 128 else 64), 1, wide=stages or 2, narrow=0, readers=READERS)


def prefill(
    out: Any, q: jax.Array, rows: jax.Array, tables: jax.Array, work: PrefillWork, sinks: jax.Array | None,
    scales: jax.Array | None, shape: Shape,
) -> None:  # fmt: skip
    """Writes the prefill rows' results into `out`.

    Args:
      out: a reference to [T, N, H].
      q: [T', N, H] in 16 bits, T' a multiple of 8.
      rows: the cache as [blocks * 2 * K * S, H].
      tables: i32[R, P].
      work: from `plan_prefill`.
      sinks: f32[N] in units of log 2, or None.
      scales: f32[2, K], what stored keys and values are multiplied with; or None.
    """
    sizes, size = rings(shape), shape.head_size
    staged = (READERS, ROWS, size if size <= 128 else 64)  # columns that leave shared memory at once
    scratch = sizes.scratch(q.dtype, rows.dtype) | {
        "q_tile": mosaic.tile((READERS, ROWS, size), q.dtype),
        "full": mosaic.tile(staged, out.dtype),
        "partial": mosaic.plain(staged, out.dtype),
        "q_here": mosaic.Barrier(num_barriers=READERS),
        "turn": mosaic.Barrier(num_barriers=READERS),
        "cleaned": mosaic.Barrier(num_arrivals=READERS),
    }
    if shape.interpret:
        scratch["staging"] = mosaic.tile((READERS, ROWS, sizes.tile), q.dtype)
    given = {"sinks": sinks, "scales": scales}
    names = [name for name, value in given.items() if value is not None]
    mosaic.run(
        _body(sizes, names),
        *(q, rows, tables, work.tiles, work.count, *(given[name] for name in names), out),
        out=(),
        scratch=scratch,
        grid={"block": shape.blocks},
        warpgroups=READERS + 1,
        interpret=shape.interpret,
        name="paged_prefill",
    )


class _Item:
    """Scalars of one item, read from the plan in global memory."""

    def __init__(self, turn: jax.Array, tiles: Any, sizes: Rings) -> None:
        shape, tile_size = sizes.shape, jnp.int32(sizes.tile)
        index = _index(turn, shape.blocks)
        tile = lax.div(index, jnp.int32(shape.num_heads))
        self.head = lax.rem(index, jnp.int32(shape.num_heads))
        self.kv_head = lax.div(self.head, jnp.int32(shape.group))
        self.row, self.eight, self.low, self.high, self.position, self.reach = (tiles[tile, c] for c in range(6))
        self.token = self.eight * 8
        self.first_tile = jnp.int32(0)
        if shape.window is not None:
            oldest = jnp.maximum(self.position + (self.low - self.token) - shape.window + 1, 0)
            self.first_tile = lax.div(oldest, tile_size)
        self.end_tile = lax.div(self.reach + (tile_size - 1), tile_size)


def _index(turn: jax.Array, blocks: int) -> jax.Array:
    """Item of this block's turn: every second round is dealt in reverse, which evens out falling costs."""
    block = lax.axis_index("block")
    return turn * blocks + jnp.where(lax.rem(turn, jnp.int32(2)) == 0, block, blocks - 1 - block)


def _turns(num_items: jax.Array, blocks: int) -> jax.Array:
    rounds = lax.div(num_items, jnp.int32(blocks))
    return rounds + (_index(rounds, blocks) < num_items).astype(jnp.int32)


def _body(sizes: Rings, names: list[str]) -> Any:
    shape = sizes.shape

    def body(q: Any, rows: Any, tables: Any, tiles: Any, count: Any, *more: Any, **scratch: Any) -> None:
        given, out = dict(zip(names, more[:-1], strict=True)), more[-1]
        group = mosaic.warpgroup()
        turns = _turns(count[0] * shape.num_heads, shape.blocks)

        @mosaic.when(group < READERS)
        def _consumer() -> None:
            mosaic.set_registers(CONSUMER_REGISTERS[shape.narrow], action="increase")
            _consume(sizes, group, turns, q, tiles, given, out, scratch)

        @mosaic.when(group == READERS)
        def _producer() -> None:
            mosaic.set_registers(PRODUCER_REGISTERS[shape.narrow], action="decrease")
            _produce(sizes, Producer(sizes, jnp.int32(0), rows, tables, scratch), turns, tiles)

    return body


def _produce(sizes: Rings, producer: Producer, turns: jax.Array, tiles: Any) -> None:
    def one_item(turn: jax.Array, done: jax.Array) -> jax.Array:
        item = _Item(turn, tiles, sizes)

        def one_tile(t: jax.Array, done: jax.Array) -> jax.Array:
            return producer.fetch(item.row, item.kv_head, t, item.reach - 1, done)

        return lax.fori_loop(item.first_tile, item.end_tile, one_tile, done)

    producer.finish(lax.fori_loop(0, turns, one_item, jnp.int32(0)))


def _consume(
    sizes: Rings, group: jax.Array, turns: jax.Array, q: Any, tiles: Any, given: dict[str, Any], out: Any, scratch: Any
) -> None:
    shape, size, tile = sizes.shape, sizes.shape.head_size, sizes.tile
    sinks, scales = given.get("sinks"), given.get("scales")
    q_tile, q_here = scratch["q_tile"].at[group], scratch["q_here"].at[group]
    mine, other = scratch["turn"].at[group], scratch["turn"].at[1 - group]
    staging = scratch["staging"].at[group] if shape.interpret else None

    def fetch_q(turn: jax.Array) -> None:
        item = _Item(turn, tiles, sizes)
        mosaic.copy_in(q.at[mosaic.ds(item.eight * 8 + group * ROWS, ROWS), item.head], q_tile, q_here)

    def one_item(turn: jax.Array, done: jax.Array) -> jax.Array:
        item = _Item(turn, tiles, sizes)
        position = item.position + group * ROWS  # of this consumer's first query; foreign ones may lie before 0
        k_scale = None if scales is None else scales[0, item.kv_head]
        mosaic.wait(q_here)

        def at(t: jax.Array) -> tuple[Any, ...]:
            """The ring's places for tile t: keys, values and their barriers."""
            stage = sizes.stage(done + t - item.first_tile)
            return tuple(
                scratch[name].at[stage] for name in ("k_ring", "k_here", "k_free", "v_ring", "v_here", "v_free")
            )

        def see(t: jax.Array) -> jax.Array:
            kv = mosaic.iota((ROWS, tile), 1) + t * tile
            query = mosaic.iota((ROWS, tile), 0) + position
            seen = kv <= query if shape.causal else kv < item.reach
            return seen if shape.window is None else seen & (kv > query - shape.window)

        def softmax(s: jax.Array, t: jax.Array, high: jax.Array, total: jax.Array, masked: bool) -> Any:
            return shape.softmax(s, high, total, see(t) if masked else None, k_scale)

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
                q_tile, k_ring.transpose((1, 0)), (ROWS, tile), acc, p, v_ring, staging,
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
        s = mosaic.matmul(q_tile, k_ring.transpose((1, 0)), (ROWS, tile))
        mosaic.arrive(other)
        mosaic.arrive(k_free)
        p, _, high, total = softmax(s, item.first_tile, high, total, True)
        carry = (mosaic.matrix_full((ROWS, size), 0.0), mosaic.settled(p.astype(q_tile.dtype)), high, total)
        first_masked = second = item.first_tile + 1
        if shape.window is None:
            seen_by_all = jnp.minimum(jnp.maximum(position + 1, 0), item.reach) if shape.causal else item.reach
            first_masked = jnp.maximum(lax.div(seen_by_all, jnp.int32(tile)), second)
            carry = lax.fori_loop(second, first_masked, lambda t, c: one_tile(t, c, False), carry)
        carry = lax.fori_loop(first_masked, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        acc, p, _, total = carry
        again = _Item(turn, tiles, sizes)  # read twice: kept over the loop, the scalars would spill
        mosaic.when(turn + 1 < turns)(lambda: fetch_q(turn + 1))
        *_, v_ring, v_here, v_free = at(item.end_tile - 1)
        mosaic.wait(v_here)
        _clean(tile, group, item, v_ring, scratch["cleaned"])
        acc = mosaic.accumulate(acc, p, v_ring, staging)
        mosaic.arrive(v_free)
        v_scale = 1.0 if scales is None else scales[1, again.kv_head]
        acc = acc * lax.broadcast_in_dim(v_scale / jnp.maximum(total, 1e-30), acc.shape, [0])
        _store(group, again, acc.astype(out.dtype), out, scratch)
        return done + item.end_tile - item.first_tile

    @mosaic.when(turns > 0)
    def _() -> None:
        fetch_q(jnp.int32(0))
        mosaic.when(group == 1)(lambda: mosaic.arrive(other))

    lax.fori_loop(0, turns, one_item, jnp.int32(0))
    mosaic.when((turns > 0) & (group == 0))(lambda: mosaic.wait(mine))
    mosaic.store_done()


def _clean(tile: int, group: jax.Array, item: _Item, v_ring: Any, cleaned: Any) -> None:
    """Zeroes what the last tile's tail, never written by anyone, may hold: 0 * NaN would reach the sums."""
    valid = item.reach - (item.end_tile - 1) * tile

    @mosaic.when(valid < tile)
    def _() -> None:
        @mosaic.when(group * ROWS < tile)
        def _() -> None:
            first = group * ROWS if tile > ROWS else 0
            mosaic.zero_rows_from(v_ring.at[mosaic.ds(first, ROWS)], valid - first)

        mosaic.arrive(cleaned)
        mosaic.wait(cleaned)


def _store(group: jax.Array, item: _Item, values: jax.Array, out: Any, scratch: Any) -> None:
    first = item.token + group * ROWS
    low, high = jnp.maximum(item.low - first, 0), jnp.minimum(item.high - first, ROWS)
    whole = (low == 0) & (high == ROWS)
    size, width = values.shape[1], scratch["full"].shape[-1]

    def columns(staged: Any, copy: Any) -> None:
        for column in range(0, size, width):
            mosaic.store_done(reads_only=True)
            staged[...] = values[:, column : column + width] if width < size else values
            mosaic.commit_smem()
            copy(staged, mosaic.ds(column, width))

    @mosaic.when(whole)
    def _whole() -> None:
        def copy(staged: Any, part: Any) -> None:
            mosaic.copy_out(staged, out.at[mosaic.ds(item.eight * 8 + group * ROWS, ROWS), item.head, part])

        columns(scratch["full"].at[group], copy)

    @mosaic.when(jnp.logical_not(whole) & (low < high))
    def _rows() -> None:
        def some(staged: Any, at: jax.Array, rows: int, part: Any) -> jax.Array:
            mosaic.copy_out(staged.at[mosaic.ds(at, rows)], out.at[mosaic.ds(first + at, rows), item.head, part])
            return at + rows

        def copy(staged: Any, part: Any) -> None:
            count = high - low
            at = lax.fori_loop(0, lax.div(count, jnp.int32(8)), lambda _, at: some(staged, at, 8, part), low)
            lax.fori_loop(0, lax.rem(count, jnp.int32(8)), lambda _, at: some(staged, at, 1, part), at)

        columns(scratch["partial"].at[group], copy)
