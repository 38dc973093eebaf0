"""Decode rows over an fp8 cache on Hopper: products turned round, the cache widened in registers.

As mosaic_decode.py: flash decoding (Dao et al. 2023), two independent halves of a block, each with a list of
items. But a query tile of 64 rows is nearly empty, and fp8 wants 16 bits before the tensor cores (values cannot
be read transposed in fp8). So tokens and columns of the cache are the long axis here: scoresᵀ = K qᵀ and
outᵀ = Vᵀ pᵀ, with K and Vᵀ as left operands, which wgmma takes from registers, where consumers convert them to
float16 (exact); 8 query heads cost an eighth of 64. A copy brings a block's keys and values at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels import mosaic, mosaic_fragments
from octavo.pallas_kernels.mosaic_fragments import Pages
from octavo.pallas_kernels.ragged_paged_attention.mosaic_decode import Item, part_width, zero
from octavo.pallas_kernels.ragged_paged_attention.mosaic_tiles import ROWS, Shape
from octavo.pallas_kernels.ragged_paged_attention.worklist import DecodeWork

HALVES = 2
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 40
SHARED_BYTES, MOST_STAGES = 232_448, 8  # of a multiprocessor's shared memory; of a half


def stages(shape: Shape) -> int:
    """Tiles of a half whose copies are in flight: what fits."""
    size, tile = shape.head_size, shape.decode_tile
    others = shape.q_rows * (4 * part_width(size) + 2 * size + 2 * tile + 16) + 4_096  # results, queries, weights
    return min(shape.parameters.decode_stages or MOST_STAGES, (SHARED_BYTES // HALVES - others) // (2 * tile * size))


def decode_fp8(
    q: jax.Array, cache: jax.Array, tables: jax.Array, work: DecodeWork, num_real: jax.Array,
    sinks: jax.Array | None, scales: jax.Array | None, shape: Shape, out: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Runs all items, and zeroes the padded tokens.

    Args:
      q: float16[rows * N, H], padded so that every row's fetch ends inside, columns in `pair_order` (but
        for the interpreter).
      cache: e4m3[blocks * 2, K * S, H].
      others: as in `mosaic_decode.decode`.

    Returns:
      As `mosaic_decode.decode`.
    """
    slots = max(work.num_slots, 1)
    size, columns, tile = shape.head_size, shape.q_rows, shape.decode_tile
    count = min(shape.block_size, tile)
    num_stages = HALVES * stages(shape)
    scratch = {
        "ring": mosaic.tile((num_stages, tile // count, 2, count, size), cache.dtype),
        "here": mosaic.Barrier(num_arrivals=tile // count, num_barriers=num_stages),
        "free": mosaic.Barrier(num_barriers=num_stages),
        "q_tile": mosaic.tile((HALVES, columns, size), q.dtype),
        "q_here": mosaic.Barrier(num_barriers=HALVES),
        "p_tile": mosaic.tile((HALVES, columns, tile), q.dtype),
        "warps": mosaic.plain((HALVES, columns, 4), jnp.float32),
    }
    whole = mosaic.plain((HALVES, -(-columns // 16) * 16, size), out.dtype)  # zeros of 96 ask for whole sixteens
    if work.num_slots:
        scratch["result"] = mosaic.either(whole, mosaic.plain((HALVES, columns, part_width(size)), jnp.float32))
        scratch["lse"] = mosaic.plain((HALVES, ROWS), jnp.float32)
    else:
        scratch["whole"] = whole
    given = {"sinks": sinks, "scales": scales}
    names = [name for name, value in given.items() if value is not None]
    return mosaic.run(
        _body(shape, bool(work.num_slots), names),
        *(q, cache, tables, work.pieces, work.first, num_real, *(given[name] for name in names)),
        out=(
            out,
            jax.ShapeDtypeStruct((slots * shape.num_heads, part_width(size)), jnp.float32),
            jax.ShapeDtypeStruct((slots, shape.num_kv_heads, ROWS), jnp.float32),
        ),
        scratch=scratch,
        grid={"block": shape.blocks},
        warpgroups=2 * HALVES,
        interpret=shape.interpret,
        name="paged_decode_fp8",
    )


def _body(shape: Shape, split: bool, names: list[str]) -> Any:
    def body(*refs: Any, **scratch: Any) -> None:
        q, cache, tables, pieces, first, num_real, *more = refs[:-3]
        given = dict(zip(names, more, strict=True))
        if split:
            scratch["whole"], scratch["part"] = scratch["result"]
        group = mosaic.warpgroup()
        half = lax.rem(group, jnp.int32(HALVES))
        worker = lax.axis_index("block") * HALVES + half
        begin, end = first[worker], first[worker + 1]

        @mosaic.when(group < HALVES)
        def _consumer() -> None:
            mosaic.set_registers(CONSUMER_REGISTERS, action="increase")
            _consume(shape, split, half, begin, end, q, pieces, given, refs[-3:], scratch)
            columns = mosaic.ds(0, shape.head_size)
            zero(shape, num_real[0] + worker, shape.blocks * HALVES, columns, refs[-3], scratch["whole"].at[half])
            mosaic.store_done()

        @mosaic.when(group >= HALVES)
        def _producer() -> None:
            mosaic.set_registers(PRODUCER_REGISTERS, action="decrease")
            _produce(shape, half, begin, end, cache, tables, pieces, scratch)

    return body


def _stage(shape: Shape, half: jax.Array, done: jax.Array) -> jax.Array:
    return half * stages(shape) + lax.rem(done, jnp.int32(stages(shape)))


def _produce(
    shape: Shape, half: jax.Array, begin: jax.Array, end: jax.Array, cache: Any, tables: Any, pieces: Any,
    scratch: dict[str, Any],
) -> None:  # fmt: skip
    size, tile = jnp.int32(shape.block_size), shape.decode_tile
    count = min(shape.block_size, tile)
    copies = tile // count

    def place(item: Item, t: jax.Array, b: int) -> tuple[jax.Array, Any]:
        """The block of tile t's copy b, and where in it that begins. Beyond the end the last block comes again."""
        if shape.block_size > tile:
            block = lax.div(t * tile, size)
            return tables[item.row, block], t * tile - block * size
        return tables[item.row, jnp.minimum(t * copies + b, lax.div(item.end - 1, size))], 0

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = Item(index, pieces, shape)

        def one_tile(t: jax.Array, done: jax.Array) -> jax.Array:
            stage = _stage(shape, half, done)
            places = [place(item, t, b) for b in range(copies)]  # on their way under the wait
            mosaic.when(done >= stages(shape))(lambda: mosaic.wait(scratch["free"].at[stage]))
            for b, (block, inside) in enumerate(places):
                rows = mosaic.ds(item.head * shape.block_size + inside, count)
                source = cache.at[mosaic.ds(block * 2, 2), rows]
                mosaic.copy_in(source, scratch["ring"].at[stage, b], scratch["here"].at[stage])
            return done + 1

        return lax.fori_loop(item.first_tile, item.end_tile, one_tile, done)

    done = lax.fori_loop(begin, end, one_item, jnp.int32(0))
    for i in range(stages(shape)):  # every phase of a barrier is seen by who waits on it
        mosaic.when(done > i)(lambda i=i: mosaic.wait(scratch["free"].at[half * stages(shape) + i]))


def _consume(
    shape: Shape, split: bool, half: jax.Array, begin: jax.Array, end: jax.Array, q: Any, pieces: Any,
    given: dict[str, Any], outs: Any, scratch: dict[str, Any],
) -> None:  # fmt: skip
    columns, tile, interpret = shape.q_rows, shape.decode_tile, shape.interpret
    sinks, scales = given.get("sinks"), given.get("scales")
    rows = mosaic_fragments.padded(shape.head_size)
    q_tile, q_here, p_tile = (scratch[name].at[half] for name in ("q_tile", "q_here", "p_tile"))
    warps = scratch["warps"].at[half]

    def fetch_q(index: jax.Array) -> None:
        mosaic.copy_in(q.at[mosaic.ds(Item(index, pieces, shape).eight * 8, columns)], q_tile, q_here)

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = Item(index, pieces, shape)
        k_scale = None if scales is None else scales[0, item.head]
        mosaic.wait(q_here)

        def see(t: jax.Array) -> jax.Array:
            position = mosaic.iota((tile, columns), 0) + t * tile
            seen = position < item.end
            return seen if shape.window is None else seen & (position >= item.length - shape.window)

        def one_tile(t: jax.Array, carry: Any, masked: bool) -> Any:
            done, acc, high, sums = carry
            stage = _stage(shape, half, done)
            pages = Pages(scratch["ring"].at[stage], interpret)
            mosaic.wait(scratch["here"].at[stage])
            s, values = mosaic_fragments.product_over(pages.keys(), q_tile, pages.values, interpret)
            mosaic.arrive(scratch["free"].at[stage])
            s, factor = shape.scaled(s, see(t) if masked else None, k_scale)
            new_high = jnp.maximum(high, mosaic_fragments.reduce_columns("max", s, warps, interpret) * factor)
            fade = jnp.exp2(high - new_high)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_high, s.shape, [1]))
            mosaic_fragments.store_rows(p.astype(q_tile.dtype), p_tile, interpret)
            mosaic.commit_smem()
            if masked:
                values = jnp.where(mosaic.iota((rows, tile), 1) < item.end - t * tile, values, jnp.zeros_like(values))
            acc = acc * lax.broadcast_in_dim(fade, acc.shape, [1])
            acc = mosaic_fragments.product(values, p_tile, acc, interpret)
            return done + 1, acc, new_high, sums * lax.broadcast_in_dim(fade, sums.shape, [1]) + p

        # Columns beyond the group compute on garbage; -1e30 in place of -inf keeps the real ones' first fade finite.
        high = mosaic_fragments.columns_full(columns, -1e30)
        if sinks is not None:
            first = (item.part == 0).astype(jnp.float32)  # the sink belongs to one piece
            own = sinks.at[mosaic.ds(8 + item.head * shape.group - item.offset, columns)]
            sink = mosaic_fragments.columns_load(own, interpret) * first + (first - 1.0) * 1e30
            high = sink
        zeros = mosaic_fragments.matrix_zeros
        carry = (done, zeros((rows, columns)), high, zeros((tile, columns)))
        full_end = item.first_tile if shape.window is not None else lax.div(item.end, jnp.int32(tile))
        if shape.window is None:
            carry = lax.fori_loop(item.first_tile, full_end, lambda t, c: one_tile(t, c, False), carry)
        carry = lax.fori_loop(full_end, item.end_tile, lambda t, c: one_tile(t, c, True), carry)
        done, acc, high, sums = carry
        mosaic.when(index + 1 < end)(lambda: fetch_q(index + 1))
        total = mosaic_fragments.reduce_columns("sum", sums, warps, interpret)
        if sinks is not None:
            total = total + jnp.exp2(sink - high) * first
        v_scale = 1.0 if scales is None else scales[1, item.head]
        _store(shape, split, half, item, acc, high, total, v_scale, outs, scratch)
        return done

    mosaic.when(begin < end)(lambda: fetch_q(begin))
    lax.fori_loop(begin, end, one_item, jnp.int32(0))
    mosaic.store_done(reads_only=True)


def _store(
    shape: Shape, split: bool, half: jax.Array, item: Item, acc: jax.Array, high: jax.Array, total: jax.Array,
    v_scale: Any, outs: Any, scratch: dict[str, Any],
) -> None:  # fmt: skip
    out, part_out, lse_out = outs
    total = jnp.maximum(total, 1e-30)
    acc = acc * lax.broadcast_in_dim(v_scale / total, acc.shape, [1])
    heads = mosaic.ds(item.offset, shape.group)
    mosaic.store_done(reads_only=True)

    @mosaic.when(item.slot < 0)
    def _whole() -> None:
        staged = scratch["whole"].at[half]
        mosaic_fragments.store_columns(acc.astype(out.dtype), staged, shape.interpret)
        mosaic.commit_smem()
        mosaic.copy_out(staged.at[heads], out.at[mosaic.ds(item.q_row, shape.group)])

    if not split:
        return

    @mosaic.when(item.slot >= 0)
    def _part() -> None:
        part, lse = scratch["part"].at[half], scratch["lse"].at[half]
        mosaic_fragments.store_vector(high + jnp.log2(total), lse, shape.interpret)
        mosaic_fragments.store_columns(acc, part, shape.interpret)
        mosaic.commit_smem()
        row = item.slot * shape.num_heads + item.head * shape.group
        mosaic.copy_out(part.at[heads], part_out.at[mosaic.ds(row, shape.group)])
        mosaic.copy_out(lse, lse_out.at[item.slot, item.head])
