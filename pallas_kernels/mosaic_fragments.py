"""fp8 tiles as float16 operands in registers, and what products need whose long axis is M: Hopper, below vectors.

wgmma takes its left operand from registers. A warp loads pieces of a swizzled fp8 tile as the matrices of
`ldmatrix`, straight or transposed, and converts two numbers with one instruction; nothing goes back to shared
memory. Which number a thread gets then differs from the plain order within each 16: `pair_order` says how.
Knows no op. The interpreter has a form of its own of each.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from octavo.pallas_kernels import mosaic

COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # one number per column of a matrix fragment
OCTET = 8  # rows of one matrix that ldmatrix moves
CHUNK = 16  # bytes of one of its rows


def pair_order(q: jax.Array) -> jax.Array:
    """The last axis in the order in which `keys` has its columns; a multiple of 16."""
    sixteens = q.reshape(*q.shape[:-1], -1, 4, 2, 2)  # a thread of four holds 4 neighbours: the first 2 go first
    return jnp.swapaxes(sixteens, -3, -2).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class Pages:
    """An fp8 tile in shared memory, page by page: [pages, 2, count, size], keys and values of each.

    Attributes:
      ref: the reference, made with `mosaic.tile`.
      interpret: in Pallas' interpreter.
    """

    ref: Any
    interpret: bool

    @property
    def tokens(self) -> int:
        return int(self.ref.shape[0] * self.ref.shape[2])

    @property
    def size(self) -> int:
        return int(self.ref.shape[3])

    def keys(self) -> jax.Array:
        """f16[tokens, size], the columns in `pair_order` (in the interpreter as they are)."""
        if self.interpret:
            return self._plain(0)
        return self._load(_emit_keys, (self.tokens, self.size))

    def values(self) -> jax.Array:
        """f16[rows, tokens], the values transposed, rows in an order that `store_columns` undoes; beyond size any."""
        rows = padded(self.size)
        if self.interpret:
            return jnp.pad(self._plain(1).T, ((0, rows - self.size), (0, 0)))
        return self._load(_emit_values, (rows, self.tokens))

    def _plain(self, side: int) -> jax.Array:
        return self.ref[...][:, side].reshape(self.tokens, self.size).astype(jnp.float16)

    def _load(self, emit: Any, shape: tuple[int, int]) -> jax.Array:
        dtype = jnp.dtype(jnp.float8_e4m3fn)
        swizzle = mosaic.swizzle_of(self.size, dtype)
        transforms = plgpu.TilingTransform((OCTET, swizzle)), plgpu.SwizzleTransform(swizzle)
        place = _Place(self.ref.shape[2] // OCTET, self.size, swizzle)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(transforms),),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=mosaic.MATRIX),
        )
        def load(_: Any, ref: Any) -> Any:
            return _fragment(shape, emit(_address(ref), place, shape))

        return load(self.ref)


def padded(size: int) -> int:
    """Rows that a left operand of `size` rows takes."""
    return -(-size // 64) * 64


def product(a: jax.Array, b: Any, acc: jax.Array, interpret: bool) -> jax.Array:
    """f32 acc + a @ bᵀ: a [m, k] in registers, b [n, k] in shared memory, both in 16 bits."""
    if interpret:
        return acc + _dot(a, b)
    return mosaic.accumulate(acc, a, b.transpose((1, 0)), None)


def product_over[T](a: jax.Array, b: Any, under: Callable[[], T], interpret: bool) -> tuple[jax.Array, T]:
    """(f32 a @ bᵀ, under()), which runs while the tensor cores work on the product."""
    if interpret:
        return _dot(a, b), under()

    def body(acc: Any) -> tuple[jax.Array, T]:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        result = under()
        return acc[...], result

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def _dot(a: jax.Array, b: Any) -> jax.Array:
    return jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32).T, precision="highest")


def matrix_zeros(shape: tuple[int, int]) -> jax.Array:
    return mosaic.matrix_full(shape, 0.0)


def columns_full(columns: int, value: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), COLUMNS)


def columns_load(ref: Any, interpret: bool) -> jax.Array:
    """f32, a number per column, from anywhere in global memory."""
    if interpret:
        return ref[...]
    (columns,) = ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMNS)
    )
    def load(_: Any, ref: Any) -> Any:
        lane = _Lane()
        numbers = [
            _pair([memref.load(ref, [_index(_plus(lane.column, n + e))]) for e in range(2)])
            for n in range(0, columns, OCTET)
        ]
        return _array(numbers, (columns,), COLUMNS)

    return load(ref)


def reduce_columns(kind: str, x: jax.Array, scratch: Any, interpret: bool) -> jax.Array:
    """f32[n], the "max" or the "sum" of each column of f32[m, n].

    Args:
      scratch: f32[n, 4] in shared memory. It is written again no earlier than the caller's next `commit_smem`.
    """
    if interpret:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)
    columns = x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(mosaic.MATRIX, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMNS),
    )
    def reduce(_: Any, x: Any, scratch: Any) -> Any:
        return _array(_reduced(kind, x.registers, scratch), (columns,), COLUMNS)

    return reduce(x, scratch)


def store_rows(x: jax.Array, ref: Any, interpret: bool) -> None:
    """Stores f16[m, n] transposed, into [n, m] in shared memory that was made with `mosaic.tile`."""
    if interpret:
        ref[...] = x.T
        return
    transforms = plgpu.TilingTransform((OCTET, 64)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(mosaic.MATRIX, plgpu.RefType(transforms)))
    def store(_: Any, x: Any, ref: Any) -> None:
        _emit_store_rows(x.registers, _address(ref))

    store(x, ref)


def store_columns(x: jax.Array, ref: Any, interpret: bool) -> None:
    """Stores [rows, n], whose rows are in the order of `Pages.values`, as the leading columns of [n …, width].

    `ref` is plain shared memory, x of its type; rows beyond its width are left out.
    """
    if interpret:
        width = min(ref.shape[1], x.shape[0])
        ref[mosaic.ds(0, x.shape[1]), mosaic.ds(0, width)] = x.T[:, :width]
        return

    @plgpu.inline_mgpu(arg_types=(mosaic.MATRIX, plgpu.RefType()))
    def store(_: Any, x: Any, ref: Any) -> None:
        _emit_store_columns(x.registers, ref)

    store(x, ref)


def store_vector(x: jax.Array, ref: Any, interpret: bool) -> None:
    """Stores f32[n], a number per column, into the first n places of plain shared memory."""
    columns = x.shape[0]
    if interpret:
        ref[mosaic.ds(0, columns)] = x
        return

    @plgpu.inline_mgpu(arg_types=(COLUMNS, plgpu.RefType()))
    def store(_: Any, x: Any, ref: Any) -> None:
        lane = _Lane()
        first = arith.cmpi(arith.CmpIPredicate.ult, lane.thread, _whole(4))
        with mgpu_utils.when(first):
            for n, numbers in enumerate(x.registers.flat):
                for e in range(2):
                    memref.store(_element(numbers, e), ref, [_index(_plus(lane.column, OCTET * n + e))])

    store(x, ref)


class _Lane:
    """What of a fragment is this thread's, i32: rows `row` + 8 h + 16 `warp` + 64 i, columns `column` + e + 8 n."""

    def __init__(self) -> None:
        self.thread = arith.andi(mgpu_utils.thread_idx(), _whole(mosaic.WARPGROUP - 1))
        self.warp = arith.shrui(self.thread, _whole(5))
        self.lane = arith.andi(self.thread, _whole(31))
        self.row = arith.shrui(self.lane, _whole(2))
        self.column = arith.shli(arith.andi(self.lane, _whole(3)), _whole(1))
        self.matrix = arith.shrui(self.lane, _whole(3))  # whose row address this thread gives to ldmatrix
        self.octet_row = arith.andi(self.lane, _whole(7))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where things lie in a tile of pages: octets of a page, bytes of a row, bytes of the swizzle."""

    octets: int
    size: int
    swizzle: int

    def row_of(self, octet: Any, side: int) -> Any:
        """i32, bytes: where the tile's rows 8 * octet … begin."""
        shift = self.octets.bit_length() - 1
        page, inside = arith.shrui(octet, _whole(shift)), arith.andi(octet, _whole(self.octets - 1))
        octets = arith.addi(arith.shli(page, _whole(shift + 1)), inside)
        return arith.muli(_plus(octets, side * self.octets), _whole(OCTET * self.size))

    def chunk_of(self, chunk: Any, lane: _Lane) -> Any:
        """i32, bytes from there to this lane's row of the matrix in 16 bytes number `chunk`."""
        per_tile = self.swizzle // CHUNK  # 8, 4 or 2: a power of two
        shift = per_tile.bit_length() - 1
        tile, inside = arith.shrui(chunk, _whole(shift)), arith.andi(chunk, _whole(per_tile - 1))
        mixed = arith.xori(inside, arith.shrui(lane.octet_row, _whole(3 - shift)))
        at = arith.addi(
            arith.muli(tile, _whole(OCTET * self.swizzle)), arith.muli(lane.octet_row, _whole(self.swizzle))
        )
        return arith.addi(at, arith.shli(mixed, _whole(4)))


def _emit_keys(base: Any, place: _Place, shape: tuple[int, int]) -> Any:
    """Registers of a fragment; a matrix's 16 bytes are the numbers of two fragment octets of columns."""
    tokens, size = shape
    lane = _Lane()
    registers = np.empty((tokens // 64, size // OCTET, 2), dtype=object)
    # Matrices of one load: rows 0 and 8 of one chunk, rows 0 and 8 of the next.
    low, high = arith.andi(lane.matrix, _whole(1)), arith.shrui(lane.matrix, _whole(1))
    for i in range(tokens // 64):
        octet = arith.addi(arith.addi(arith.shli(lane.warp, _whole(1)), low), _whole(OCTET * i))
        row = arith.addi(base, place.row_of(octet, 0))
        for pair in range(size // (2 * CHUNK)):
            loaded = _ldmatrix(arith.addi(row, place.chunk_of(_plus(high, 2 * pair), lane)), "")
            for m, numbers in enumerate(loaded):
                first = 2 * (2 * pair + m // 2)
                registers[i, first, m % 2], registers[i, first + 1, m % 2] = _widened(numbers)
    return registers


def _emit_values(base: Any, place: _Place, shape: tuple[int, int]) -> Any:
    """Registers of a fragment; row 16 c + r is column 16 c + 2 r of the values, row 16 c + 8 + r the one after."""
    rows, tokens = shape
    lane = _Lane()
    registers = np.empty((rows // 64, tokens // OCTET, 2), dtype=object)
    for i in range(rows // 64):
        chunk = arith.minui(_plus(lane.warp, 4 * i), _whole(place.size // CHUNK - 1))
        column = arith.addi(base, place.chunk_of(chunk, lane))
        for four in range(tokens // (4 * OCTET)):
            row = place.row_of(_plus(lane.matrix, 4 * four), 1)
            for m, numbers in enumerate(_ldmatrix(arith.addi(column, row), ".trans")):
                # Bytes: two neighbours of one token, two of the next; wanted: one column of both, then the other.
                by_column = _ptx("prmt.b32 $0, $1, $1, 0x3120;", numbers, result_types=_i32())
                registers[i, 4 * four + m, 0], registers[i, 4 * four + m, 1] = _widened(by_column)
    return registers


def _ldmatrix(address: Any, how: str) -> tuple[Any, ...]:
    return _ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{$0, $1, $2, $3}}, [$4];", address,
        result_types=[_i32()] * 4, has_side_effects=True, convergent=True,
    )  # fmt: skip


def _widened(four: Any) -> tuple[Any, Any]:
    """The lower and the upper two of four e4m3 numbers as f16 pairs."""
    return _ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        four, result_types=[_i32()] * 2,
    )  # fmt: skip


def _reduced(kind: str, registers: Any, scratch: Any) -> list[Any]:
    """Pairs for each eight columns: within a thread, a warp's threads, the four warps."""
    lane, f32 = _Lane(), ir.F32Type.get()
    combine = arith.maxnumf if kind == "max" else arith.addf
    blocks = registers.shape[1]
    for n in range(blocks):
        for e in range(2):
            numbers = [_element(pair, e) for pair in registers[:, n].flat]
            while len(numbers) > 1:
                numbers = [combine(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]
            (value,) = numbers
            for distance in (4, 8, 16):
                value = combine(value, mgpu_utils.shfl_bfly(value, distance))
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane.lane, _whole(4))):
                memref.store(value, scratch, [_index(_plus(lane.column, OCTET * n + e)), _index(lane.warp)])
    mgpu_utils.warpgroup_barrier()
    base = arith.addi(_address(scratch), arith.shli(lane.column, _whole(4)))
    result = []
    for n in range(blocks):
        pair = []
        for e in range(2):
            numbers = _ptx(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", _plus(base, CHUNK * (OCTET * n + e)),
                result_types=[f32] * 4, has_side_effects=True,
            )  # fmt: skip
            pair.append(combine(combine(numbers[0], numbers[1]), combine(numbers[2], numbers[3])))
        result.append(_pair(pair))
    return result


def _emit_store_rows(registers: Any, base: Any) -> None:
    lane = _Lane()
    tiles, blocks = registers.shape[:2]
    # Lanes 0 … 15 give addresses: column n of 8, and which of the two octets of rows.
    chunk = arith.addi(arith.shli(lane.warp, _whole(1)), arith.andi(lane.matrix, _whole(1)))
    inside = arith.shli(arith.xori(chunk, lane.octet_row), _whole(4))
    at = arith.addi(arith.addi(base, arith.shli(lane.octet_row, _whole(7))), inside)
    for i in range(tiles):
        for n in range(blocks):
            low, high = (mgpu_utils.bitcast(pair, _i32()) for pair in registers[i, n].flat)
            _ptx(
                "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};",
                _plus(at, (n * tiles + i) * 1024), low, high, has_side_effects=True, convergent=True,
            )  # fmt: skip


def _emit_store_columns(registers: Any, ref: Any) -> None:
    lane = _Lane()
    (_, width), element = ir.MemRefType(ref.type).shape, ir.MemRefType(ref.type).element_type
    size = mgpu_utils.bitwidth(element) // 8
    tiles, blocks = registers.shape[:2]
    base = arith.addi(_address(ref), arith.muli(lane.column, _whole(width * size)))
    for i in range(tiles):
        first = _plus(arith.addi(arith.shli(lane.warp, _whole(4)), arith.shli(lane.row, _whole(1))), 64 * i)
        there = arith.cmpi(arith.CmpIPredicate.ult, first, _whole(width))
        for n in range(blocks):
            low, high = registers[i, n].flat
            for e in range(2):
                pair = [_element(low, e), _element(high, e)]
                at = _plus(arith.addi(base, arith.muli(first, _whole(size))), (OCTET * n + e) * width * size)
                if size == 4:
                    _ptx("st.shared.v2.f32 [$0], {$1, $2};", at, *pair, predicate=there, has_side_effects=True)
                else:
                    bits = mgpu_utils.bitcast(_pair(pair), _i32())
                    _ptx("st.shared.b32 [$0], $1;", at, bits, predicate=there, has_side_effects=True)


def _fragment(shape: tuple[int, int], registers: Any) -> Any:
    """The f16 matrix whose registers [m / 64, n / 8, 2] these are, as i32."""
    half = ir.VectorType.get((2,), ir.F16Type.get())
    return _array([mgpu_utils.bitcast(r, half) for r in registers.flat], shape, mosaic.MATRIX)


def _array(registers: list[Any], shape: tuple[int, ...], layout: Any) -> Any:
    form = layout.to_mgpu()
    numbers = np.array(registers, dtype=object).reshape(form.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=numbers, _layout=form, _is_signed=None)


def _address(ref: Any) -> Any:
    return _ptx("mov.b32 $0, $1;", mgpu_utils.memref_ptr(ref), result_types=_i32())


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _whole(value: int) -> Any:
    return mgpu_utils.c(value, _i32())


def _plus(value: Any, more: int) -> Any:
    return arith.addi(value, _whole(more)) if more else value


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _pair(numbers: list[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((2,), numbers[0].type), numbers)


def _element(numbers: Any, index: int) -> Any:
    return vector.extract(numbers, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


_ptx = mgpu_utils.inline_ptx
