"""Decode rows on Hopper: one query token a row, KV in pieces, the pieces' results combined.

Flash decoding (Dao et al. 2023) over a paged cache. A block of the grid holds two independent
halves: a consumer and a producer warpgroup each, with a ring of KV tiles between them. A half
works through its list of items (worklist.py). An item is one KV head of one piece; the query
heads of that KV head share a 64-row tile whose other rows hold whatever lay there and are never
written out. Whole rows go to the output; pieces go to float32 slots that `combine` merges.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.mosaic_tiles import ROWS, Producer, Rings, Shape
from octavo.pallas_kernels.ragged_paged_attention.worklist import DecodeWork

CONSUMERS = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = {1: 240, 2: 208}, {1: 24, 2: 40}  # of a thread, by halves


def halves(head_size: int) -> int:
    """Independent halves of one block, each with a consumer; of larger heads the consumers share the columns."""
    return 2 if head_size <= 128 else 1


def rings(shape: Shape) -> Rings:
    """The KV rings of one block."""
    count = halves(shape.head_size)
    wide = shape.parameters.decode_stages or 2
    return Rings(shape, shape.decode_tile, count, wide=wide, narrow=0, readers=CONSUMERS // count)


def part_width(head_size: int) -> int:
    """Columns of a partial result in global memory, which `combine` reads 64 or a multiple of 128 at a time."""
    return head_size if head_size == 64 else -(-head_size // 128) * 128


def _staged(head_size: int) -> int:
    """Columns of the float32 result that leave shared memory at once."""
    return 64 if head_size % 64 == 0 else head_size // 2


def decode(
    q: jax.Array, rows: jax.Array, tables: jax.Array, work: DecodeWork, num_real: jax.Array,
    sinks: jax.Array | None, shape: Shape, out: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Runs all items, and zeroes the padded tokens.

    Args:
      q: [T * N, H] in 16 bits, padded so that every row's fetch ends inside.
      rows: the cache as [blocks * 2 * K * S, H].
      tables: i32[R, P].
      work: from `plan_decode`.
      num_real: i32[1], tokens before the padding.
      sinks: f32[8 + N + 64], the heads' from 8 on, in units of log 2; or None.
      out: [T * N, H], the result's shape and type.

    Returns:
      The result with the whole rows written; the slots' results f32[slots * N, part_width]
      and log-sum-exps f32[slots, K, 64].
    """
    slots = max(work.num_slots, 1)
    sizes, size, dtype = rings(shape), shape.head_size, q.dtype
    scratch = sizes.scratch(dtype, rows.dtype) | {
        "q_tile": mosaic.tile((CONSUMERS, ROWS, size), dtype),
        "q_here": mosaic.Barrier(num_barriers=CONSUMERS),
    }
    whole = mosaic.plain((CONSUMERS, ROWS, size // sizes.readers), out.dtype)
    if work.num_slots:
        scratch["result"] = mosaic.either(whole, mosaic.plain((CONSUMERS, ROWS, _staged(size)), jnp.float32))
        scratch["lse"] = mosaic.plain((CONSUMERS, ROWS), jnp.float32)
    else:
        scratch["whole"] = whole
    if shape.interpret:
        scratch["staging"] = mosaic.tile((CONSUMERS, ROWS, sizes.tile), dtype)
    given = () if sinks is None else (sinks,)
    return mosaic.run(
        _body(sizes, bool(work.num_slots)),
        *(q, rows, tables, work.pieces, work.first, num_real, *given),
        out=(
            out,
            jax.ShapeDtypeStruct((slots * shape.num_heads, part_width(size)), jnp.float32),
            jax.ShapeDtypeStruct((slots, shape.num_kv_heads, ROWS), jnp.float32),
        ),
        scratch=scratch,
        grid={"block": shape.blocks},
        warpgroups=CONSUMERS + sizes.rings,
        interpret=shape.interpret,
        name="paged_decode",
    )


class Item:
    """Scalars of one item, read from the plan in global memory."""

    def __init__(self, index: jax.Array, pieces: Any, shape: Shape) -> None:
        heads = jnp.int32(shape.num_kv_heads)
        piece = lax.div(index, heads)
        self.head = lax.rem(index, heads)
        self.row, self.start, self.end, self.slot, self.length, self.part = (pieces[piece, c] for c in range(6))
        first, tile = self.start, shape.decode_tile
        if shape.window is not None:
            oldest = jnp.maximum(self.length - shape.window, 0)
            first = jnp.minimum(jnp.maximum(first, oldest // tile * tile), (self.end + tile - 1) // tile * tile)
        self.first_tile = lax.div(first, jnp.int32(tile))
        self.end_tile = lax.div(self.end + (tile - 1), jnp.int32(tile))

        self.q_row = self.row * shape.num_heads + self.head * shape.group  # of q as [T * N, H]
        self.eight = lax.div(self.q_row, jnp.int32(8))
        self.offset = lax.rem(self.q_row, jnp.int32(8))  # of the group's rows in the tile


def _body(sizes: Rings, split: bool) -> Any:
    shape, halves = sizes.shape, sizes.rings

    def body(*refs: Any, **scratch: Any) -> None:
        q, rows, tables, pieces, first, num_real, *more = refs[:-3]
        sinks = more[0] if more else None
        if split:
            scratch["whole"], scratch["part"] = scratch["result"]
        group = mosaic.warpgroup()
        half = lax.rem(group, jnp.int32(halves))
        # Neighbouring lists go to the two halves last: few items spread over all multiprocessors.
        worker = lax.axis_index("block") * halves + half
        begin, end = first[worker], first[worker + 1]

        @mosaic.when(group < CONSUMERS)
        def _consumer() -> None:
            mosaic.set_registers(CONSUMER_REGISTERS[halves], action="increase")
            _consume(sizes, split, group, half, begin, end, q, pieces, sinks, refs[-3:], scratch)
            columns = _columns(sizes, group)
            zero(shape, num_real[0] + worker, shape.blocks * halves, columns, refs[-3], scratch["whole"].at[group])
            mosaic.store_done()

        @mosaic.when(group >= CONSUMERS)
        def _producer() -> None:
            mosaic.set_registers(PRODUCER_REGISTERS[halves], action="decrease")
            _produce(shape, Producer(sizes, half, rows, tables, scratch), begin, end, pieces)

    return body


def _columns(sizes: Rings, consumer: jax.Array) -> Any:
    """The columns of values and result that are this consumer's."""
    width = sizes.shape.head_size // sizes.readers
    return mosaic.ds(0 if sizes.readers == 1 else consumer * width, width)


def _produce(shape: Shape, producer: Producer, begin: jax.Array, end: jax.Array, pieces: Any) -> None:
    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = Item(index, pieces, shape)

        def one_tile(t: jax.Array, done: jax.Array) -> jax.Array:
            return producer.fetch(item.row, item.head, t, item.end - 1, done)

        return lax.fori_loop(item.first_tile, item.end_tile, one_tile, done)

    producer.finish(lax.fori_loop(begin, end, one_item, jnp.int32(0)))


def _consume(
    sizes: Rings, split: bool, consumer: jax.Array, half: jax.Array, begin: jax.Array, end: jax.Array, q: Any,
    pieces: Any, sinks: Any, outs: Any, scratch: Any,
) -> None:  # fmt: skip
    shape, columns = sizes.shape, _columns(sizes, consumer)
    q_tile, q_here, k_ring = scratch["q_tile"].at[consumer], scratch["q_here"].at[consumer], scratch["k_ring"]

    def values(stage: jax.Array) -> Any:
        tile = scratch["v_ring"].at[stage]
        return tile if sizes.readers == 1 else tile.at[:, columns]

    def fetch_q(index: jax.Array) -> None:
        source = q.at[mosaic.ds(Item(index, pieces, shape).eight * 8, shape.q_rows)]
        mosaic.copy_in(source, scratch["q_tile"].at[consumer, mosaic.ds(0, shape.q_rows)], q_here)

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = Item(index, pieces, shape)
        mosaic.wait(q_here)

        def one_tile(t: jax.Array, carry: Any, masked: bool) -> Any:
            done, acc, high, total = carry
            stage = sizes.stage(done, half)
            mosaic.wait(scratch["k_here"].at[stage])
            s = mosaic.matmul(q_tile, k_ring.at[stage].transpose((1, 0)), (ROWS, sizes.tile))
            mosaic.arrive(scratch["k_free"].at[stage])
            see = None
            if masked:
                position = mosaic.iota((ROWS, sizes.tile), 1) + t * sizes.tile
                see = position < item.end
                if shape.window is not None:
                    see = see & (position >= item.length - shape.window)
            p, fade, high, total = shape.softmax(s, high, total, see, None)
            acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
            mosaic.wait(scratch["v_here"].at[stage])
            if masked:
                valid = item.end - t * sizes.tile
                mosaic.when(valid < sizes.tile)(lambda: mosaic.zero_rows_from(values(stage), valid))
            staging = scratch["staging"].at[consumer] if shape.interpret else None
            acc = mosaic.accumulate(acc, p.astype(q_tile.dtype), values(stage), staging)
            mosaic.arrive(scratch["v_free"].at[stage])
            return done + 1, acc, high, total

        # Rows beyond the group compute on garbage; -1e30 in place of -inf keeps the real rows' first fade finite.
        high, total = mosaic.rows_full(ROWS, -1e30), mosaic.rows_full(ROWS, 0.0)
        if sinks is not None:
            first = (item.part == 0).astype(jnp.float32)  # the sink belongs to one piece
            own = mosaic.ds(8 + item.head * shape.group - item.offset, ROWS)  # of the tile's rows
            high = mosaic.rows_load(sinks.at[own]) * first + (first - 1.0) * 1e30
            total = total + first
        carry = (done, mosaic.matrix_full((ROWS, columns.size), 0.0), high, total)
        if shape.window is None:
            full_end = lax.div(item.end, jnp.int32(sizes.tile))
            carry = lax.fori_loop(item.first_tile, full_end, lambda t, c: one_tile(t, c, False), carry)
            carry = lax.fori_loop(full_end, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        else:
            carry = lax.fori_loop(item.first_tile, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        done, acc, high, total = carry
        mosaic.when(index + 1 < end)(lambda: fetch_q(index + 1))
        _store(shape, split, consumer, columns, item, acc, high, total, outs, scratch)
        return done

    mosaic.when(begin < end)(lambda: fetch_q(begin))
    lax.fori_loop(begin, end, one_item, jnp.int32(0))
    mosaic.store_done(reads_only=True)


def zero(shape: Shape, first: jax.Array, workers: int, columns: Any, out: Any, staged: Any) -> None:
    """Zeroes every token from `first` on that is this worker's."""
    num_tokens = out.shape[0] // shape.num_heads
    count = lax.div(jnp.maximum(num_tokens - first, 0) + (workers - 1), jnp.int32(workers))

    @mosaic.when(count > 0)
    def _() -> None:
        staged[...] = jnp.zeros(staged.shape, out.dtype)
        mosaic.commit_smem()

    def one_token(i: jax.Array, _: Any) -> None:
        for head in range(0, shape.num_heads, staged.shape[0]):
            heads = min(staged.shape[0], shape.num_heads - head)
            to = out.at[mosaic.ds((first + i * workers) * shape.num_heads + head, heads), columns]
            mosaic.copy_out(staged.at[mosaic.ds(0, heads)], to)

    lax.fori_loop(0, count, one_token, None)


def _store(
    shape: Shape, split: bool, consumer: jax.Array, columns: Any, item: Item, acc: jax.Array, high: jax.Array,
    total: jax.Array, outs: Any, scratch: Any,
) -> None:  # fmt: skip
    out, part_out, lse_out = outs
    acc = acc * lax.broadcast_in_dim(1.0 / jnp.maximum(total, 1e-30), acc.shape, [0])
    heads = mosaic.ds(item.offset, shape.group)
    mosaic.store_done(reads_only=True)

    @mosaic.when(item.slot < 0)
    def _whole() -> None:
        staged = scratch["whole"].at[consumer]
        staged[...] = acc.astype(out.dtype)
        mosaic.commit_smem()
        mosaic.copy_out(staged.at[heads], out.at[mosaic.ds(item.q_row, shape.group), columns])

    if not split:
        return

    @mosaic.when(item.slot >= 0)
    def _part() -> None:
        part, lse = scratch["part"].at[consumer], scratch["lse"].at[consumer]
        lse[...] = high + jnp.log2(jnp.maximum(total, 1e-30))
        row = item.slot * shape.num_heads + item.head * shape.group
        width = part.shape[1]
        for column in range(0, acc.shape[1], width):
            if column:
                mosaic.store_done(reads_only=True)
            part[...] = acc[:, column : column + width]
            mosaic.commit_smem()
            to = part_out.at[mosaic.ds(row, shape.group), mosaic.ds(columns.start + column, width)]
            mosaic.copy_out(part.at[heads], to)
        mosaic.copy_out(lse, lse_out.at[item.slot, item.head])  # the same from each consumer of the item
