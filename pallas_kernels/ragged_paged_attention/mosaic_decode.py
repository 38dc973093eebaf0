"""Decode rows on Hopper: one query token a row, KV in pieces, the pieces' results combined.

Flash decoding (Dao et al. 2023) over a paged cache. A block of the grid holds two independent
halves: a consumer and a producer warpgroup each, with a ring of KV tiles between them. A half
works through its list of items (worklist.py). An item is one KV head of one piece; the query
heads of that KV head share a 64-row tile whose other rows hold whatever lay there and are never
written out. Whole rows go to the output; pieces go to float32 slots that `combine` merges.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic
from octavo.pallas_kernels.ragged_paged_attention.worklist import DecodeWork

TILE = 64  # tokens of KV
ROWS = 64  # of a wgmma tile
STAGES = 2
HALVES = 2
STAGED = 64  # columns of the float32 result that leave shared memory at once


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes and score options, shared by both kernels."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    blocks: int  # of the grid
    interpret: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def q_rows(self) -> int:
        """Rows of q fetched for one item: whole eights, which a swizzled tile is filled in."""
        if 8 % self.group == 0 and self.num_heads % 8 == 0:
            return 8
        if self.group % 8 == 0:
            return self.group
        return (self.group + 14) // 8 * 8

    def softmax(self, s: jax.Array, high: jax.Array, total: jax.Array, see: jax.Array | None) -> tuple[jax.Array, ...]:
        """One step of the running softmax.

        Args:
          s: f32[rows, tokens], raw q · k.
          high, total: f32[rows], maximum so far in units of log 2, and the sum of exponentials.
          see: bool[rows, tokens], or None where every query sees every token.

        Returns:
          (p, fade, high, total): what to weigh values with, and what to multiply older results with.
        """
        factor = self.scale * mosaic.LOG2E
        if self.soft_cap is not None:
            s, factor = jnp.tanh(s * (self.scale / self.soft_cap)), self.soft_cap * mosaic.LOG2E
        if see is not None:
            s = jnp.where(see, s, -jnp.inf)
        new_high = jnp.maximum(high, s.max(axis=1) * factor)
        fade = jnp.exp2(high - new_high)
        p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_high, s.shape, [0]))
        return p, fade, new_high, total * fade + p.sum(axis=1)


def decode(
    q: jax.Array, rows: jax.Array, tables: jax.Array, work: DecodeWork, num_real: jax.Array,
    sinks: jax.Array | None, shape: Shape, num_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Runs all items, and zeroes the padded tokens.

    Args:
      q: [T * N, H], padded so that every row's fetch ends inside.
      rows: the cache as [blocks * 2 * K * S, H].
      tables: i32[R, P].
      work: from `plan_decode`.
      num_real: i32[1], tokens before the padding.
      sinks: f32[K, 64], a KV head's query heads at their offset in its tile, in units of log 2; or None.

    Returns:
      [T * N, H] with the whole rows written; the slots' results f32[slots, N, H] and
      log-sum-exps f32[slots, K, 64].
    """
    slots = max(work.num_slots, 1)
    k_heads, size, dtype = shape.num_kv_heads, shape.head_size, q.dtype
    scratch = {
        "q_tile": mosaic.tile((HALVES, ROWS, size), dtype),
        "k_ring": mosaic.tile((HALVES * STAGES, TILE, size), dtype),
        "v_ring": mosaic.tile((HALVES * STAGES, TILE, size), dtype),
        "whole": mosaic.plain((HALVES, ROWS, size), dtype),
        "part": mosaic.plain((HALVES, ROWS, STAGED), jnp.float32) if work.num_slots else None,
        "lse": mosaic.plain((HALVES, ROWS), jnp.float32) if work.num_slots else None,
        "q_here": mosaic.Barrier(num_barriers=HALVES),
        "k_here": mosaic.Barrier(num_arrivals=TILE // shape.block_size, num_barriers=HALVES * STAGES),
        "v_here": mosaic.Barrier(num_arrivals=TILE // shape.block_size, num_barriers=HALVES * STAGES),
        "free": mosaic.Barrier(num_barriers=HALVES * STAGES),
        "staging": mosaic.tile((HALVES, ROWS, TILE), dtype) if shape.interpret else None,
    }
    operands = [q, rows, tables, work.pieces, work.first, num_real] + ([] if sinks is None else [sinks])
    return mosaic.run(
        _body(shape, bool(work.num_slots), sinks is not None),
        *operands,
        out=(
            jax.ShapeDtypeStruct((num_tokens * shape.num_heads, size), dtype),
            jax.ShapeDtypeStruct((slots * shape.num_heads, size), jnp.float32),
            jax.ShapeDtypeStruct((slots, k_heads, ROWS), jnp.float32),
        ),
        scratch={name: value for name, value in scratch.items() if value is not None},
        grid={"block": shape.blocks},
        warpgroups=2 * HALVES,
        interpret=shape.interpret,
        name="paged_decode",
    )


class _Item:
    """Scalars of one item, read from the plan in global memory."""

    def __init__(self, index: jax.Array, pieces: Any, shape: Shape) -> None:
        heads = jnp.int32(shape.num_kv_heads)
        piece = lax.div(index, heads)
        self.head = lax.rem(index, heads)
        self.row, self.start, self.end, self.slot, self.length, self.part = (pieces[piece, c] for c in range(6))
        first = self.start
        if shape.window is not None:
            oldest = jnp.maximum(self.length - shape.window, 0)
            first = jnp.minimum(jnp.maximum(first, oldest // TILE * TILE), (self.end + TILE - 1) // TILE * TILE)
        self.first_tile = lax.div(first, jnp.int32(TILE))
        self.end_tile = lax.div(self.end + (TILE - 1), jnp.int32(TILE))

        self.q_row = self.row * shape.num_heads + self.head * shape.group  # of q as [T * N, H]
        self.eight = lax.div(self.q_row, jnp.int32(8))
        self.offset = lax.rem(self.q_row, jnp.int32(8))  # of the group's rows in the tile


def _body(shape: Shape, split: bool, has_sinks: bool) -> Any:
    def body(*refs: Any, **scratch: Any) -> None:
        q, rows, tables, pieces, first, num_real = refs[:6]
        sinks = refs[6] if has_sinks else None
        out, part_out, lse_out = refs[-3:]
        group = mosaic.warpgroup()
        half = lax.rem(group, jnp.int32(HALVES))
        # Neighbouring lists go to the two halves last: few items spread over all multiprocessors.
        worker = lax.axis_index("block") * HALVES + half
        begin, end = first[worker], first[worker + 1]

        @mosaic.when(group < HALVES)
        def _consumer() -> None:
            mosaic.set_registers(208, action="increase")
            _consume(shape, split, half, begin, end, q, pieces, sinks, out, part_out, lse_out, scratch)
            _zero(shape, num_real[0] + worker, out, scratch["whole"].at[half])
            mosaic.store_done()

        @mosaic.when(group >= HALVES)
        def _producer() -> None:
            mosaic.set_registers(40, action="decrease")
            _produce(shape, half, begin, end, rows, tables, pieces, scratch)

    return body


def _produce(
    shape: Shape, half: jax.Array, begin: jax.Array, end: jax.Array, rows: Any, tables: Any, pieces: Any, scratch: Any
) -> None:
    k_ring, v_ring = scratch["k_ring"], scratch["v_ring"]
    blocks_per_tile = TILE // shape.block_size

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = _Item(index, pieces, shape)
        last_block = lax.div(item.end - 1, jnp.int32(shape.block_size))

        def one_tile(t: jax.Array, done: jax.Array) -> jax.Array:
            stage = half * STAGES + lax.rem(done, jnp.int32(STAGES))
            mosaic.when(done >= STAGES)(lambda: mosaic.wait(scratch["free"].at[stage]))
            for b in range(blocks_per_tile):
                # Beyond the end the last block comes again: no table entry that is not the row's is read.
                block = tables[item.row, jnp.minimum(t * blocks_per_tile + b, last_block)]
                key_row = (block * (2 * shape.num_kv_heads) + item.head) * shape.block_size
                value_row = key_row + shape.num_kv_heads * shape.block_size
                here = mosaic.ds(b * shape.block_size, shape.block_size)
                for ring, row, barrier in ((k_ring, key_row, "k_here"), (v_ring, value_row, "v_here")):
                    source = rows.at[mosaic.ds(row, shape.block_size)]
                    mosaic.copy_in(source, ring.at[stage, here], scratch[barrier].at[stage])
            return done + 1

        return lax.fori_loop(item.first_tile, item.end_tile, one_tile, done)

    done = lax.fori_loop(begin, end, one_item, jnp.int32(0))
    for i in range(STAGES):  # every phase of a barrier is seen by who waits on it
        stage = half * STAGES + i
        mosaic.when(done > i)(functools.partial(mosaic.wait, scratch["free"].at[stage]))


def _consume(
    shape: Shape, split: bool, half: jax.Array, begin: jax.Array, end: jax.Array, q: Any, pieces: Any,
    sinks: Any, out: Any, part_out: Any, lse_out: Any, scratch: Any,
) -> None:  # fmt: skip
    size = shape.head_size
    q_tile, k_ring, v_ring = scratch["q_tile"].at[half], scratch["k_ring"], scratch["v_ring"]

    def fetch_q(index: jax.Array) -> None:
        source = q.at[mosaic.ds(_Item(index, pieces, shape).eight * 8, shape.q_rows)]
        mosaic.copy_in(source, scratch["q_tile"].at[half, mosaic.ds(0, shape.q_rows)], scratch["q_here"].at[half])

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = _Item(index, pieces, shape)
        mosaic.wait(scratch["q_here"].at[half])

        def one_tile(t: jax.Array, carry: Any, masked: bool) -> Any:
            done, acc, high, total = carry
            stage = half * STAGES + lax.rem(done, jnp.int32(STAGES))
            mosaic.wait(scratch["k_here"].at[stage])
            s = mosaic.matmul(q_tile, k_ring.at[stage].transpose((1, 0)), (ROWS, TILE))
            see = None
            if masked:
                position = mosaic.iota((ROWS, TILE), 1) + t * TILE
                see = position < item.end
                if shape.window is not None:
                    see = see & (position >= item.length - shape.window)
            p, fade, high, total = shape.softmax(s, high, total, see)
            acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
            mosaic.wait(scratch["v_here"].at[stage])
            if masked:
                valid = item.end - t * TILE
                mosaic.when(valid < TILE)(lambda: mosaic.zero_rows_from(v_ring.at[stage], valid))
            staging = scratch["staging"].at[half] if shape.interpret else None
            acc = mosaic.accumulate(acc, p.astype(q_tile.dtype), v_ring.at[stage], staging)
            mosaic.arrive(scratch["free"].at[stage])
            return done + 1, acc, high, total

        # Rows beyond the group compute on garbage; -1e30 in place of -inf keeps the real rows' first fade finite.
        high, total = mosaic.rows_full(ROWS, -1e30), mosaic.rows_full(ROWS, 0.0)
        if sinks is not None:
            first = (item.part == 0).astype(jnp.float32)  # the sink belongs to one piece
            high = mosaic.rows_load(sinks.at[item.head]) * first + (first - 1.0) * 1e30
            total = total + first
        carry = (done, mosaic.matrix_full((ROWS, size), 0.0), high, total)
        if shape.window is None:
            full_end = lax.div(item.end, jnp.int32(TILE))
            carry = lax.fori_loop(item.first_tile, full_end, lambda t, c: one_tile(t, c, False), carry)
            carry = lax.fori_loop(full_end, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        else:
            carry = lax.fori_loop(item.first_tile, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        done, acc, high, total = carry
        mosaic.when(index + 1 < end)(lambda: fetch_q(index + 1))
        _store(shape, split, half, item, acc, high, total, out, part_out, lse_out, scratch)
        return done

    mosaic.when(begin < end)(lambda: fetch_q(begin))
    lax.fori_loop(begin, end, one_item, jnp.int32(0))
    mosaic.store_done(reads_only=True)


def _zero(shape: Shape, first: jax.Array, out: Any, staged: Any) -> None:
    """Zeroes every token from `first` on that is this worker's."""
    workers = shape.blocks * HALVES
    num_tokens = out.shape[0] // shape.num_heads
    count = lax.div(jnp.maximum(num_tokens - first, 0) + (workers - 1), jnp.int32(workers))

    @mosaic.when(count > 0)
    def _() -> None:
        staged[...] = jnp.zeros(staged.shape, out.dtype)
        mosaic.commit_smem()

    def one_token(i: jax.Array, _: Any) -> None:
        for head in range(0, shape.num_heads, ROWS):
            heads = min(ROWS, shape.num_heads - head)
            to = out.at[mosaic.ds((first + i * workers) * shape.num_heads + head, heads)]
            mosaic.copy_out(staged.at[mosaic.ds(0, heads)], to)

    lax.fori_loop(0, count, one_token, None)


def _store(
    shape: Shape, split: bool, half: jax.Array, item: _Item, acc: jax.Array, high: jax.Array, total: jax.Array,
    out: Any, part_out: Any, lse_out: Any, scratch: Any,
) -> None:  # fmt: skip
    acc = acc * lax.broadcast_in_dim(1.0 / jnp.maximum(total, 1e-30), acc.shape, [0])
    heads = mosaic.ds(item.offset, shape.group)
    mosaic.store_done(reads_only=True)

    @mosaic.when(item.slot < 0)
    def _whole() -> None:
        staged = scratch["whole"].at[half]
        staged[...] = acc.astype(out.dtype)
        mosaic.commit_smem()
        mosaic.copy_out(staged.at[heads], out.at[mosaic.ds(item.q_row, shape.group)])

    if not split:
        return

    @mosaic.when(item.slot >= 0)
    def _part() -> None:
        part, lse = scratch["part"].at[half], scratch["lse"].at[half]
        lse[...] = high + jnp.log2(jnp.maximum(total, 1e-30))
        row = item.slot * shape.num_heads + item.head * shape.group
        for column in range(0, shape.head_size, STAGED):
            if column:
                mosaic.store_done(reads_only=True)
            part[...] = acc[:, column : column + STAGED]
            mosaic.commit_smem()
            to = part_out.at[mosaic.ds(row, shape.group), mosaic.ds(column, STAGED)]
            mosaic.copy_out(part.at[heads], to)
        mosaic.copy_out(lse, lse_out.at[item.slot, item.head])
