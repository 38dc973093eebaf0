"""What each thread of a block on Hopper does by itself, below what vectors can say. Knows no op.

The interpreter has a form of its own of each. MLIR's own types are not in the stubs, hence Any.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

from octavo.pallas_kernels import mosaic


class Words:
    """u32 in registers, with the operators that ciphers need."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, op: Callable[[Any, Any], Any], other: Any) -> "Words":
        if isinstance(other, np.uint32):
            return Words(op(self.value, _constant(self.value.type, int(other))))
        return Words(op(self.value, other.value))

    def __add__(self, other: Any) -> "Words":
        return self._with(arith.addi, other)

    def __xor__(self, other: Any) -> "Words":
        return self._with(arith.xori, other)

    def __or__(self, other: Any) -> "Words":
        return self._with(arith.ori, other)

    def __lshift__(self, other: Any) -> "Words":
        return self._with(arith.shli, other)

    def __rshift__(self, other: Any) -> "Words":
        return self._with(arith.shrui, other)


def mixed(
    mix: Callable[..., Any], first: jax.Array, second: jax.Array, counters: jax.Array, width: int, interpret: bool
) -> jax.Array:
    """`mix(first, second, counters)`, u32[], u32[] and u32[n] in `lanes` of `width`, for a `mix` made of operators.

    The same as calling it, but for the time to lower it: that grows faster than the operations on vectors.
    """
    if interpret:
        result: jax.Array = mix(first, second, counters)
        return result
    layout, scalar = mosaic.lanes(counters.shape[0], width), plgpu.Layout.WG_SPLAT(())
    same = plgpu.ShapeDtypeStruct(counters.shape, jnp.uint32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(scalar, scalar, layout), return_type=same)
    def emit(_: Any, first: Any, second: Any, counters: Any) -> Any:
        def register(number: Any) -> Any:
            keys = (Words(vector.broadcast(number.type, key.registers.item())) for key in (first, second))
            return mix(*keys, Words(number)).value

        registers = np.empty_like(counters.registers)
        for place in np.ndindex(registers.shape):
            registers[place] = register(counters.registers[place])
        return mgpu.FragmentedArray(_registers=registers, _layout=counters.layout, _is_signed=False)

    mixed: jax.Array = emit(first, second, counters)
    return mixed


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How the numbers of a row fall into groups: static. Tile t has those from min(t * tile, size - tile) on.

    Attributes:
      size: numbers of a row.
      end: numbers from here up are left out.
      stride: groups of a tile, one number after the other; a multiple of 128 * width.
      width: neighbouring groups of one thread.
      tile: numbers of a tile, a multiple of `stride`.
    """

    size: int
    end: int
    stride: int
    width: int
    tile: int


def list_where(
    row: Any, bounds: Any, floor: jax.Array, tiles: tuple[jax.Array, jax.Array], grouping: Grouping,
    lists: tuple[Any, Any], count: Any, interpret: bool,
) -> None:  # fmt: skip
    """Adds the numbers >= floor of some tiles and their places to a list in global memory, in any order.

    Reads only groups whose largest number is that large: few, where few numbers are.

    Args:
      row: reference to [size].
      bounds: reference to f32[stride], each group's largest number in these tiles.
      floor: f32[].
      tiles: i32[] each, the first and the one after the last.
      grouping: which numbers are a group's.
      lists: references to f32[n] and i32[n]; what does not fit is dropped.
      count: reference to i32[1], how many there are; it counts the dropped too.
    """
    if interpret:
        _list_slowly(row, floor, tiles, grouping, lists, count)
        return
    layout, scalar, ref = mosaic.lanes(grouping.stride, grouping.width), plgpu.Layout.WG_SPLAT(()), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(layout, layout, scalar, scalar, scalar, ref, ref, ref, ref))
    def emit(
        _: Any,
        bounds: Any,
        groups: Any,
        floor: Any,
        first: Any,
        last: Any,
        row: Any,
        out: Any,
        out_ids: Any,
        count: Any,
    ) -> None:
        low, start, end = (scalar.registers.flat[0] for scalar in (floor, first, last))
        for numbers, names in zip(bounds.registers.flat, groups.registers.flat, strict=True):
            for i in range(ir.VectorType(numbers.type).shape[0]):
                with mgpu_utils.when(arith.cmpf(arith.CmpFPredicate.OGE, _element(numbers, i), low)):
                    _list_group(_element(names, i), low, (start, end), row, grouping, (out, out_ids), count)

    groups = mosaic.lanes_iota(grouping.stride, grouping.width)
    emit(mosaic.lanes_load(bounds, grouping.width), groups, floor, *tiles, row, *lists, count)


def _list_slowly(
    row: Any,
    floor: jax.Array,
    tiles: tuple[jax.Array, jax.Array],
    grouping: Grouping,
    lists: tuple[Any, Any],
    count: Any,
) -> None:
    """The interpreter's form of `list_where`: all of a tile at once."""

    def tile(t: jax.Array, _: Any) -> None:
        start = jnp.minimum(t * grouping.tile, grouping.size - grouping.tile)
        values = row[mosaic.ds(start, grouping.tile)].astype(jnp.float32)
        ids = start + jnp.arange(grouping.tile, dtype=jnp.int32)
        keep = (values >= floor) & (ids >= t * grouping.tile) & (ids < grouping.end)
        before = count[0]
        at = jnp.where(keep, before + jnp.cumsum(keep.astype(jnp.int32)) - 1, lists[0].shape[0])
        for ref, new in zip(lists, (values, ids), strict=True):
            ref[...] = ref[...].at[at].set(new, mode="drop")
        count[0] = before + jnp.sum(keep.astype(jnp.int32))

    lax.fori_loop(*tiles, tile, None)


def _list_group(
    group: Any, low: Any, tiles: tuple[Any, Any], row: Any, grouping: Grouping, lists: tuple[Any, Any], count: Any
) -> None:
    """One thread adds one group's numbers; all of a tile are loaded before one is looked at."""
    i32, f32, index = ir.IntegerType.get_signless(32), ir.F32Type.get(), ir.IndexType.get()

    def whole(value: int) -> Any:
        return _constant(i32, value)

    room, pointer = whole(ir.MemRefType(lists[0].type).shape[0]), mgpu_utils.memref_ptr(count)
    with _loop(*tiles) as t:
        fresh = arith.muli(t, whole(grouping.tile))
        start = arith.minsi(fresh, whole(grouping.size - grouping.tile))
        found = []
        for offset in range(0, grouping.tile, grouping.stride):
            place = arith.addi(arith.addi(start, group), whole(offset))
            value = memref.load(row, [arith.index_cast(index, place)])
            found.append((place, value if value.type == f32 else arith.extf(f32, value)))
        for place, value in found:
            hit = arith.cmpf(arith.CmpFPredicate.OGE, value, low)
            hit = arith.andi(hit, arith.cmpi(arith.CmpIPredicate.sge, place, fresh))
            hit = arith.andi(hit, arith.cmpi(arith.CmpIPredicate.slt, place, whole(grouping.end)))
            with mgpu_utils.when(hit):
                slot = mgpu_utils.inline_ptx(
                    "atom.add.u32 $0, [$1], 1;", pointer, result_types=i32, has_side_effects=True
                )
                with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, slot, room)):
                    at = arith.index_cast(index, slot)
                    memref.store(value, lists[0], [at])
                    memref.store(place, lists[1], [at])


@contextmanager
def _loop(first: Any, last: Any) -> Iterator[Any]:
    """The body of a loop over i32."""
    make: Any = scf.ForOp  # the stubs know the generated class only
    loop = make(first, last, _constant(ir.IntegerType.get_signless(32), 1))
    with ir.InsertionPoint(loop.body):
        yield loop.induction_variable
        scf.yield_([])


def _element(numbers: Any, index: int) -> Any:
    return vector.extract(numbers, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def _constant(kind: Any, value: int) -> Any:
    """32 bits, or a vector of equal ones."""
    i32 = ir.IntegerType.get_signless(32)
    one = mgpu_utils.c(value if value < 1 << 31 else value - (1 << 32), i32)
    return one if kind == i32 else vector.broadcast(kind, one)
